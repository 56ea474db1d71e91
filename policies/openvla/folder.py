"""Reads and writes folders of OpenVLA, OpenVLA-OFT and policies trained here; weights must match name by name.

config.json                     shapes; norm_stats of the data sets
dataset_statistics.json         action and proprioception statistics; overrides norm_stats
model-0000k-of-0000n.safetensors, model.safetensors.index.json    or model.safetensors alone
preprocessor_config.json  tokenizer.json ...                      copied unchanged

OpenVLA-OFT   action_head--<steps>_checkpoint.pt  proprio_projector--... : names begin with `module.`
trained here  further files, see policies/published_folder.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn

from policies.checkpoint_folder import CONFIG, STATISTICS, read_json, read_tensors, seeded, write_json
from policies.language_folder import INDEX, weight_files
from policies.openvla.config import WHOLE, Head, OpenVLAConfig, OpenVLAOptions, config_of
from policies.openvla.network import OpenVLA
from policies.openvla.oft import L1Head, OpenVLAOFT, ProprioProjector
from policies.published_folder import OWN_FILES, load_weights, plain_weights
from rlinf_embodied.errors import CheckpointError

_SHARD_BYTES = 5 * 1000**3
_COPIED = {".json", ".model", ".txt", ".jinja", ".py"}  # of tokenizers and processors
_NOT_COPIED = {CONFIG, STATISTICS, INDEX, *OWN_FILES}
_PARALLEL = "module."
_ROBOT = ", or use an env of the robot that they were trained for"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a published folder."""

    folder: Path  # the source, which also has the tokenizer and the image processor
    config: OpenVLAConfig
    statistics: Mapping[str, object]  # of actions and proprioception, by data set
    network: OpenVLA  # with its weights, in eval mode, on the CPU
    files: Mapping[str, bytes] = field(init=False)  # tokenizer etc., kept in case the folder is deleted

    def __post_init__(self) -> None:
        paths = [path for path in sorted(self.folder.iterdir()) if path.suffix in _COPIED]
        object.__setattr__(self, "files", {p.name: p.read_bytes() for p in paths if p.name not in _NOT_COPIED})


# ----------------------------------------------------------------------------------------------------------------- read
def read_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Returns the content of a published folder.

    Raises:
        CheckpointError: a file is missing or damaged, the folder is of another model, a tensor is missing, unknown, of
            another shape, or not finite.
    """
    files = weight_files(folder)
    config = config_of(read_json(folder / CONFIG, WHOLE), str(folder / CONFIG))
    network = empty_network(config)
    load_weights(network, {name: t for file in files for name, t in read_tensors(file).items()}, folder, dtype)
    network.renew_buffers()
    path = folder / STATISTICS
    return Checkpoint(folder, config, read_json(path, WHOLE) if path.is_file() else config.statistics, network)


def empty_network(config: OpenVLAConfig) -> OpenVLA:
    """Returns a network on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return OpenVLA(config)


def with_oft(
    checkpoint: Checkpoint, options: OpenVLAOptions, chunk: int, action_dim: int, proprio_dim: int
) -> OpenVLAOFT:
    """Returns a checkpoint's network with the parts of OFT that `options` selects, from the folder's side files.

    Raises:
        CheckpointError: a side file is missing, ambiguous, damaged, or of a robot with other numbers of dimensions.
    """
    network, folder, head, projector = checkpoint.network, checkpoint.folder, None, None
    dtype = next(network.parameters()).dtype
    if options.head is Head.l1:
        dtype = torch.float32 if options.lora.rank else dtype  # trained without adapters
        with seeded(0, "action_head"):
            head = L1Head(network.dim, action_dim)
        _load_part(head, "action_head", folder, dtype, options.new_parts)
    if options.proprio:
        with seeded(0, "proprio_projector"):
            projector = ProprioProjector(network.dim, proprio_dim)
        _load_part(projector, "proprio_projector", folder, dtype, options.new_parts)
    return OpenVLAOFT(network, chunk, action_dim, head, projector)


def _load_part(module: nn.Module, part: str, folder: Path, dtype: torch.dtype, may_lack: bool) -> None:
    paths = sorted(folder.glob(f"*{part}*.pt"))
    if not paths and may_lack:
        module.to(dtype).eval()
        return
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths) or "none"
        raise CheckpointError(
            f"{folder} must hold exactly one {part}--<steps>_checkpoint.pt, but there is {names}: copy it there, "
            "remove the others, switch this part off, or fine-tune a new one with policy.options.new_parts=true"
        )
    tensors = {name.removeprefix(_PARALLEL): tensor for name, tensor in read_tensors(paths[0]).items()}
    load_weights(module, tensors, folder, dtype, hint=_ROBOT)


# ---------------------------------------------------------------------------------------------------------------- write
def write_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    model: OpenVLAOFT | None = None,
    *,
    weights: bool = True,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a checkpoint in the published layout, with or without its current `weights`, without adapters.

    Existing weights in the folder are replaced.  OFT's parts of `model` become side files.  A weight file exceeds
    `shard_bytes` only if a single tensor does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in checkpoint.files.items():
        (folder / name).write_bytes(content)
    write_json(folder / CONFIG, checkpoint.config.raw)
    write_json(folder / STATISTICS, checkpoint.statistics)
    for part, attribute in (("action_head", "l1_head"), ("proprio_projector", "proprio_projector")):
        for stale in folder.glob(f"*{part}*.pt"):
            stale.unlink()  # it may be a link to a file of another folder
        if (module := getattr(model, attribute, None)) is not None:
            tensors = {_PARALLEL + name: tensor for name, tensor in plain_weights(module).items()}
            torch.save(tensors, folder / f"{part}--0_checkpoint.pt")
    if not weights:
        return
    for stale in [*folder.glob("model*.safetensors"), folder / INDEX]:
        stale.unlink(missing_ok=True)
    state = plain_weights(checkpoint.network)
    save_torch_state_dict(state, folder, max_shard_size=shard_bytes, metadata={"format": "pt"})
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    write_json(folder / CONFIG, {**checkpoint.config.raw, "torch_dtype": dtype})
