"""The folder of an OpenVLA policy that was trained here: the published layout, and what a published one lacks.

policy.json                                        policy section and env, by which the folder is known
critic.safetensors                                 value head, statistics of the state that it sees
adapter_config.json  adapter_model.safetensors     LoRA in peft's form; the weights beside it are then those of the base
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from policies.checkpoint_folder import read_json, write_json
from policies.openvla.folder import Checkpoint, write_described, write_weights
from policies.openvla.oft import OpenVLAOFT
from policies.openvla.oft_folder import write_oft, write_side_file
from policies.openvla.options import OPTIONS, OpenVLAOptions
from policies.openvla.settings import WHOLE
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import typed

FILE, CRITIC, ADAPTERS, ADAPTER_CONFIG = (
    "policy.json",
    "critic.safetensors",
    "adapter_model.safetensors",
    "adapter_config.json",
)
_SHAPE = ("decoding", "head", "proprio", "film", "lora")  # options that decide which tensors there are
_LORA, _BASE, _PEFT = ".lora_", ".base_layer.", "base_model.model."
_WEIGHTS = (".safetensors", ".pt", ".index.json")
_OWN = {FILE, CRITIC, ADAPTERS, ADAPTER_CONFIG, "evaluation.json"}


@dataclass(frozen=True, slots=True)
class Described:
    """What policy.json says."""

    config: PolicyConfig
    env: EnvSpec


def read_described(folder: Path, env: EnvSpec | None, config: PolicyConfig | None) -> Described:
    """Returns how a folder's policy is used, and in what it acts.

    Args:
        folder: of a policy that was trained here, or a published one.
        env: for a published one.
        config: for a published one; of others it may change what decides no shape.

    Raises:
        CheckpointError: a published folder without `env` or `config`, or a policy of another shape than `config`.
    """
    if not (folder / FILE).is_file():
        if env is None or config is None:
            raise CheckpointError(
                f"{folder} is a published folder, which does not say what it acts in: start a training with it "
                "(warm_start.checkpoint=<dir> run.num_iterations=0 evaluates it), and use that run's checkpoint"
            )
        return Described(config, env)
    content = read_json(folder / FILE, WHOLE)
    try:
        known = EnvSpec.of(content["env"])
        saved = PolicyConfig(**{**content["policy"], "critic": Critic(content["policy"]["critic"])})
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{folder / FILE} says no policy and env ({error!r}): {WHOLE}") from error
    if config is not None:
        _require_shape(folder, saved, config)
    return Described(config or saved, known)


def _require_shape(folder: Path, saved: PolicyConfig, wanted: PolicyConfig) -> None:
    theirs, ours = (typed(config.options, OpenVLAOptions, OPTIONS) for config in (saved, wanted))
    pairs = {"policy.critic": (saved.critic, wanted.critic)}
    shape = (*_SHAPE, "freeze_vision") if theirs.lora.rank else _SHAPE  # which says where adapters are
    pairs |= {f"{OPTIONS}.{name}": (getattr(theirs, name), getattr(ours, name)) for name in shape}
    for path, (there, here) in pairs.items():
        if there != here:
            raise CheckpointError(
                f"{path} is {here}, but the policy in {folder} was made with {there}: use that, or another checkpoint"
            )


def read_parts(folder: Path, module: nn.Module) -> None:
    """Overwrites adapters and critic with those of a folder that has them.

    Raises:
        CheckpointError: they are damaged or of other shapes.
    """
    for name, is_mine in ((ADAPTERS, _is_adapter), (CRITIC, _is_critic)):
        path = folder / name
        if path.is_file():
            _restore(path, module, {n for n in module.state_dict() if is_mine(n)})
        elif (folder / FILE).is_file() and any(is_mine(n) for n in module.state_dict()):
            raise CheckpointError(f"{folder} has no {name}, but its {FILE} says that it has: copy the folder again")


def _restore(path: Path, module: nn.Module, mine: set[str]) -> None:
    try:
        found = {_here(name): tensor for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy it again") from error
    found = _without_idle(found, mine)
    if set(found) != mine:
        unlike = sorted(set(found) ^ mine)
        raise CheckpointError(f"{path} holds other tensors than this policy has ({', '.join(unlike[:3])}): {WHOLE}")
    try:
        module.load_state_dict(found, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit ({error}): {WHOLE}") from error


def _without_idle(found: Mapping[str, Tensor], mine: set[str]) -> dict[str, Tensor]:
    """Returns the tensors but for adapters that add nothing where this policy has none: older folders have such."""
    idle = {name.rpartition(_LORA)[0] for name, tensor in found.items() if f"{_LORA}B." in name and not tensor.any()}
    return {name: tensor for name, tensor in found.items() if name in mine or name.rpartition(_LORA)[0] not in idle}


def write_policy(
    folder: Path,
    described: Described,
    checkpoint: Checkpoint,
    model: OpenVLAOFT,
    module: nn.Module,
    options: OpenVLAOptions,
) -> None:
    """Writes a policy; weights that were not trained are links to the files that they were read from.

    Args:
        folder: is made where it does not exist.
        described: what policy.json is to say.
        checkpoint: what was read.
        model: the network with its parts.
        module: all of it, with critic and adapters.
        options: whether there are adapters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if options.lora.rank:
        _write_base(checkpoint, model, folder)
        state = module.state_dict()
        _save({_there(name): state[name] for name in state if _is_adapter(name)}, folder / ADAPTERS)
        lora = options.lora
        content = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)}
        write_json(folder / ADAPTER_CONFIG, content)
    else:
        write_oft(checkpoint, model, folder)
    _save({name: value for name, value in module.state_dict().items() if _is_critic(name)}, folder / CRITIC)
    write_json(folder / FILE, {"policy": asdict(described.config), "env": asdict(described.env)})


