"""The published folder of an OpenVLA checkpoint, in and out; weights must fit name by name.

config.json                     shapes; norm_stats of the data sets
dataset_statistics.json         action and proprioception statistics; where it exists, norm_stats does not count
model-0000k-of-0000n.safetensors, model.safetensors.index.json    or model.safetensors alone
preprocessor_config.json  tokenizer.json ...                      copied as they are
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from policies.checkpoint_folder import read_json, write_json
from policies.language_folder import INDEX, WEIGHTS, require_files
from policies.openvla.network import OpenVLA
from policies.openvla.settings import CONFIG, WHOLE, OpenVLAConfig, read_config
from rlinf_embodied.errors import CheckpointError

STATISTICS = "dataset_statistics.json"
_SHARD_BYTES = 5 * 1000**3
_SHOWN = 3
_SUFFIXES_OF_FILES = {".json", ".model", ".txt", ".jinja", ".py"}  # of tokenizers and processors
_NOT_COPIED = {
    CONFIG,
    STATISTICS,
    INDEX,
    "policy.json",
    "evaluation.json",
    "adapter_config.json",
    "state.json",
    "manifest.json",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds.

    Attributes:
        folder: where it was read, which the tokenizer and the image processor are read from, too.
        config: the shapes.
        statistics: action and proprioception statistics by data set.
        network: with its weights, in eval mode, on the CPU.
        files: what else the folder holds, by name: tokenizer, image processor; it may be gone when they are written.
    """

    folder: Path
    config: OpenVLAConfig
    statistics: Mapping[str, object]
    network: OpenVLA
    files: Mapping[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        paths = sorted(self.folder.iterdir())
        object.__setattr__(self, "files", {path.name: path.read_bytes() for path in paths if _goes_along(path)})


def read_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Returns what a published folder holds.

    Raises:
        CheckpointError: a file is missing or damaged, the folder is of another model, a tensor is missing, unknown, of
            another shape, or not finite.
    """
    require_files(folder)
    config = read_config(folder)
    network = empty_network(config)
    network.load_state_dict(dict(_tensors(folder, network, dtype)), assign=True)
    network.renew_buffers()
    return Checkpoint(folder, config, read_statistics(folder, config), network)


def empty_network(config: OpenVLAConfig, film_rank: int | None = None) -> OpenVLA:
    """Returns a network on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return OpenVLA(config, film_rank)


def read_statistics(folder: Path, config: OpenVLAConfig) -> Mapping[str, object]:
    """Returns the statistics by data set; dataset_statistics.json comes before norm_stats of config.json."""
    path = folder / STATISTICS
    return read_json(path, WHOLE) if path.is_file() else config.statistics


def write_checkpoint(checkpoint: Checkpoint, folder: Path, shard_bytes: int = _SHARD_BYTES) -> None:
    """Writes a checkpoint in the published layout; tokenizer and image processor come from where it was read.

    Args:
        checkpoint: what to write; its network's present weights count.
        folder: is made where it does not exist; weights that it holds are replaced once the new ones are written.
        shard_bytes: no weight file is larger, unless one tensor is.
    """
    write_weights(checkpoint, checkpoint.network.state_dict(), folder, shard_bytes)


def write_weights(
    checkpoint: Checkpoint, state: Mapping[str, Tensor], folder: Path, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Writes a checkpoint with other weights than its network's; see `write_checkpoint`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_described(checkpoint, folder)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as aside:
        _write_shards(Path(aside), weights, shard_bytes)
        write_json(Path(aside) / CONFIG, {**checkpoint.config.raw, "torch_dtype": dtype})
        new = {path.name: path for path in Path(aside).iterdir()}
        for stale in [*folder.glob("model*.safetensors"), folder / INDEX]:
            if stale.name not in new:
                stale.unlink(missing_ok=True)
        for name, path in new.items():
            path.replace(folder / name)


def write_described(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes all of a checkpoint but its weights."""
    for name, content in checkpoint.files.items():
        (folder / name).write_bytes(content)
    write_json(folder / CONFIG, checkpoint.config.raw)
    write_json(folder / STATISTICS, checkpoint.statistics)


def _goes_along(path: Path) -> bool:
    return path.is_file() and path.suffix in _SUFFIXES_OF_FILES and path.name not in _NOT_COPIED


def require_fit(found: Mapping[str, tuple[int, ...]], module: nn.Module, where: Path) -> None:
    """Checks names and shapes of tensors against those of a module.

    Raises:
        CheckpointError: some are missing, unknown, or of another shape.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    other = [f"{n} {found[n]} for {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]]
    faults = [("lacks", missing), ("has unknown", unknown), ("has of another shape", other)]
    said = [f"{verb} {len(names)} tensors, first {', '.join(names[:_SHOWN])}" for verb, names in faults if names]
    if said:
        raise CheckpointError(
            f"{where} {'; '.join(said)}: every tensor of the model must be there and no other; copy the weights again, "
            f"or the {CONFIG} that belongs to them"
        )


def require_finite(name: str, tensor: Tensor, where: Path) -> None:
    """Checks a tensor's values.

    Raises:
        CheckpointError: one is NaN or infinite.
    """
    wrong = tensor.numel() - int(torch.isfinite(tensor).sum())
    if wrong:
        raise CheckpointError(
            f"{where}: {wrong} of {tensor.numel()} values of {name} are NaN or infinite: the training that wrote it "
            "diverged or the file is damaged; copy it again or give an earlier checkpoint"
        )


def _tensors(folder: Path, module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors, after the names and shapes of all files were checked."""
    files = _weight_files(folder)
    found: dict[str, tuple[int, ...]] = {}
    try:
        for path in files:
            with safe_open(path, framework="pt") as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        require_fit(found, module, folder)
        for path in files:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensor = opened.get_tensor(name)
                    require_finite(name, tensor, path)
                    yield name, tensor.to(dtype)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the weights in {folder} cannot be read ({error}): copy them again") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    shards = cast("dict[str, str]", read_json(folder / INDEX, WHOLE)["weight_map"]).values()
    return [folder / name for name in sorted(set(shards))]


def _write_shards(folder: Path, weights: Mapping[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in weights.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    names = [f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
    for file_name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file_name, metadata={"format": "pt"})
    places = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in weights.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
