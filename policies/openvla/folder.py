"""The folders of OpenVLA, OpenVLA-OFT and of policies trained here, in and out; weights must fit name by name.

config.json                     shapes; norm_stats of the data sets
dataset_statistics.json         action and proprioception statistics; where it exists, norm_stats does not count
model-0000k-of-0000n.safetensors, model.safetensors.index.json    or model.safetensors alone
preprocessor_config.json  tokenizer.json ...                      copied as they are

OpenVLA-OFT   action_head--<steps>_checkpoint.pt  proprio_projector--... : names begin with `module.`
trained here  policy.json: policy section and env, by which the folder is known
              critic.safetensors: value head, statistics of the state that it sees
              adapter_config.json  adapter_model.safetensors: LoRA in peft's form; other weights are then the base's
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from policies.checkpoint_folder import read_json, write_json
from policies.language_folder import INDEX, weight_files
from policies.openvla.actions import range_of
from policies.openvla.config import CONFIG, OPTIONS, WHOLE, Head, OpenVLAConfig, OpenVLAOptions, config_of
from policies.openvla.network import OpenVLA
from policies.openvla.oft import L1Head, OpenVLAOFT, ProprioProjector
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import typed

STATISTICS = "dataset_statistics.json"
FILE, CRITIC = "policy.json", "critic.safetensors"
ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_SHARD_BYTES = 5 * 1000**3
_COPIED = {".json", ".model", ".txt", ".jinja", ".py"}  # of tokenizers and processors
_NOT_COPIED = {CONFIG, STATISTICS, INDEX, FILE, ADAPTER_CONFIG, "evaluation.json", "state.json", "manifest.json"}
_SHAPE = ("decoding", "head", "proprio", "lora")  # options that decide which tensors there are
_NO_TENSORS = (AttributeError, TypeError)  # raised where a file holds something else
_PARALLEL, _LORA, _PEFT = "module.", ".lora_", "base_model.model."


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a published folder holds."""

    folder: Path  # where it was read, which the tokenizer and the image processor are read from, too
    config: OpenVLAConfig
    statistics: Mapping[str, object]  # of actions and proprioception, by data set
    network: OpenVLA  # with its weights, in eval mode, on the CPU
    files: Mapping[str, bytes] = field(init=False)  # tokenizer and so on: the folder may be gone when they are written

    def __post_init__(self) -> None:
        paths = [path for path in sorted(self.folder.iterdir()) if path.suffix in _COPIED]
        object.__setattr__(self, "files", {p.name: p.read_bytes() for p in paths if p.name not in _NOT_COPIED})


# ----------------------------------------------------------------------------------------------------------------- read
def read_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Returns what a published folder holds.

    Raises:
        CheckpointError: a file is missing or damaged, the folder is of another model, a tensor is missing, unknown, of
            another shape, or not finite.
    """
    files = weight_files(folder)
    config = config_of(read_json(folder / CONFIG, WHOLE), str(folder / CONFIG))
    network, tensors = empty_network(config), {}
    for file in files:
        tensors |= _read_tensors(file)
    _load(network, tensors, folder, dtype)
    network.renew_buffers()
    path = folder / STATISTICS
    return Checkpoint(folder, config, read_json(path, WHOLE) if path.is_file() else config.statistics, network)


def empty_network(config: OpenVLAConfig) -> OpenVLA:
    """Returns a network on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return OpenVLA(config)


def with_oft(checkpoint: Checkpoint, options: OpenVLAOptions, chunk: int) -> OpenVLAOFT:
    """Returns a checkpoint's network with the parts of OFT that `options` asks for, from the folder's side files.

    Raises:
        CheckpointError: a side file is missing, double, damaged or does not fit.
        ConfigError: there are no statistics of `unnorm_key`, or they are of another robot than the action head.
    """
    network, key, statistics = checkpoint.network, options.unnorm_key, checkpoint.statistics
    dtype = next(network.parameters()).dtype
    dim, head, projector = len(range_of(statistics, key).low), None, None
    if options.head is Head.l1:
        tensors = _read_side_file(checkpoint.folder, "action_head")
        head = L1Head(network.dim, _length(tensors, "model.fc2.bias", dim))
        _load(head, tensors, checkpoint.folder, dtype)
        range_of(statistics, key, dim=head.action_dim)
    if options.proprio:
        tensors = _read_side_file(checkpoint.folder, "proprio_projector")
        projector = ProprioProjector(network.dim, _length(tensors, "fc1.weight", 0, axis=1))
        _load(projector, tensors, checkpoint.folder, dtype)
        range_of(statistics, key, "proprio", projector.proprio_dim)
    return OpenVLAOFT(network, chunk, dim, head, projector)


