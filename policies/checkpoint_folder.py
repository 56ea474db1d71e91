"""A policy as a Hugging Face folder: config.json, model.safetensors, dataset_statistics.json.

config.json               what the policy is: its settings, and the env facts its shapes come from
model.safetensors         its parameters
dataset_statistics.json   what it standardises its inputs with, {task: {column: {"mean": [..], "std": [..]}}}
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import NoOptions, typed
from rlinf_embodied.randomness import words

CONFIG, WEIGHTS, STATISTICS = "config.json", "model.safetensors", "dataset_statistics.json"
_SCALE = "_scale"  # modules of this name ending hold statistics in `mean` and `std`
_OPTIONS = "options."
_ACTION = "give a policy checkpoint folder"
_FREE = ("temperature", "noise_repeat", "prompt_suffix", "_target_")  # settings of use, not of shape
_OPTIONAL = "noise."  # how tensors begin that a policy with other options of use may lack


@contextlib.contextmanager
def seeded(seed: int, purpose: str = "policy") -> Iterator[None]:
    """Draws first weights from the seed within the block; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(words(seed, purpose)) >> 1)
        yield


def read_json(path: Path, action: str) -> dict[str, Any]:
    """Returns the object of a JSON file; `action` ends the message of what is wrong with it.

    Raises:
        CheckpointError: the file is missing, unreadable or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {action}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object: {action}")
    return cast("dict[str, Any]", value)


def write_folder(folder: Path, config: PolicyConfig, env: EnvSpec, module: nn.Module) -> None:
    """Writes the three files; an existing folder's are overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    statistics = {name: tensor for name, tensor in state.items() if _is_statistic(name)}
    weights = {name: tensor.clone() for name, tensor in state.items() if name not in statistics}
    columns: dict[str, dict[str, list[float]]] = {}
    for name, tensor in statistics.items():
        scale, kind = name.rsplit(".", 1)
        columns.setdefault(scale.removesuffix(_SCALE), {})[kind] = tensor.tolist()
    described = {"model_type": config.name, "architectures": [config._target_.rpartition(".")[2]]}
    write_json(folder / CONFIG, described | {"policy": asdict(config), "env": asdict(env)})
    write_json(folder / STATISTICS, {env.task: columns})
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def _read_folder(folder: Path) -> tuple[PolicyConfig, EnvSpec, dict[str, Tensor]]:
    described = read_json(folder / CONFIG, _ACTION)
    try:
        env = EnvSpec.of(described["env"])
        settings = described["policy"]
        config = PolicyConfig(**{**settings, "critic": Critic(settings["critic"])})
        columns = read_json(folder / STATISTICS, _ACTION)[env.task]
        tensors = load_file(folder / WEIGHTS)
        for column, values in columns.items():
            for kind in ("mean", "std"):
                tensors[f"{column}{_SCALE}.{kind}"] = torch.tensor(values[kind], dtype=torch.float32)
    except (KeyError, TypeError, ValueError, ConfigError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} holds no usable policy ({error!r}): give another checkpoint folder") from error
    return config, env, tensors


def with_optional(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Returns a folder's tensors with the module's own optional ones where it has none, and without others."""
    own = {name: tensor for name, tensor in module.state_dict().items() if name.startswith(_OPTIONAL)}
    return own | {name: t for name, t in tensors.items() if not name.startswith(_OPTIONAL) or name in own}


def _adopt(
    folder: Path, saved: PolicyConfig, wanted: PolicyConfig, options_type: type, free: Sequence[str]
) -> PolicyConfig:
    theirs, ours = _settings(saved, options_type), _settings(wanted, options_type)
    for name, value in theirs.items():
        if name not in _FREE and name.removeprefix(_OPTIONS) not in free and ours[name] != value:
            raise CheckpointError(
                f"policy.{name} is {ours[name]!r}, but the policy in {folder} was made with {value!r}: "
                f"set policy.{name}={value} or give another checkpoint"
            )
    use = {name: ours[_OPTIONS + name] for name in free if _OPTIONS + name in ours}
    return replace(saved, **{name: getattr(wanted, name) for name in _FREE}, options=saved.options | use)


def _settings(config: PolicyConfig, options_type: type) -> dict[str, object]:
    """Returns all settings by path, those that are left out with their defaults."""
    settings = asdict(config)
    options = asdict(typed(settings.pop("options"), options_type, "policy.options"))
    return settings | {_OPTIONS + name: value for name, value in options.items()}


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[0].endswith(_SCALE)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes a JSON object."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class KeptInFolder:
    """Keeps a policy in such a folder: a class first in the bases of policies that are made of (config, env, seed)."""

    options_type: ClassVar[type] = NoOptions  # of policy.options: a dataclass
    options_of_use: ClassVar[tuple[str, ...]] = ("freeze_stem",)  # those of them that decide no shape
    config: PolicyConfig
    env: EnvSpec
    module: nn.Module

    def save(self, folder: Path) -> None:
        write_folder(folder, self.config, self.env, self.module)

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> Self:
        """Returns the policy of a folder; `config` may change its use (temperature, `options_of_use`), not its shape.

        Raises:
            CheckpointError: the folder is missing, damaged, or holds a policy of another shape.
        """
        saved, known, tensors = _read_folder(folder)
        if config is not None:
            saved = _adopt(folder, saved, config, cls.options_type, cls.options_of_use)
        policy = cls.unloaded(saved, known)
        try:
            policy.module.load_state_dict(with_optional(tensors, policy.module))
        except RuntimeError as error:
            raise CheckpointError(
                f"{folder / WEIGHTS} does not fit its {CONFIG}: {error}; make the checkpoint anew"
            ) from error
        return policy

    @classmethod
    def unloaded(cls, config: PolicyConfig, env: EnvSpec) -> Self:
        """Returns a policy whose weights are overwritten next; a class whose first ones take long leaves them out."""
        return cast(Any, cls)(config, env, seed=0)
