"""An oracle that is small enough for a repository: what no golden depends on is left out and comes back as zeros.

python -m tests.oracles.trimmed folder=<oracle> out=<folder> keep='case1\\..*|train\\..*'

Left out are the rows of the vocabulary that no kept golden reads (logits: all but the action tokens and what stands
behind them), the layers of the towers behind the one whose features are used, the tokenizer, whose licence is its own,
and the goldens whose names `keep` does not match, with the images of their cases.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from policies.checkpoint_folder import write_json
from policies.openvla.prompt import BOS_TOKEN, EMPTY_TOKEN, STOP_TOKEN
from policies.openvla.settings import OpenVLAConfig, read_config
from rlinf_embodied.command_line import main

TENSORS, SHAPES = "trimmed.safetensors", "trimmed.json"
_MODEL, _ROWS = "model.safetensors", "rows"
_COPIED = ("config.json", "dataset_statistics.json", "preprocessor_config.json")
_EMBEDDINGS, _HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
_BEHIND = re.compile(r"featurizer\.(norm|attn_pool)\.")
_BLOCK = re.compile(r"(.*featurizer\.blocks)\.(\d+)\.")
_NEEDS_ALL_COLUMNS = re.compile(r".*loss|.*prefill_logits_last|.*_top[1-9]\d*|.*\.bf16\..*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    folder: str = ""
    out: str = ""
    keep: str = ".*"


def trim(folder: Path, out: Path, keep: str) -> None:
    """Writes the small form of an oracle folder, with the goldens whose whole names match `keep`."""
    (out / "golden").mkdir(parents=True)
    (out / "checkpoint").mkdir()
    kept = _trim_goldens(folder / "golden", out / "golden", re.compile(keep))
    for name in _COPIED:
        shutil.copyfile(folder / "checkpoint" / name, out / "checkpoint" / name)
    config = read_config(folder / "checkpoint")
    weights, shapes = _trim_weights(folder / "checkpoint", config, _ids_in(kept, config))
    save_file(weights, out / "checkpoint" / TENSORS)
    (out / "checkpoint" / SHAPES).write_text(json.dumps(shapes) + "\n")


def expand(folder: Path, out: Path) -> None:
    """Writes the full form of a trimmed oracle folder."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(TENSORS, SHAPES))
    stored = load_file(folder / "checkpoint" / TENSORS)
    files: dict[str, dict[str, Tensor]] = {}
    for place, shape in json.loads((folder / "checkpoint" / SHAPES).read_text()).items():
        file, name = place.split("/")
        rows = stored.get(f"{_ROWS}/{place}")
        values = stored.get(place)
        tensor = torch.zeros(shape, dtype=torch.bfloat16) if values is None or rows is not None else values
        if values is not None and rows is not None:
            tensor[rows] = values
        files.setdefault(file, {})[name] = tensor
    for file, tensors in files.items():
        if file == _MODEL:
            save_file(tensors, out / "checkpoint" / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, out / "checkpoint" / file)


def is_trimmed(folder: Path) -> bool:
    """Whether a folder is a trimmed oracle."""
    return (folder / "checkpoint" / TENSORS).is_file()


def _trim_goldens(golden: Path, out: Path, keep: re.Pattern[str]) -> dict[str, Tensor]:
    tensors = load_file(golden / "golden.safetensors")
    kept = {n: t for n, t in tensors.items() if keep.fullmatch(n) and not _NEEDS_ALL_COLUMNS.fullmatch(n)}
    save_file(kept, out / "golden.safetensors")
    facts = json.loads((golden / "golden.json").read_text())
    names = ("cases", "unnorm_key")
    write_json(out / "golden.json", {name: facts[name] for name in names if name in facts})
    for image in golden.glob("*.png"):
        of_case = re.match(r"case\d+", image.name)
        prefix = of_case[0] if of_case else "rlinf"
        if any(prefix in name.split(".") for name in kept):
            shutil.copyfile(image, out / image.name)
    return kept


def _ids_in(goldens: Mapping[str, Tensor], config: OpenVLAConfig) -> Tensor:
    columns = config.action_columns
    special = torch.tensor([BOS_TOKEN, STOP_TOKEN, EMPTY_TOKEN, config.pad_token_id])
    read = [tensor.flatten() for name, tensor in goldens.items() if "input_ids" in name]
    return torch.cat([special, torch.arange(columns.start, columns.stop), *read]).unique()


def _trim_weights(
    checkpoint: Path, config: OpenVLAConfig, ids: Tensor
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    weights: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for file, tensors in _files(checkpoint).items():
        last = {match[1]: 0 for name in tensors if (match := _BLOCK.match(name))}
        for name in tensors:
            if match := _BLOCK.match(name):
                last[match[1]] = max(last[match[1]], int(match[2]))
        for name, tensor in tensors.items():
            place = f"{file}/{name}"
            shapes[place] = list(tensor.shape)
            match = _BLOCK.match(name)
            if _BEHIND.search(name) or (match and int(match[2]) == last[match[1]]):
                continue
            rows = {_EMBEDDINGS: ids, _HEAD: torch.arange(config.action_columns.start, config.vocab_size)}.get(name)
            if rows is not None:
                weights[f"{_ROWS}/{place}"] = rows
            weights[place] = (tensor if rows is None else tensor[rows]).contiguous()
    return weights, shapes


def _files(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    model: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        model |= load_file(path)
    side = {path.name: torch.load(path, weights_only=True) for path in sorted(checkpoint.glob("*.pt"))}
    return {_MODEL: model, **side}


def write(own: Options) -> None:
    trim(Path(own.folder), Path(own.out), own.keep)


if __name__ == "__main__":
    main(write, Options)
