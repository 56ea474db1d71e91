"""What lies between an env or a dataset and the network: images, prompts, state and actions; files as LeRobot's.

    policy_preprocessor.json    rename, (relative actions,) normalise, prompt, tokenise     + statistics as safetensors
    policy_postprocessor.json   un-normalise, (absolute actions)                            + statistics as safetensors

The order of the steps differs between the families' files; what they compute does not: actions become relative before
they are normalised, and pi0.5's prompt holds the normalised state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from policies.checkpoint_folder import read_json, write_json
from policies.pi.config import ACTION, STATE, WHOLE, Family, PiConfig
from policies.published_folder import read_tensors
from rlinf_embodied.data.normalisation import Normalisation, NormMode
from rlinf_embodied.data.relative_actions import RelativeActions
from rlinf_embodied.errors import CheckpointError

_PRE, _POST = "policy_preprocessor", "policy_postprocessor"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_BACKBONES = {
    Family.pi0: "google/paligemma-3b-pt-224",
    Family.pi05: "google/paligemma-3b-pt-224",
    Family.smolvla: "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
}
_PROMPT_STEP = {
    Family.pi0: "pi0_new_line_processor",
    Family.pi05: "pi05_prepare_state_tokenizer_processor_step",
    Family.smolvla: "smolvla_new_line_processor",
}
_KNOWN = {
    *("rename_observations_processor", "to_batch_processor", "device_processor", "tokenizer_processor"),
    *("relative_actions_processor", "absolute_actions_processor", "normalizer_processor", "unnormalizer_processor"),
    *_PROMPT_STEP.values(),
}
_STATE_EDGES = np.linspace(-1, 1, 256 + 1)[:-1]  # of the digits in pi0.5's prompt


# --------------------------------------------------------------------------------------------------------------- images
def resized(images: Tensor, size: tuple[int, int], centred: bool) -> Tensor:
    """Returns images [B, 3, H, W] in [0, 1] with their longer side fitted to (height, width), in [-1, 1].

    Bilinear without antialiasing.  The border is -1: around the image (`centred`), or on its left and top.
    """
    height, width = size
    given_height, given_width = images.shape[-2:]
    if (given_height, given_width) != (height, width):
        ratio = max(given_width / width, given_height / height)
        inner = int(given_height / ratio), int(given_width / ratio)
        images = F.interpolate(images, size=inner, mode="bilinear", align_corners=False)
        missing_height, missing_width = max(0, height - inner[0]), max(0, width - inner[1])
        left, top = (missing_width // 2, missing_height // 2) if centred else (missing_width, missing_height)
        images = F.pad(images.clamp(0, 1), (left, missing_width - left, top, missing_height - top))
    return images * 2 - 1


# -------------------------------------------------------------------------------------------------------------- prompts
class PromptTokenizer:
    """The tokenizer of a backbone, through tokenizer.json alone; rows are padded on the right."""

    def __init__(self, folder: Path, max_length: int, longest: bool) -> None:
        """Reads it.

        Args:
            folder: of the backbone.
            max_length: of a prompt in tokens; further ones are cut off.
            longest: rows are as long as the longest of them, instead of max_length.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        path, self.max_length, self._longest = folder / _TOKENIZER, max_length, longest
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(
                f"{path}, which turns instructions into tokens, cannot be read ({error}): copy the files of the "
                "backbone's tokenizer there, or name their folder as policy.options.backbone"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)
        described = read_json(folder / _TOKENIZER_CONFIG, WHOLE) if (folder / _TOKENIZER_CONFIG).is_file() else {}
        self._described = described
        self._pad = self._number("pad_token", "<pad>")

    def _number(self, name: str, otherwise: str) -> int:
        token = self._described.get(name, otherwise)
        number = self._tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token)
        if number is None:
            raise CheckpointError(f"{name} is {token!r}, but {_TOKENIZER} has no such token: copy both files again")
        return number

    @property
    def image_tokens(self) -> tuple[int, int]:
        """The ids of the tokens around an image and of a whole image, of SmolVLM's tokenizer."""
        around = self._number("fake_image_token", "<fake_token_around_image>")
        return around, self._number("global_image_token", "<global-img>")

    def __call__(self, prompts: Sequence[str], fixed: bool = False) -> tuple[Tensor, Tensor]:
        """Returns ids int64 [B, L] and which of them are no padding, bool [B, L]; if `fixed`, L is max_length."""
        rows = [self._tokenizer.encode(prompt).ids for prompt in prompts]
        length = max(map(len, rows)) if self._longest and not fixed else self.max_length
        padded = [ids + [self._pad] * (length - len(ids)) for ids in rows]
        present = [[True] * len(ids) + [False] * (length - len(ids)) for ids in rows]
        return torch.tensor(padded, dtype=torch.long), torch.tensor(present)


