"""Processing between env or dataset and network: images, prompts, state and actions, in LeRobot's file format.

    policy_preprocessor.json    rename, (relative actions,) normalise, prompt, tokenise     + statistics as safetensors
    policy_postprocessor.json   un-normalise, (absolute actions)                            + statistics as safetensors

The order of the steps differs between the families' files, but not the result: actions become relative before they are
normalised, and pi0.5's prompt contains the normalised state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from policies.language_folder import read_tokenizer
from policies.lerobot_processors import NORMALISE, POST, PRE, UNNORMALISE, read_normalisation, read_steps, write_steps
from policies.pi.config import ACTION, SMOLVLM_NAME, STATE, Family, PiConfig
from rlinf_embodied.config import NormMode
from rlinf_embodied.data.normalisation import Normalisation
from rlinf_embodied.errors import CheckpointError

_BACKBONE = "copy the files of the backbone's tokenizer there, or name their folder as policy.options.backbone"
_PALIGEMMA = "google/paligemma-3b-pt-224"
_OF_FAMILY = {  # (step that builds prompts, backbone whose tokenizer encodes them)
    Family.pi0: ("pi0_new_line_processor", _PALIGEMMA),
    Family.pi05: ("pi05_prepare_state_tokenizer_processor_step", _PALIGEMMA),
    Family.smolvla: ("smolvla_new_line_processor", SMOLVLM_NAME),
}
_SHARED = {"device_processor", "rename_observations_processor", "to_batch_processor", "tokenizer_processor"}
_SHARED |= {NORMALISE, "relative_actions_processor"}
_KNOWN_AFTER = {"device_processor", UNNORMALISE, "absolute_actions_processor"}
_STATE_EDGES = np.linspace(-1, 1, 256 + 1)[:-1]  # bins of the state in pi0.5's prompt


# --------------------------------------------------------------------------------------------------------------- images
def resized(images: Tensor, size: tuple[int, int], centred: bool) -> Tensor:
    """Resizes images [B, 3, H, W] in [0, 1] to fit (height, width), keeping their aspect ratio; returns [-1, 1].

    Bilinear without antialiasing.  The padding is -1: around the image (`centred`), or on its left and top.
    """
    height, width = size
    old_height, old_width = images.shape[-2:]
    if (old_height, old_width) != (height, width):
        ratio = max(old_width / width, old_height / height)
        inner = int(old_height / ratio), int(old_width / ratio)
        images = F.interpolate(images, size=inner, mode="bilinear", align_corners=False)
        missing_height, missing_width = max(0, height - inner[0]), max(0, width - inner[1])
        left, top = (missing_width // 2, missing_height // 2) if centred else (missing_width, missing_height)
        images = F.pad(images.clamp(0, 1), (left, missing_width - left, top, missing_height - top))
    return images * 2 - 1


# -------------------------------------------------------------------------------------------------------------- prompts
class PaddedTokenizer:
    """The tokenizer of a backbone; rows are padded on the right."""

    def __init__(self, folder: Path, max_length: int, longest: bool) -> None:
        """Reads the tokenizer; rows are padded to max_length tokens or, with `longest`, to the longest row.

        Raises:
            CheckpointError: the tokenizer is missing or damaged.
        """
        try:
            self._tokenizer: Any = read_tokenizer(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{error}: {_BACKBONE}") from error
        self._max_length, self._longest = max_length, longest
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = "<pad>"

    @property
    def image_tokens(self) -> tuple[int, int]:
        """The token ids around an image and of a whole image in SmolVLM's tokenizer."""
        return (
            self._special("fake_image_token", "<fake_token_around_image>"),
            self._special("global_image_token", "<global-img>"),
        )

    def _special(self, name: str, otherwise: str) -> int:
        token = str(self._tokenizer.init_kwargs.get(name, otherwise))
        number = self._tokenizer.get_vocab().get(token)
        if number is None:
            raise CheckpointError(f"{name} is {token!r}, but the tokenizer has no such token: {_BACKBONE}")
        return number

    def __call__(self, prompts: Sequence[str], fixed: bool = False) -> tuple[Tensor, Tensor]:
        """Returns ids int64 [B, L] and a mask bool [B, L], false at padding; if `fixed`, L is max_length."""
        padding = "longest" if self._longest and not fixed else "max_length"
        options = {"padding": padding, "padding_side": "right", "truncation": True, "max_length": self._max_length}
        encoding = self._tokenizer(list(prompts), return_tensors="pt", **options)
        return encoding["input_ids"], encoding["attention_mask"].bool()


def prompt_for(family: Family, task: str, state: Tensor) -> str:
    """Returns the prompt of the training format for an instruction and the normalised state [D]."""
    if family is not Family.pi05:
        return task if task.endswith("\n") else task + "\n"
    digits = np.digitize(state.cpu().numpy(), bins=_STATE_EDGES) - 1
    cleaned = task.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {cleaned}, State: {' '.join(map(str, digits))};\nAction: "