def _read_side_file(folder: Path, part: str) -> dict[str, Tensor]:
    paths = sorted(folder.glob(f"*{part}*.pt"))
    if len(paths) != 1:
        found = ", ".join(path.name for path in paths) or "none"
        raise CheckpointError(
            f"{folder} must hold exactly one {part}--<steps>_checkpoint.pt, but there is {found}: copy it there, "
            "remove the others, or switch this part off"
        )
    return {name.removeprefix(_PARALLEL): tensor for name, tensor in _read_tensors(paths[0]).items()}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .safetensors or .pt file by name, all of them finite."""
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


def _length(tensors: Mapping[str, Tensor], name: str, otherwise: int, axis: int = 0) -> int:
    return tensors[name].shape[axis] if name in tensors and tensors[name].ndim > axis else otherwise


def _load(module: nn.Module, tensors: Mapping[str, Tensor], where: Path, dtype: torch.dtype) -> None:
    try:
        module.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {where} do not fit: {error}; copy them again, or the {CONFIG} that belongs to them"
        ) from error
    module.eval()


# ---------------------------------------------------------------------------------------------------------------- write
def write_checkpoint(
    checkpoint: Checkpoint, folder: Path, model: OpenVLAOFT | None = None, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Writes a checkpoint, with the present weights, in the published layout; adapters are left out.

    Weights that the folder holds are replaced.  A `model` has OFT's parts, which become side files; no weight file is
    larger than `shard_bytes`, unless one tensor is.
    """
    _write_described(checkpoint, folder)
    for stale in [*folder.glob("model*.safetensors"), *folder.glob("*--*_checkpoint.pt"), folder / INDEX]:
        stale.unlink(missing_ok=True)  # it may be a link to a file of another folder
    weights = _plain_weights(checkpoint.network)
    save_torch_state_dict(weights, folder, max_shard_size=shard_bytes, metadata={"format": "pt"})
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    write_json(folder / CONFIG, {**checkpoint.config.raw, "torch_dtype": dtype})
    for part, attribute in (("action_head", "l1_head"), ("proprio_projector", "proprio_projector")):
        if (module := getattr(model, attribute, None)) is not None:
            tensors = {_PARALLEL + name: tensor for name, tensor in _plain_weights(module).items()}
            torch.save(tensors, folder / f"{part}--0_checkpoint.pt")


