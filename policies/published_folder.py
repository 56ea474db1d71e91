"""What published folders have in common, and the files that this project adds to them, by which it knows its own.

policy.json           policy section and env
critic.safetensors    value head, statistics of the state that it sees, and the noise head of flow-noise
adapter_config.json  adapter_model.safetensors      LoRA in peft's form; other weights are then the base's
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from policies.checkpoint_folder import read_json, with_optional, write_json
from rlinf_embodied.config import Critic, LoraSettings, PolicyConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import ImitationPolicy

FILE, CRITIC = "policy.json", "critic.safetensors"
ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OWN_FILES = {FILE, ADAPTER_CONFIG, "evaluation.json", "state.json", "manifest.json"}  # .json that others do not write
_OPTIONS = "policy.options"
_NO_TENSORS = (AttributeError, TypeError)  # raised where a file holds something else
_LORA, _PEFT = ".lora_", "base_model.model."


class BeginsWithFolder(ImitationPolicy):
    """A policy whose network comes from a published folder."""

    reads_published = True
    proprio_jitter = 0.0  # the state is in the units of its data
    example: ClassVar[str]  # the file in experiments/examples that makes a small folder

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Refuses: there is no network without a folder.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"policy.name is {config.name!r}, which begins with the network of a folder: give a published folder as "
            f"warm_start.checkpoint=<dir>; experiments/examples/{self.example} makes a small one with random weights"
        )


# ----------------------------------------------------------------------------------------------------------------- read
def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .safetensors or .pt file by name, all of them finite.

    Raises:
        CheckpointError: the file is damaged, or a value is NaN or infinite.
    """
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        wrong = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError, *_NO_TENSORS) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy it again") from error
    if wrong:
        raise CheckpointError(
            f"{path}: values of {', '.join(wrong[:3])} are NaN or infinite: the training that wrote it diverged or the "
            "file is damaged; copy it again or give an earlier checkpoint"
        )
    return tensors


