"""A policy as a Hugging Face folder: config.json, model.safetensors, dataset_statistics.json.

config.json               the policy's settings, and the env facts that decide its shapes
model.safetensors         its parameters
dataset_statistics.json   statistics that standardise its inputs, {task: {column: {"mean": [..], "std": [..]}}}
"""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_embodied.config import PolicyConfig, Precision
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import NoOptions, typed
from rlinf_embodied.randomness import words

CONFIG, WEIGHTS, STATISTICS = "config.json", "model.safetensors", "dataset_statistics.json"
OPTIONS = "policy.options"  # in the config of a run
_SCALE = "_scale"  # suffix of modules that hold statistics in `mean` and `std`
_OPTIONS = "options."
_ACTION = "give a policy checkpoint folder"
_FREE = ("temperature", "noise_repeat", "prompt_suffix", "_target_")  # settings that decide no shape
_OPTIONAL = "noise."  # prefix of tensors that a policy with other `options_of_use` may lack
_NO_TENSORS = (AttributeError, TypeError)  # raised for a file with other content


@contextlib.contextmanager
def seeded(seed: int, purpose: str = "policy") -> Iterator[None]:
    """Seeds the global generator within the block, for initial weights, and restores it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(words(seed, purpose)) >> 1)
        yield


def dtype_of(precision: Precision) -> torch.dtype:
    """Returns the torch dtype of a precision."""
    return torch.bfloat16 if precision is Precision.bfloat16 else torch.float32


def read_json(path: Path, action: str) -> dict[str, Any]:
    """Returns the object of a JSON file; `action` ends error messages.

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


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes a JSON object."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .safetensors or .pt file by name, all of them finite.

    Raises:
        CheckpointError: the file is damaged, or a value is NaN or infinite.
    """
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        not_finite = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError, *_NO_TENSORS) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy it again") from error
    if not_finite:
        raise CheckpointError(
            f"{path}: values of {', '.join(not_finite[:3])} are NaN or infinite: the training that wrote it diverged "
            "or the file is damaged; copy it again or give an earlier checkpoint"
        )
    return tensors


def stored(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy on the CPU, for a file."""
    return tensor.detach().cpu().contiguous().clone()


def write_folder(folder: Path, config: PolicyConfig, env: EnvSpec, module: nn.Module) -> None:
    """Writes the three files; existing ones are overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: stored(tensor) for name, tensor in module.state_dict().items()}
    columns: dict[str, dict[str, list[float]]] = {}
    for name in [name for name in weights if name.rpartition(".")[0].endswith(_SCALE)]:
        scale, kind = name.rsplit(".", 1)
        columns.setdefault(scale.removesuffix(_SCALE), {})[kind] = weights.pop(name).tolist()
    header = {"model_type": config.name, "architectures": [config._target_.rpartition(".")[2]]}
    write_json(folder / CONFIG, header | {"policy": asdict(config), "env": asdict(env)})
    write_json(folder / STATISTICS, {env.task: columns})
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def read_described(path: Path) -> tuple[PolicyConfig, EnvSpec]:
    """Returns the policy section and the env spec of a policy folder's JSON file.

    Raises:
        CheckpointError: the file is missing, damaged, or describes another kind of policy.
    """
    header = read_json(path, _ACTION)
    try:
        return PolicyConfig(**header["policy"]), EnvSpec.of(header["env"])
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} describes no usable policy ({error!r}): {_ACTION}") from error


def require_alike(
    folder: Path, saved: PolicyConfig, wanted: PolicyConfig, options_type: type, fixed: Callable[[str], bool]
) -> None:
    """Raises CheckpointError if a folder's policy differs from the wanted one in a setting whose name is `fixed`."""
    saved_settings, wanted_settings = _settings(saved, options_type), _settings(wanted, options_type)
    for name, value in saved_settings.items():
        if fixed(name) and wanted_settings[name] != value:
            raise CheckpointError(
                f"policy.{name} is {wanted_settings[name]}, but the policy in {folder} was made with {value}: "
                f"set policy.{name}={value} or give another checkpoint"
            )


def with_optional(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Returns a folder's tensors; optional ones that it lacks are the module's, unknown ones are left out."""
    defaults = {name: tensor for name, tensor in module.state_dict().items() if name.startswith(_OPTIONAL)}
    return defaults | {name: t for name, t in tensors.items() if not name.startswith(_OPTIONAL) or name in defaults}


def _settings(config: PolicyConfig, options_type: type) -> dict[str, object]:
    """Returns all settings by path, including defaults."""
    settings = asdict(config)
    options = asdict(typed(settings.pop("options"), options_type, OPTIONS))
    return settings | {_OPTIONS + name: value for name, value in options.items()}


class KeptInFolder:
    """Saves and loads a policy as such a folder; comes first in the bases of policies made of (config, env, seed)."""

    options_type: ClassVar[type] = NoOptions  # dataclass of policy.options
    options_of_use: ClassVar[tuple[str, ...]] = ("freeze_stem",)  # options that decide no shape
    config: PolicyConfig
    env: EnvSpec
    module: nn.Module

    def save(self, folder: Path) -> None:
        write_folder(folder, self.config, self.env, self.module)

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> Self:
        """Returns the policy of a folder; `config` may change temperature and `options_of_use`, but no shape.

        Raises:
            CheckpointError: the folder is missing, damaged, or holds a policy of another shape.
        """
        saved, saved_env = read_described(folder / CONFIG)
        free = {*_FREE, *(_OPTIONS + name for name in cls.options_of_use)}
        require_alike(folder, saved, config or saved, cls.options_type, lambda name: name not in free)
        policy, tensors = cls.unloaded(config or saved, saved_env), read_tensors(folder / WEIGHTS)
        try:
            for column, values in read_json(folder / STATISTICS, _ACTION)[saved_env.task].items():
                for kind in ("mean", "std"):
                    tensors[f"{column}{_SCALE}.{kind}"] = torch.tensor(values[kind], dtype=torch.float32)
            policy.module.load_state_dict(with_optional(tensors, policy.module))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder}: {WEIGHTS} or {STATISTICS} does not fit its {CONFIG} ({error!r}); create the folder again"
            ) from error
        return policy

    @classmethod
    def unloaded(cls, config: PolicyConfig, env: EnvSpec) -> Self:
        """Returns a policy whose weights are overwritten next; a class with slow initialisation skips it."""
        return cast(Any, cls)(config, env, seed=0)