def _write_base(checkpoint: Checkpoint, model: OpenVLAOFT, folder: Path) -> None:
    """Writes the weights below the adapters: links to the files that were read, or copies, or what is in memory."""
    if not checkpoint.folder.is_dir():  # an earlier checkpoint of the run that was not kept
        _write_from_memory(checkpoint, model, folder)
        return
    write_described(checkpoint, folder)
    for path in checkpoint.folder.iterdir():
        if path.name.endswith(_WEIGHTS) and path.name not in _OWN:
            (folder / path.name).unlink(missing_ok=True)
            try:
                os.link(path, folder / path.name)
            except OSError:
                shutil.copyfile(path, folder / path.name)


def _write_from_memory(checkpoint: Checkpoint, model: OpenVLAOFT, folder: Path) -> None:
    if model.network.has_film:
        raise CheckpointError(
            f"{checkpoint.folder}, whose towers belong into every checkpoint, is gone: keep more checkpoints "
            "(checkpoint.keep), and start again from one that is there"
        )
    plain = {name.replace(_BASE, "."): value for name, value in model.state_dict().items() if not _is_adapter(name)}
    of = lambda part: {n.removeprefix(part): value for n, value in plain.items() if n.startswith(part)}  # noqa: E731
    write_weights(checkpoint, of("network."), folder)
    for part, name in (("l1_head.", "action_head"), ("proprio_projector.", "proprio_projector")):
        if found := of(part):
            write_side_file(folder, name, 0, found)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(kept, path, metadata={"format": "pt"})


def _is_adapter(name: str) -> bool:
    return _LORA in name


def _is_critic(name: str) -> bool:
    return name.startswith(("critic.", "privileged_scale."))


def _there(name: str) -> str:
    """Returns peft's name of an adapter's tensor."""
    return _PEFT + name.removeprefix("model.").replace(".default.", ".")


def _here(name: str) -> str:
    """Returns our name of it."""
    if not name.startswith(_PEFT):
        return name
    head, _, kind = name.removeprefix(_PEFT).rpartition(_LORA)
    matrix, _, last = kind.partition(".")
    return f"model.{head}{_LORA}{matrix}.default.{last}"