# ---------------------------------------------------------------------------------------------------- state and actions
@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeActions:
    """Whether actions are relative to the state in which they were predicted, and for which joints."""

    enabled: bool = False
    exclude_joints: Sequence[str] = ("gripper",)  # substrings of names, ignoring case
    action_names: Sequence[str] | None = None  # None: no joint is excluded

    def mask(self, dim: int) -> list[bool]:
        """Returns for each of `dim` dimensions of an action whether the state's is subtracted."""
        if not self.exclude_joints or self.action_names is None:
            return [True] * dim
        words = [word.lower() for word in self.exclude_joints if word]
        masked = [not any(word in name.lower() for word in words) for name in self.action_names]
        return [*masked, *[False] * dim][:dim]

    def offset(self, state: Tensor, dim: int) -> Tensor:
        """Returns the offset [B, 1, dim] that makes relative actions [B, C, dim] of a state [B, D] absolute."""
        mask = torch.tensor(self.mask(dim), dtype=state.dtype, device=state.device)
        length = min(dim, state.shape[1])
        return F.pad(state[:, :length] * mask[:length], (0, dim - length))[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """The processing of a folder's files; state and actions are in the units of the data, float32."""

    family: Family
    state: Normalisation
    action: Normalisation
    relative: RelativeActions = field(default_factory=RelativeActions)
    max_length: int = 48  # tokens of a prompt
    longest: bool = False  # whether rows are padded only to the longest one
    tokenizer_name: str = ""
    rename: Mapping[str, str] = field(default_factory=dict)  # dataset's feature -> policy's feature

    @property
    def are_unmeasured(self) -> bool:
        """Whether statistics that the modes need are missing, as in base models."""
        return any(part.mode is not NormMode.identity and part.size is None for part in (self.state, self.action))

    def normalised_state(self, state: Tensor) -> Tensor:
        """Returns the network's input for a state [B, D]."""
        return self.state.forward(state)

    def normalised_actions(self, actions: Tensor, state: Tensor) -> Tensor:
        """Returns the network's targets for actions [B, C, A] from a state [B, D]."""
        if self.relative.enabled:
            actions = actions - self.relative.offset(state, actions.shape[2])
        return self.action.forward(actions)

    def robot_actions(self, normalised: Tensor, state: Tensor) -> Tensor:
        """Returns the robot's actions [B, C, A]; its state was [B, D] when they were predicted."""
        actions = self.action.inverse(normalised)
        return actions + self.relative.offset(state, actions.shape[2]) if self.relative.enabled else actions

    def prompts(self, tasks: Sequence[str], normalised_state: Tensor) -> list[str]:
        """Returns the prompts of B instructions and normalised states [B, D]."""
        return [prompt_for(self.family, task, row) for task, row in zip(tasks, normalised_state, strict=True)]

    def with_statistics(
        self, statistics: Mapping[str, Mapping[str, Tensor]], modes: Mapping[str, NormMode | None]
    ) -> Processors:
        """Returns the processors with the given statistics and modes; other features keep theirs."""
        state, action = (
            Normalisation(part.name, modes.get(part.name) or part.mode, statistics.get(part.name, part.statistics))
            for part in (self.state, self.action)
        )
        return replace(self, state=state, action=action)


# ---------------------------------------------------------------------------------------------------------------- files
def read_processors(folder: Path, config: PiConfig) -> Processors:
    """Returns the processors of a folder; without files, those of config.json, which have no statistics.

    Raises:
        CheckpointError: a file is missing or damaged, or has an unknown step.
    """
    defaults = _defaults(config)
    if not (folder / f"{PRE}.json").is_file():
        return defaults
    steps = read_steps(folder, PRE, _SHARED | {_OF_FAMILY[config.family][0]})
    after = read_steps(folder, POST, _KNOWN_AFTER)
    try:
        token, joints = steps["tokenizer_processor"], steps.get("relative_actions_processor", {})
        return replace(
            defaults,
            state=read_normalisation(folder, steps[NORMALISE], STATE),
            action=read_normalisation(folder, after[UNNORMALISE], ACTION),
            relative=RelativeActions(
                enabled=joints.get("enabled", False),
                exclude_joints=joints.get("exclude_joints") or (),
                action_names=joints.get("action_names"),
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
    return Processors(
        family=config.family,
        state=Normalisation(STATE, modes.get("STATE", NormMode.identity)),
        action=Normalisation(ACTION, modes.get("ACTION", NormMode.identity)),
        relative=RelativeActions(
            enabled=raw.get("use_relative_actions", False),
            exclude_joints=raw.get("relative_exclude_joints", ("gripper",)) or (),
            action_names=raw.get("action_feature_names"),
        ),
        max_length=raw["tokenizer_max_length"],
        longest=config.family is Family.smolvla and raw.get("pad_language_to") == "longest",
        tokenizer_name=_OF_FAMILY[config.family][1],
    )


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
    prompt = (_OF_FAMILY[own.family][0], {})
    tokens, normalise = ("tokenizer_processor", token), (NORMALISE, scaled(features))
    relative = [] if own.family is Family.smolvla else [("relative_actions_processor", asdict(own.relative))]
    enabled = {"enabled": own.relative.enabled}
    absolute = [] if own.family is Family.smolvla else [("absolute_actions_processor", enabled)]
    first = [("rename_observations_processor", {"rename_map": dict(own.rename)}), ("to_batch_processor", {})]
    ordered = [*relative, normalise, prompt, tokens, device]
    if own.family is not Family.pi05:
        ordered = [prompt, tokens, device, *relative, normalise]
    unnormalise = (UNNORMALISE, scaled({ACTION: features[ACTION]}))
    write_steps(folder, PRE, [*first, *ordered], (own.state, own.action))
    write_steps(folder, POST, [unnormalise, *absolute, device], (own.state, own.action))
