"""Policies from published folders, and the files that this project adds to a published layout.

policy.json           policy section and env
critic.safetensors    value head, statistics of the state that it sees, and the noise head of flow-noise
adapter_config.json  adapter_model.safetensors      LoRA in peft's form; other weights are then the base's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from policies.adapters import ADAPTER, ADAPTER_CONFIG, ADAPTERS, plain_state, read_adapters, write_adapters
from policies.checkpoint_folder import (
    OPTIONS,
    read_described,
    read_tensors,
    require_alike,
    stored,
    with_optional,
    write_json,
)
from policies.critic import Criticised
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import ImitationPolicy
from rlinf_embodied.learning.checkpoint import link_or_copy

FILE, CRITIC = "policy.json", "critic.safetensors"
OWN_FILES = {FILE, ADAPTER_CONFIG, "evaluation.json", "state.json", "manifest.json"}  # JSON of this project


class BeginsWithFolder(Criticised, ImitationPolicy):
    """A policy whose network comes from a published folder; its module has `model`, `critic` and `privileged_scale`."""

    reads_published = True
    proprio_jitter = 0.0  # the state is in the units of its data
    example: ClassVar[str]  # the file in experiments/examples that creates a small folder
    options_type: ClassVar[type]  # with `lora`
    shape: ClassVar[tuple[str, ...]]  # options that decide the set of tensors
    adapted: ClassVar[tuple[str, ...]] = ("freeze_vision",)  # options that decide which layers have adapters
    _critic = "critic"
    env: EnvSpec
    options: Any
    checkpoint: Any  # the content of its folder; `checkpoint.folder` is the source

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Raises: there is no network without a folder.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"policy.name is {config.name!r}, which begins with the network of a folder: give a published folder as "
            f"warm_start.checkpoint=<dir>; experiments/examples/{self.example} makes a small one with random weights"
        )

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> Self:
        """Returns the policy of a folder; published folders need `env` and `config`.

        Raises:
            CheckpointError: the folder is damaged or of another policy, or lacks weights.
            ConfigError: options are unknown, or do not fit the folder or the env.
        """
        policy = cls.__new__(cls)
        policy.config, policy.env = cls._use(folder, env, config)
        policy.options = typed(policy.config.options, cls.options_type, OPTIONS)
        policy._read(folder)
        _read_parts(folder, policy.module)
        return policy

    @classmethod
    def _use(cls, folder: Path, env: EnvSpec | None, config: PolicyConfig | None) -> tuple[PolicyConfig, EnvSpec]:
        """Returns the config and env of a folder's policy; a published folder uses `config` and `env`.

        For a folder that was trained here, `config` may change options that decide no shape.
        """
        if (folder / FILE).is_file():
            saved, saved_env = read_described(folder / FILE)
            has_adapters = typed(saved.options, cls.options_type, OPTIONS).lora.rank
            fixed = {"critic", *(f"options.{name}" for name in (*cls.shape, *(cls.adapted if has_adapters else ())))}
            require_alike(folder, saved, config or saved, cls.options_type, fixed.__contains__)
            return config or saved, saved_env
        if env is None or config is None:
            raise CheckpointError(
                f"{folder} is a published folder, which does not name its env: start a training with it "
                "(warm_start.checkpoint=<dir> run.num_iterations=0 evaluates it), and use that run's checkpoint"
            )
        return config, env

    def _read(self, folder: Path) -> None:
        """Sets `checkpoint` and `module` from a folder, config, env and options."""
        raise NotImplementedError

    def _write(self, folder: Path, weights: bool) -> None:
        """Writes `checkpoint` in the published layout, with or without its `weights`, without adapters."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes the published layout and this project's files; base weights of adapters are links to the source."""
        folder.mkdir(parents=True, exist_ok=True)
        source, parts = self.checkpoint.folder, _parts(self.module)
        links = source.is_dir() and any(ADAPTER in name for name in parts)  # an earlier checkpoint may not be kept
        if links:
            _link_weights(source, folder)
        self._write(folder, weights=not links)
        save_file({name: stored(tensor) for name, tensor in parts.items() if ADAPTER not in name}, folder / CRITIC)
        write_adapters(self.module.model, folder)
        write_json(folder / FILE, {"policy": asdict(self.config), "env": asdict(self.env)})


# ----------------------------------------------------------------------------------------------------------------- read
def load_weights(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    where: Path,
    dtype: torch.dtype,
    keep_float32: Callable[[str], bool] = lambda name: False,
    hint: str = "",
) -> None:
    """Loads a folder's tensors into a module as `dtype`, except for names that `keep_float32`; sets eval mode.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape; the message ends in `hint`.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes = ((name, shape) for name, shape in expected.items() if given.get(name, shape) != shape)
    problems = {
        "missing": sorted(expected.keys() - given.keys()),
        "unknown": sorted(given.keys() - expected.keys()),
        "of another shape": [f"{name} {list(given[name])} instead of {list(shape)}" for name, shape in shapes],
    }
    if any(problems.values()):
        listed = "; ".join(f"{len(names)} {kind}, first {names[0]}" for kind, names in problems.items() if names)
        raise CheckpointError(f"the weights in {where} do not fit its config.json: {listed}. Copy both again{hint}")
    cast = {name: t.to(torch.float32 if keep_float32(name) else dtype) for name, t in tensors.items()}
    module.load_state_dict(cast, assign=True)
    module.eval()


def _read_parts(folder: Path, module: nn.Module) -> None:
    """Overwrites critic and adapters with those of a folder that was trained here.

    Raises:
        CheckpointError: their files are missing, damaged or of other shapes.
    """
    if not (folder / FILE).is_file():
        return
    tensors, expected, action = read_tensors(folder / CRITIC), _parts(module), "give a complete checkpoint folder"
    if any(ADAPTER in name for name in expected):
        tensors |= {f"model.{name}": tensor for name, tensor in read_adapters(folder).items()}
    tensors = with_optional(tensors, module)
    if differing := sorted(set(tensors) ^ set(expected)):
        raise CheckpointError(f"{folder} and this policy differ in tensors ({', '.join(differing[:3])}): {action}")
    try:
        module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / CRITIC} or {ADAPTERS} does not fit ({error}): {action}") from error


# ---------------------------------------------------------------------------------------------------------------- write
def _link_weights(source: Path, folder: Path) -> None:
    """Links the weight files of `source` into a folder, or copies them across file systems."""
    own = (CRITIC, ADAPTERS)
    for path in source.iterdir():
        if path.name.endswith((".safetensors", ".pt", ".index.json")) and not path.name.startswith(("policy_", *own)):
            (folder / path.name).unlink(missing_ok=True)
            link_or_copy(path, folder / path.name)


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the weights without adapters, by their published names."""
    return {name: stored(tensor) for name, tensor in plain_state(module).items()}


def _parts(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that are not part of the published layout."""
    kinds = ("critic.", "privileged_scale.", "noise.")
    return {name: t for name, t in module.state_dict().items() if name.startswith(kinds) or ADAPTER in name}