def load_weights(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    where: Path,
    dtype: torch.dtype,
    keep_float32: Callable[[str], bool] = lambda name: False,
    hint: str = "",
) -> None:
    """Makes the tensors of a folder those of a module, in eval mode; some keep float32 whatever the `dtype`.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape; `hint` is added.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes = ((name, shape) for name, shape in wanted.items() if given.get(name, shape) != shape)
    wrong = {
        "missing": sorted(wanted.keys() - given.keys()),
        "unknown": sorted(given.keys() - wanted.keys()),
        "of another shape": [f"{name} {list(given[name])} instead of {list(shape)}" for name, shape in shapes],
    }
    if any(wrong.values()):
        said = "; ".join(f"{len(names)} {kind}, first {names[0]}" for kind, names in wrong.items() if names)
        raise CheckpointError(f"the weights in {where} do not fit its config.json: {said}. Copy both again{hint}")
    cast = {name: t.to(torch.float32 if keep_float32(name) else dtype) for name, t in tensors.items()}
    module.load_state_dict(cast, assign=True)
    module.eval()


def read_described(
    folder: Path,
    env: EnvSpec | None,
    config: PolicyConfig | None,
    options_type: type,
    shape: Sequence[str],
    adapted: Sequence[str] = ("freeze_vision",),
) -> tuple[PolicyConfig, EnvSpec]:
    """Returns how a folder's policy is used, and in what it acts: of a published one `config` and `env`.

    Of one that was trained here `config` may change what decides no shape: `shape` names the options that do, and
    `adapted` those that say where adapters are.

    Raises:
        CheckpointError: a published folder without `env` or `config`, or a policy of another shape than `config`.
    """
    path, action = folder / FILE, "give a complete checkpoint folder"
    if not path.is_file():
        if env is None or config is None:
            raise CheckpointError(
                f"{folder} is a published folder, which does not say what it acts in: start a training with it "
                "(warm_start.checkpoint=<dir> run.num_iterations=0 evaluates it), and use that run's checkpoint"
            )
        return config, env
    content = read_json(path, action)
    try:
        known = EnvSpec.of(content["env"])
        saved = PolicyConfig(**{**content["policy"], "critic": Critic(content["policy"]["critic"])})
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} says no policy and env ({error!r}): {action}") from error
    theirs, ours = (typed(each.options, options_type, _OPTIONS) for each in (saved, config or saved))
    names = (*shape, *adapted) if theirs.lora.rank else shape
    pairs = {f"{_OPTIONS}.{name}": (getattr(theirs, name), getattr(ours, name)) for name in names}
    for path_, (there, here) in (pairs | {"policy.critic": (saved.critic, (config or saved).critic)}).items():
        if there != here:
            raise CheckpointError(
                f"{path_} is {here}, but the policy in {folder} was made with {there}: use that, or another checkpoint"
            )
    return config or saved, known


def read_parts(folder: Path, module: nn.Module, has_adapters: bool) -> None:
    """Overwrites critic and adapters with those of a folder that was trained here.

    Raises:
        CheckpointError: they are missing, damaged or of other shapes.
    """
    if not (folder / FILE).is_file():
        return
    tensors = read_tensors(folder / CRITIC)
    if has_adapters:
        for name, tensor in read_tensors(folder / ADAPTERS).items():
            tensors["model." + re.sub(r"(\.lora_[AB])\.", r"\1.default.", name.removeprefix(_PEFT))] = tensor
    tensors = with_optional(tensors, module)
    unlike = sorted(set(tensors) ^ set(_parts(module, has_adapters)))
    action = "give a complete checkpoint folder"
    if unlike:
        raise CheckpointError(f"{folder} holds other tensors than this policy has ({', '.join(unlike[:3])}): {action}")
    try:
        module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / CRITIC} or {ADAPTERS} does not fit ({error}): {action}") from error


# ---------------------------------------------------------------------------------------------------------------- write
def write_parts(folder: Path, config: PolicyConfig, env: EnvSpec, module: nn.Module, lora: LoraSettings) -> None:
    """Writes what a published folder has no place for; `module` has `model`, a `critic` and its scale."""
    parts = _parts(module, bool(lora.rank))
    save_file({name: stored(t) for name, t in parts.items() if _LORA not in name}, folder / CRITIC)
    if lora.rank:
        named = {_PEFT + n.removeprefix("model.").replace(".default.", "."): t for n, t in parts.items() if _LORA in n}
        save_file({name: stored(tensor) for name, tensor in named.items()}, folder / ADAPTERS)
        content = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)}
        write_json(folder / ADAPTER_CONFIG, content)
    write_json(folder / FILE, {"policy": asdict(config), "env": asdict(env)})


def link_weights(source: Path, folder: Path) -> None:
    """Makes the weights of a folder those of another one, as links where the file system can."""
    own = (CRITIC, ADAPTERS)
    for path in source.iterdir():
        if path.name.endswith((".safetensors", ".pt", ".index.json")) and not path.name.startswith(("policy_", *own)):
            (folder / path.name).unlink(missing_ok=True)
            try:
                os.link(path, folder / path.name)
            except OSError:  # another file system
                shutil.copyfile(path, folder / path.name)


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the weights below adapters, by their published names."""
    state = module.state_dict().items()
    return {name.replace(".base_layer.", "."): stored(tensor) for name, tensor in state if _LORA not in name}


def stored(tensor: Tensor) -> Tensor:
    """Returns a copy that a file may hold."""
    return tensor.detach().cpu().contiguous().clone()


def _parts(module: nn.Module, has_adapters: bool) -> dict[str, Tensor]:
    kinds = ("critic.", "privileged_scale.", "noise.")
    state = module.state_dict()
    return {n: t for n, t in state.items() if n.startswith(kinds) or (has_adapters and _LORA in n)}
