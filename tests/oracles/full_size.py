"""Names and shapes at the published size against those of the reference, on the meta device."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from policies.openvla.config import OpenVLAConfig, config_of
from policies.openvla.folder import empty_network
from policies.openvla.oft import L1Head, ProprioProjector
from policies.openvla.vision import add_film
from tests.oracles.goldens import Difference

KEYS, OFT_KEYS, COUNTS = "openvla_7b_keys.json", "openvla_oft_extra_keys.json", "parameter_counts.json"
PUBLISHED = {
    "model_type": "openvla",
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000, "torch_dtype": "bfloat16"},
}
_DIM, _RANK = 4096, 32
_COUNT_LIMIT = 1e-3
_PRESENT = re.compile(r"action_head_l1|proprio_projector|vision_backbone FiLM")


def check(folder: Path) -> list[Difference]:
    """Compares the lists that a folder holds; a difference is the number of names and shapes that are not in both."""
    config = config_of(PUBLISHED)
    names = named_shapes(empty_network(config))
    found = [_unequal(KEYS, names, json.loads((folder / KEYS).read_text()))]
    if (folder / OFT_KEYS).is_file():
        lists = json.loads((folder / OFT_KEYS).read_text())
        found += [
            _unequal(title, extra_shapes(title, config, wanted), wanted)
            for title, wanted in lists.items()
            if _PRESENT.match(title)
        ]
    if (folder / COUNTS).is_file():
        wanted = json.loads((folder / COUNTS).read_text())["openvla_7b"]["parameters"]
        count = sum(torch.Size(shape).numel() for shape in names.values())
        found.append(Difference(f"{COUNTS}: {count:,} parameters", abs(count - wanted) / wanted, _COUNT_LIMIT))
    return found


def named_shapes(module: nn.Module, prefix: str = "") -> dict[str, list[int]]:
    """Returns the shapes of a module's tensors by name."""
    return {prefix + name: list(tensor.shape) for name, tensor in module.state_dict().items()}


def extra_shapes(title: str, config: OpenVLAConfig, wanted: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Returns the tensors of the side file that a list is titled by, at the sizes that the list has."""
    with torch.device("meta"):
        if title.startswith("action_head"):
            return named_shapes(L1Head(_DIM, wanted["model.fc2.bias"][0]))
        if title.startswith("proprio"):
            return named_shapes(ProprioProjector(_DIM, wanted["fc1.weight"][1]))
        network = empty_network(config)
        add_film(network.vision_backbone, network.dim, _RANK)
    return named_shapes(network.vision_backbone, "vision_backbone.")


def _unequal(name: str, here: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> Difference:
    unequal = [key for key in {**here, **wanted} if here.get(key) != wanted.get(key)]
    return Difference(f"{name}: {len(wanted)} names and shapes", float(len(unequal)), 0.0)
