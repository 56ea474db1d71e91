"""The side files of an OpenVLA-OFT folder: action head, proprioception projector, towers with FiLM.

action_head--<steps>_checkpoint.pt  proprio_projector--<steps>_checkpoint.pt  vision_backbone--<steps>_checkpoint.pt

The first two were written by data-parallel training, whose names begin with `module.`; the third one replaces both
towers of the network.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from policies.openvla.film import add_film
from policies.openvla.folder import Checkpoint, read_checkpoint, require_finite, require_fit, write_checkpoint
from policies.openvla.oft import Head, L1Head, OpenVLAOFT, ProprioProjector
from policies.openvla.statistics import Scaling, range_of, require_dim
from rlinf_embodied.errors import CheckpointError

_PARALLEL, _TOWERS = "module.", "vision_backbone."
_RANK = re.compile(r"lora_A\.\w+\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OftSettings:
    """What a published OFT folder does not say about itself.

    Attributes:
        unnorm_key: the data set whose statistics scale actions and proprioception; None where there is only one.
        chunk_len: actions per chunk C; 8 for LIBERO, 25 for ALOHA, 5 for Bridge.
        num_images: images per observation K.
        head: how actions come about.
        proprio: whether the robot's own state is a token.
        film: whether the instruction modulates the towers.
        scaling: what -1 and 1 stand for; `bounds` for ALOHA.
    """

    unnorm_key: str | None = None
    chunk_len: int = 8
    num_images: int = 1
    head: Head = Head.discrete
    proprio: bool = False
    film: bool = False
    scaling: Scaling = Scaling.quantiles


def read_oft(folder: Path, settings: OftSettings, dtype: torch.dtype = torch.float32) -> tuple[Checkpoint, OpenVLAOFT]:
    """Returns (checkpoint, model) of a folder.

    Raises:
        CheckpointError: see `read_checkpoint`; or a side file is missing, double, damaged or does not fit.
        ConfigError: there are no statistics of `unnorm_key`, or they are of another robot than the action head.
    """
    checkpoint = read_checkpoint(folder, dtype)
    key, scaling = settings.unnorm_key, settings.scaling
    action_dim = range_of(checkpoint.statistics, key, scaling=scaling).dim
    network = checkpoint.network
    head = projector = None
    if settings.head is Head.l1:
        tensors = _read_side_file(folder, "action_head", _PARALLEL)
        head = L1Head(network.dim, _length(tensors, "model.fc2.bias", action_dim))
        _load(head, tensors, folder, dtype)
    if settings.proprio:
        tensors = _read_side_file(folder, "proprio_projector", _PARALLEL)
        projector = ProprioProjector(network.dim, _length(tensors, "fc1.weight", 0, axis=1))
        _load(projector, tensors, folder, dtype)
        require_dim(range_of(checkpoint.statistics, key, "proprio", scaling), projector.proprio_dim, key, "proprio")
    if settings.film:
        tensors = _read_side_file(folder, "vision_backbone", _TOWERS)
        with torch.device("meta"):
            add_film(network.vision_backbone, network.dim, _rank(tensors, folder))
        _load(network.vision_backbone, tensors, folder, dtype)
    return checkpoint, OpenVLAOFT(network, settings.chunk_len, action_dim, settings.num_images, head, projector)


def write_oft(checkpoint: Checkpoint, model: OpenVLAOFT, folder: Path, num_steps: int = 0) -> None:
    """Writes a model's side files; `num_steps` stands in their names.

    The rest of the folder is written where the model has no FiLM.  Where it has, the network's own towers are gone, so
    those of the folder that the checkpoint was read from are copied.
    """
    base = read_checkpoint(checkpoint.folder, _dtype(model)) if model.network.has_film else checkpoint
    if model.network.has_film:
        kept = {name: t for name, t in model.network.state_dict().items() if not name.startswith(_TOWERS)}
        base.network.load_state_dict(kept, strict=False)
        write_side_file(folder, "vision_backbone", num_steps, model.network.vision_backbone.state_dict(), _TOWERS)
    write_checkpoint(base, folder)
    if model.l1_head is not None:
        write_side_file(folder, "action_head", num_steps, model.l1_head.state_dict())
    if model.proprio_projector is not None:
        write_side_file(folder, "proprio_projector", num_steps, model.proprio_projector.state_dict())


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def write_side_file(
    folder: Path, part: str, num_steps: int, state: Mapping[str, Tensor], prefix: str = _PARALLEL
) -> None:
    """Writes the tensors of a part, as write_side_file(folder, "action_head", 0, head.state_dict())."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    for stale in _side_files(folder, part):
        stale.unlink()
    torch.save(tensors, folder / f"{part}--{num_steps}_checkpoint.pt")


def _side_files(folder: Path, part: str) -> list[Path]:
    return sorted(path for path in folder.glob("*.pt") if part in path.name)


def _read_side_file(folder: Path, part: str, prefix: str) -> dict[str, Tensor]:
    paths = _side_files(folder, part)
    if len(paths) != 1:
        found = ", ".join(path.name for path in paths) or "none"
        raise CheckpointError(
            f"{folder} must hold exactly one {part}--<steps>_checkpoint.pt, but there is {found}: copy it there, "
            "remove the others, or switch this part off"
        )
    try:
        tensors = torch.load(paths[0], map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{paths[0]} cannot be read ({error}): copy it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{paths[0]} holds no tensors by name: copy it again")
    named = {str(name).removeprefix(prefix): tensor for name, tensor in tensors.items()}
    for name, tensor in named.items():
        require_finite(name, tensor, paths[0])
    return named


def _length(tensors: Mapping[str, Tensor], name: str, otherwise: int, axis: int = 0) -> int:
    return tensors[name].shape[axis] if name in tensors and tensors[name].ndim > axis else otherwise


def _rank(tensors: Mapping[str, Tensor], folder: Path) -> int:
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if _RANK.search(name)}
    if len(ranks) != 1:
        raise CheckpointError(
            f"the vision_backbone file in {folder} has adapters of the ranks {sorted(ranks)}, but there must be one "
            "rank: give a file that OpenVLA-OFT wrote"
        )
    return ranks.pop()


def _load(module: nn.Module, tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    require_fit({name: tuple(tensor.shape) for name, tensor in tensors.items()}, module, folder)
    module.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, assign=True)
    module.eval()