def prompt_for(family: Family, task: str, state: Tensor) -> str:
    """Returns the text that a network was trained with, of an instruction and the normalised state [D]."""
    if family is not Family.pi05:
        return task if task.endswith("\n") else task + "\n"
    digits = np.digitize(state.cpu().numpy(), bins=_STATE_EDGES) - 1
    cleaned = task.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {cleaned}, State: {' '.join(map(str, digits))};\nAction: "


# ---------------------------------------------------------------------------------------------------- state and actions
@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """What the files of a folder say; state and actions are in the units of the data, float32."""

    family: Family
    state: Normalisation
    action: Normalisation
    relative: RelativeActions = field(default_factory=RelativeActions)
    max_length: int = 48  # tokens of a prompt
    longest: bool = False  # whether rows are padded to the longest one only
    tokenizer_name: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)  # of a dataset's features to the policy's

    def normalised_state(self, state: Tensor) -> Tensor:
        """Returns what the network reads of a state [B, D]."""
        return self.state.forward(state)

    def normalised_actions(self, actions: Tensor, state: Tensor) -> Tensor:
        """Returns what the network is to predict for actions [B, C, A], seen from a state [B, D]."""
        if self.relative.enabled:
            actions = actions - self.relative.offset(state, actions.shape[2])
        return self.action.forward(actions)

    def robot_actions(self, normalised: Tensor, state: Tensor) -> Tensor:
        """Returns actions of the robot [B, C, A], whose state was [B, D] when they were predicted."""
        actions = self.action.inverse(normalised)
        return actions + self.relative.offset(state, actions.shape[2]) if self.relative.enabled else actions

    def prompts(self, tasks: Sequence[str], normalised_state: Tensor) -> list[str]:
        """Returns the texts of B instructions and normalised states [B, D]."""
        return [prompt_for(self.family, task, row) for task, row in zip(tasks, normalised_state, strict=True)]

    def with_statistics(self, statistics: Mapping[str, Mapping[str, Any]]) -> Processors:
        """Returns the processors with other statistics: meta/stats.json of a LeRobot dataset.

        Raises:
            CheckpointError: they lack state or actions.
            DataError: they lack what the modes need.
        """
        made = {}
        for name, old in ((STATE, self.state), (ACTION, self.action)):
            if name not in statistics:
                raise CheckpointError(f"the statistics have no {name!r}: give meta/stats.json of a LeRobot dataset")
            kinds = {kind: torch.tensor(value, dtype=torch.float32) for kind, value in statistics[name].items()}
            made[name] = replace(old, statistics=kinds)
        return replace(self, state=made[STATE], action=made[ACTION])


