"""Checkpoint folders of OpenVLA and OpenVLA-OFT at toy size, made by seed, and inputs for them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

from policies.checkpoint_folder import write_json
from policies.openvla.config import config_of
from policies.openvla.folder import Checkpoint, write_checkpoint
from policies.openvla.network import OpenVLA
from policies.openvla.oft import L1Head, OpenVLAOFT, ProprioProjector
from policies.openvla.prompt import TokenRows, rows_of

CHUNK_LEN, ACTION_DIM, PROPRIO_DIM, IMAGE_SIZE = 4, 3, 5, 28
WORDS = ["In:", "What", "action", "should", "the", "robot", "take", "to", "lift", "cube?", "drop", "cup?", "Out:"]
PROMPTS = [[1, 512, 600, 601, 3744, 29901], [1, 512, 700, 701, 702, 703, 704, 3744, 29901], [1, 512, 29871]]
TOWER = {"depth": 3, "embed_dim": 16, "num_heads": 2, "mlp_ratio": 2.0}
RAW = {
    "model_type": "openvla",
    "image_sizes": [IMAGE_SIZE, IMAGE_SIZE],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_model_args": [TOWER, {**TOWER, "embed_dim": 24, "mlp_ratio": 1.5}],
    "text_config": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 32064,
        "pad_token_id": 32000,
    },
}


def statistics(**dims: int) -> dict[str, object]:
    """Ranges from -1 - i to 2 + i; the last dimension is not scaled."""
    made = {}
    for section, dim in dims.items():
        low, high = [-1.0 - i for i in range(dim)], [2.0 + i for i in range(dim)]
        made[section] = {"q01": low, "q99": high, "mask": [True] * (dim - 1) + [False]}
    return made


def network(seed: int = 0, raw: dict[str, object] | None = None) -> OpenVLA:
    """A network whose parameters are all random, so that none is without effect."""
    return randomised(OpenVLA(config_of(RAW if raw is None else raw)), seed)


def randomised(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 1.0 if parameter.ndim == 1 else 1.5 * parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def oft(seed: int = 0, l1: bool = False, proprio: bool = False) -> OpenVLAOFT:
    net = network(seed)
    head = L1Head(net.dim, ACTION_DIM) if l1 else None
    projector = ProprioProjector(net.dim, PROPRIO_DIM) if proprio else None
    return OpenVLAOFT(net, CHUNK_LEN, ACTION_DIM, head, projector)


def write_source(folder: Path) -> Path:
    """Writes what a checkpoint folder has beside its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"mean": [0.5] * 3, "std": [0.25] * 3}
    write_json(
        folder / "preprocessor_config.json",
        {
            "image_resize_strategy": "resize-naive",
            "input_sizes": [[3, IMAGE_SIZE, IMAGE_SIZE]] * 2,
            "tvf_normalize_params": [plain, {"mean": [0.4] * 3, "std": [0.2] * 3}],
        },
    )
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{word: 512 + i for i, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_toy(folder: Path, shard_bytes: int = 10**9) -> Checkpoint:
    """Writes an OpenVLA folder with statistics of two data sets, and returns what is in it."""
    both = {"arm": statistics(action=ACTION_DIM, proprio=PROPRIO_DIM), "hand": statistics(action=2)}
    checkpoint = Checkpoint(write_source(folder), config_of(RAW), both, network())
    write_checkpoint(checkpoint, folder, shard_bytes=shard_bytes)
    return checkpoint


def write_published(folder: Path, **dims: int) -> Path:
    """Writes an OpenVLA folder for a robot of other sizes, as write_published(path, action=7, proprio=9)."""
    write_checkpoint(Checkpoint(write_source(folder), config_of(RAW), {"here": statistics(**dims)}, network()), folder)
    return folder


def write_toy_oft(folder: Path, model: OpenVLAOFT) -> None:
    """Writes an OFT folder of a model."""
    base = write_toy(folder.with_name(folder.name + "_base"))
    checkpoint = Checkpoint(base.folder, base.config, base.statistics, model.network)
    write_checkpoint(checkpoint, folder, model)


def pixels(rows: int, images: int = 1, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6 * images, IMAGE_SIZE, IMAGE_SIZE, generator=generator)


def rows(count: int = 3) -> TokenRows:
    return rows_of(PROMPTS[:count], 32000)


def one_row(index: int) -> TokenRows:
    return rows_of([PROMPTS[index]], 32000)


def change_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
