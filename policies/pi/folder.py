"""Reads and writes folders of pi0, pi0.5 and SmolVLA in LeRobot's layout; weights must match name by name.

config.json  policy_preprocessor.json  policy_postprocessor.json      settings; statistics in files next to them
model.safetensors     names as LeRobot writes them (`model.` first) or as on the hub (without it)
backbone/             files of the backbone on the hub: tokenizer.json, tokenizer_config.json, config.json of a SmolVLA;
                      sizes.json of a pi0 other than gemma_2b with gemma_300m.  LeRobot's folders lack them: copy them
                      there, or give their folder as policy.options.backbone
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

from policies.checkpoint_folder import CONFIG, WEIGHTS, read_tensors, write_json
from policies.language_folder import weight_files
from policies.pi.config import Family, PiConfig, read_config
from policies.pi.network import FlowNetwork, keep_float32, new_network
from policies.pi.processors import PaddedTokenizer, Processors, read_processors, write_processors
from policies.published_folder import load_weights, plain_weights

BACKBONE, _PREFIX = "backbone", "model."
_COPIED = {".json", ".jinja", ".model", ".txt"}  # of a backbone
_PALIGEMMA = "paligemma_with_expert.paligemma."
_EMBEDDING, _HEAD = f"{_PALIGEMMA}model.language_model.embed_tokens.weight", f"{_PALIGEMMA}lm_head.weight"
_OLD_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")  # in SmolVLA's older files


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a folder."""

    folder: Path  # the source
    config: PiConfig
    processors: Processors
    tokenizer: PaddedTokenizer
    network: FlowNetwork  # with its weights, in eval mode, on the CPU
    backbone: Mapping[str, bytes] = field(default_factory=dict)  # its small files, which are written with the policy


def read_checkpoint(folder: Path, backbone: Path | None = None, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Returns the content of a folder in LeRobot's layout.

    `backbone` is the folder of the backbone's tokenizer and sizes, if not backbone/ in the folder.  With bfloat16 as
    `dtype`, norms, vision and the outer projections stay float32.

    Raises:
        CheckpointError: a file is missing or damaged, the folder is of another policy, a tensor is missing, unknown, of
            another shape, or not finite.
    """
    backbone_folder = backbone or folder / BACKBONE
    config = read_config(folder / CONFIG, backbone_folder)
    processors = read_processors(folder, config)
    tokenizer = PaddedTokenizer(backbone_folder, processors.max_length, processors.longest)
    tensors = {name: tensor for file in weight_files(folder) for name, tensor in read_tensors(file).items()}
    with torch.device("meta"):
        network = new_network(config, tokenizer.image_tokens if config.image_tokens else None)
    hint = f"; sizes other than those of the published backbone belong to {BACKBONE}/"
    load_weights(network, _renamed(tensors, config), folder, dtype, keep_float32, hint)
    network.renew_buffers()
    files = {path.name: path.read_bytes() for path in sorted(backbone_folder.iterdir()) if path.suffix in _COPIED}
    return Checkpoint(folder, config, processors, tokenizer, network, files)


def _renamed(tensors: Mapping[str, Tensor], config: PiConfig) -> dict[str, Tensor]:
    """Returns a file's tensors by the network's parameter names, without those that LeRobot ignores."""
    adaptive, smolvla = config.family is Family.pi05, config.family is Family.smolvla
    plain_norm = re.compile(r"paligemma_with_expert\.gemma_expert\.model\.(.*_layernorm|norm)\.weight")
    further_layer = re.compile(r"vlm_with_expert\.vlm\.model\.text_model\.layers\.(\d+)\.")
    renamed: dict[str, Tensor] = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(_PREFIX)
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
        renamed[name] = tensor
    if not smolvla and (_EMBEDDING in renamed) != (_HEAD in renamed):  # tied, and the file has only one
        renamed[_EMBEDDING] = renamed[_HEAD] = renamed.get(_EMBEDDING, renamed.get(_HEAD))  # pyright: ignore[reportArgumentType]
    return renamed


def write_checkpoint(checkpoint: Checkpoint, folder: Path, *, weights: bool = True) -> None:
    """Writes a checkpoint in LeRobot's layout, with or without its current `weights`, without adapters."""
    (folder / BACKBONE).mkdir(parents=True, exist_ok=True)
    for name, content in checkpoint.backbone.items():
        (folder / BACKBONE / name).write_bytes(content)
    write_json(folder / CONFIG, checkpoint.config.raw)
    write_processors(folder, checkpoint.config, checkpoint.processors)
    if not weights:
        return
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()  # it may be a link to a file of another folder
    state = {_PREFIX + name: tensor for name, tensor in plain_weights(checkpoint.network).items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
