"""Folders of pi0, pi0.5 and SmolVLA in LeRobot's layout, in and out; weights must fit name by name.

config.json  policy_preprocessor.json  policy_postprocessor.json      what the policy is; statistics beside them
model.safetensors     names as LeRobot writes them (`model.` first) or as on the hub (without it)
backbone/             what the hub holds under the backbone's name: tokenizer.json, tokenizer_config.json, config.json
                      of a SmolVLA; sizes.json of a pi0 that is no gemma_2b with gemma_300m.  LeRobot's folders have no
                      such part: copy it there, or name it as policy.options.backbone
trained here          further files, see policies/published_folder.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from policies.checkpoint_folder import read_tensors, write_json
from policies.language_folder import weight_files
from policies.pi.config import CONFIG, Family, PiConfig, read_config
from policies.pi.network import FlowNetwork, keep_float32, new_network
from policies.pi.processors import PaddedTokenizer, Processors, read_processors, write_processors
from policies.published_folder import load_weights, plain_weights

BACKBONE, _WEIGHTS, _PREFIX = "backbone", "model.safetensors", "model."
_COPIED = {".json", ".jinja", ".model", ".txt"}  # of a backbone
_PALIGEMMA = "paligemma_with_expert.paligemma."
_EMBEDDING, _HEAD = f"{_PALIGEMMA}model.language_model.embed_tokens.weight", f"{_PALIGEMMA}lm_head.weight"
_OLD_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")  # of SmolVLA's older files


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds."""

    folder: Path  # where it was read
    config: PiConfig
    processors: Processors
    tokenizer: PaddedTokenizer
    network: FlowNetwork  # with its weights, in eval mode, on the CPU
    backbone: Mapping[str, bytes] = field(default_factory=dict)  # its small files: they are written with the policy


def read_checkpoint(folder: Path, backbone: Path | None = None, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Returns what a folder in LeRobot's layout holds.

    `backbone` is where tokenizer and sizes of the backbone are, if not in the folder's own part.  With a `dtype` of
    bfloat16 norms, vision and the outer projections stay float32.

    Raises:
        CheckpointError: a file is missing or damaged, the folder is of another policy, a tensor is missing, unknown, of
            another shape, or not finite.
    """
    place = backbone or folder / BACKBONE
    config = read_config(folder / CONFIG, place)
    processors = read_processors(folder, config)
    tokenizer = PaddedTokenizer(place, processors.max_length, processors.longest)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors |= read_tensors(file)
    with torch.device("meta"):
        network = new_network(config, tokenizer.image_tokens if config.image_tokens else None)
    hint = f"; sizes other than those of the published backbone belong to {BACKBONE}/"
    load_weights(network, _renamed(tensors, config), folder, dtype, keep_float32, hint)
    network.renew_buffers()
    files = {path.name: path.read_bytes() for path in sorted(place.iterdir()) if path.suffix in _COPIED}
    return Checkpoint(folder, config, processors, tokenizer, network, files)


def _renamed(tensors: Mapping[str, Tensor], config: PiConfig) -> dict[str, Tensor]:
    """Returns a file's tensors by the names that a network has, without those that LeRobot leaves aside."""
    adaptive, smolvla = config.family is Family.pi05, config.family is Family.smolvla
    plain_norm = re.compile(r"paligemma_with_expert\.gemma_expert\.model\.(.*_layernorm|norm)\.weight")
    further_layer = re.compile(r"vlm_with_expert\.vlm\.model\.text_model\.layers\.(\d+)\.")
    found: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = full.removeprefix(_PREFIX)
        name = re.sub(r"vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name)
        if adaptive:
            name = re.sub(r"^action_time_mlp_", "time_mlp_", name)
            if name.startswith("state_proj.") or plain_norm.fullmatch(name):
                continue
        else:
            name = re.sub(r"^time_mlp_", "action_time_mlp_", name)
        layer = further_layer.match(name)
        if smolvla and (name.startswith(_OLD_STATISTICS) or (layer and int(layer[1]) >= config.text.depth)):
            continue
        found[name] = tensor
    if not smolvla and (_EMBEDDING in found) != (_HEAD in found):  # they are tied, and one of them was left out
        found[_EMBEDDING] = found[_HEAD] = found.get(_EMBEDDING, found.get(_HEAD))  # pyright: ignore[reportArgumentType]
    return found


def write_described(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes all of a checkpoint but its weights."""
    (folder / BACKBONE).mkdir(parents=True, exist_ok=True)
    for name, content in checkpoint.backbone.items():
        (folder / BACKBONE / name).write_bytes(content)
    write_json(folder / CONFIG, checkpoint.config.raw)
    write_processors(folder, checkpoint.config, checkpoint.processors)


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes a checkpoint, with the present weights, in LeRobot's layout; adapters are left out."""
    write_described(checkpoint, folder)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()  # it may be a link to a file of another folder
    weights = {_PREFIX + name: tensor for name, tensor in plain_weights(checkpoint.network).items()}
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