# ---------------------------------------------------------------------------------------------------------------- files
def read_processors(folder: Path, config: PiConfig) -> Processors:
    """Returns the processors of a folder; where it has none, those that config.json asks for, without statistics.

    Raises:
        CheckpointError: a file is missing or damaged, or has a step that is unknown here.
    """
    found = _defaults(config)
    if not (folder / f"{_PRE}.json").is_file():
        return found
    try:
        steps = {**_steps(folder, _PRE), **{f"post {k}": v for k, v in _steps(folder, _POST).items()}}
        wrong = [name for name in steps if name.removeprefix("post ") not in _KNOWN]
        if wrong:
            raise ValueError(f"the steps {wrong} are not known here")
        token, joints = steps["tokenizer_processor"], steps.get("relative_actions_processor", {})
        return replace(
            found,
            state=_normalisation(folder, steps["normalizer_processor"], STATE),
            action=_normalisation(folder, steps["post unnormalizer_processor"], ACTION),
            relative=RelativeActions.of(
                joints.get("enabled", False), joints.get("exclude_joints"), joints.get("action_names")
            ),
            max_length=token["max_length"],
            longest=token["padding"] == "longest",
            tokenizer_name=token.get("tokenizer_name") or "",
            rename=steps.get("rename_observations_processor", {}).get("rename_map", {}),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: its processors cannot be understood ({error!r}): copy them again") from error


def _defaults(config: PiConfig) -> Processors:
    raw = config.raw
    modes = {kind: NormMode(value) for kind, value in raw["normalization_mapping"].items()}
    joints = raw.get("relative_exclude_joints", ("gripper",))
    return Processors(
        family=config.family,
        state=Normalisation(STATE, modes.get("STATE", NormMode.identity)),
        action=Normalisation(ACTION, modes.get("ACTION", NormMode.identity)),
        relative=RelativeActions.of(raw.get("use_relative_actions", False), joints, raw.get("action_feature_names")),
        max_length=raw["tokenizer_max_length"],
        longest=config.family is Family.smolvla and raw.get("pad_language_to") == "longest",
        tokenizer_name=_BACKBONES[config.family],
    )


def _steps(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    steps = read_json(folder / f"{name}.json", WHOLE).get("steps", [])
    return {step["registry_name"]: {**step.get("config", {}), "file": step.get("state_file")} for step in steps}


def _normalisation(folder: Path, step: Mapping[str, Any], name: str) -> Normalisation:
    tensors = read_tensors(folder / step["file"]) if step["file"] else {}
    statistics = {key.removeprefix(f"{name}."): t.float() for key, t in tensors.items() if key.startswith(f"{name}.")}
    mode = NormMode(step["norm_map"].get("STATE" if name == STATE else "ACTION", "IDENTITY"))
    return Normalisation(name, mode, statistics, step["eps"])


def write_processors(folder: Path, config: PiConfig, processors: Processors) -> None:
    """Writes both files and their statistics as LeRobot does."""
    own, raw = processors, config.raw
    features = {**raw["input_features"], **raw["output_features"]}
    norm_map = {**raw["normalization_mapping"], "STATE": own.state.mode.value, "ACTION": own.action.mode.value}
    scaled = lambda names: {"eps": own.state.eps, "features": names, "norm_map": norm_map}  # noqa: E731
    device = ("device_processor", {"device": "cpu", "float_dtype": None})
    token = {
        "max_length": own.max_length,
        "task_key": "task",
        "padding_side": "right",
        "padding": "longest" if own.longest else "max_length",
        "truncation": True,
        "tokenizer_name": own.tokenizer_name,
    }
    prompt = (_PROMPT_STEP[own.family], {})
    tokens, normalise = ("tokenizer_processor", token), ("normalizer_processor", scaled(features))
    turn = [] if own.family is Family.smolvla else [("relative_actions_processor", asdict(own.relative))]
    back = [] if own.family is Family.smolvla else [("absolute_actions_processor", {"enabled": own.relative.enabled})]
    start = [("rename_observations_processor", {"rename_map": dict(own.rename)}), ("to_batch_processor", {})]
    ordered = [*turn, normalise, prompt, tokens, device]
    if own.family is not Family.pi05:
        ordered = [prompt, tokens, device, *turn, normalise]
    statistics = {
        f"{part.name}.{kind}": tensor.contiguous()
        for part in (own.state, own.action)
        for kind, tensor in part.statistics.items()
    }
    unnormalise = ("unnormalizer_processor", scaled({ACTION: features[ACTION]}))
    for name, steps in ((_PRE, [*start, *ordered]), (_POST, [unnormalise, *back, device])):
        listed = []
        for number, (step, settings) in enumerate(steps):
            listed.append({"registry_name": step, "config": settings})
            if step.endswith("normalizer_processor"):
                file = f"{name}_step_{number}_{step}.safetensors"
                save_file(statistics, folder / file)
                listed[-1]["state_file"] = file
        write_json(folder / f"{name}.json", {"name": name, "steps": listed})