def _write_described(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes all of a checkpoint but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in checkpoint.files.items():
        (folder / name).write_bytes(content)
    write_json(folder / CONFIG, checkpoint.config.raw)
    write_json(folder / STATISTICS, checkpoint.statistics)


def _plain_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the weights below adapters, by their published names."""
    state = module.state_dict().items()
    return {name.replace(".base_layer.", "."): _stored(tensor) for name, tensor in state if _LORA not in name}


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


# ------------------------------------------------------------------------------------------------ policies trained here
def read_described(folder: Path, env: EnvSpec | None, config: PolicyConfig | None) -> tuple[PolicyConfig, EnvSpec]:
    """Returns how a folder's policy is used, and in what it acts: of a published one `config` and `env`.

    Of one that was trained here `config` may change what decides no shape.

    Raises:
        CheckpointError: a published folder without `env` or `config`, or a policy of another shape than `config`.
    """
    if not (folder / FILE).is_file():
        if env is None or config is None:
            raise CheckpointError(
                f"{folder} is a published folder, which does not say what it acts in: start a training with it "
                "(warm_start.checkpoint=<dir> run.num_iterations=0 evaluates it), and use that run's checkpoint"
            )
        return config, env
    content = read_json(folder / FILE, WHOLE)
    try:
        known = EnvSpec.of(content["env"])
        saved = PolicyConfig(**{**content["policy"], "critic": Critic(content["policy"]["critic"])})
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{folder / FILE} says no policy and env ({error!r}): {WHOLE}") from error
    theirs, ours = (typed(each.options, OpenVLAOptions, OPTIONS) for each in (saved, config or saved))
    shape = (*_SHAPE, "freeze_vision") if theirs.lora.rank else _SHAPE  # which says where adapters are
    pairs = {f"{OPTIONS}.{name}": (getattr(theirs, name), getattr(ours, name)) for name in shape}
    for path, (there, here) in (pairs | {"policy.critic": (saved.critic, (config or saved).critic)}).items():
        if there != here:
            raise CheckpointError(
                f"{path} is {here}, but the policy in {folder} was made with {there}: use that, or another checkpoint"
            )
    return config or saved, known


def read_parts(folder: Path, module: nn.Module, has_adapters: bool) -> None:
    """Overwrites critic and adapters with those of a folder that was trained here.

    Raises:
        CheckpointError: they are missing, damaged or of other shapes.
    """
    if not (folder / FILE).is_file():
        return
    tensors = _read_tensors(folder / CRITIC)
    if has_adapters:
        for name, tensor in _read_tensors(folder / ADAPTERS).items():
            tensors["model." + re.sub(r"(\.lora_[AB])\.", r"\1.default.", name.removeprefix(_PEFT))] = tensor
    unlike = sorted(set(tensors) ^ set(_parts(module, has_adapters)))
    if unlike:
        raise CheckpointError(f"{folder} holds other tensors than this policy has ({', '.join(unlike[:3])}): {WHOLE}")
    try:
        module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / CRITIC} or {ADAPTERS} does not fit ({error}): {WHOLE}") from error


def write_policy(
    folder: Path, config: PolicyConfig, env: EnvSpec, checkpoint: Checkpoint, model: OpenVLAOFT, module: nn.Module
) -> None:
    """Writes a policy; weights below adapters are links to the files that they were read from.

    `model` is the network with OFT's parts, `module` all of it, with critic and adapters.
    """
    lora = typed(config.options, OpenVLAOptions, OPTIONS).lora
    if lora.rank and checkpoint.folder.is_dir():
        _link_base(checkpoint, folder)
    else:  # or an earlier checkpoint of the run, which was not kept
        write_checkpoint(checkpoint, folder, model)
    parts = _parts(module, bool(lora.rank))
    save_file({name: _stored(t) for name, t in parts.items() if _LORA not in name}, folder / CRITIC)
    if lora.rank:
        named = {_PEFT + n.removeprefix("model.").replace(".default.", "."): t for n, t in parts.items() if _LORA in n}
        save_file({name: _stored(tensor) for name, tensor in named.items()}, folder / ADAPTERS)
        content = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)}
        write_json(folder / ADAPTER_CONFIG, content)
    write_json(folder / FILE, {"policy": asdict(config), "env": asdict(env)})


def _link_base(checkpoint: Checkpoint, folder: Path) -> None:
    _write_described(checkpoint, folder)
    for path in checkpoint.folder.iterdir():
        if path.name.endswith((".safetensors", ".pt", ".index.json")) and path.name not in (CRITIC, ADAPTERS):
            (folder / path.name).unlink(missing_ok=True)
            try:
                os.link(path, folder / path.name)
            except OSError:  # another file system
                shutil.copyfile(path, folder / path.name)


def _parts(module: nn.Module, has_adapters: bool) -> dict[str, Tensor]:
    """Returns the tensors that a published folder has no place for: critic, and adapters."""
    kinds = ("critic.", "privileged_scale.")
    state = module.state_dict()
    return {n: t for n, t in state.items() if n.startswith(kinds) or (has_adapters and _LORA in n)}
