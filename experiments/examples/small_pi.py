"""A small pi0, pi0.5 or SmolVLA with random weights in LeRobot's layout, to try `policy=pi0`, `pi05`, `smolvla` with.

python -m experiments.examples.small_pi family=pi0 out=runs/small_pi0 [data=runs/pick_lerobot] [action_dim=7]
    [proprio_dim=9] [cameras=[base_camera]] [chunk=5] [image_size=28] [hidden_size=32] [layers=2] [seed=0]
    [instruction="pick up the red cube and move it to the green goal"]

Every tensor has the name and the axes of the published files.  Its tokenizer knows the words of one instruction.
State and actions lie in [-1, 1]; with `data`, a LeRobot folder, they have the sizes and statistics of the dataset.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from policies.checkpoint_folder import CONFIG, seeded, write_json
from policies.pi.config import SIZES, Family, read_config
from policies.pi.folder import BACKBONE, Checkpoint, write_checkpoint
from policies.pi.network import new_network
from policies.pi.processors import PaddedTokenizer, read_processors
from rlinf_embodied.command_line import main

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "\n", "<fake_token_around_image>", "<global-img>")


@dataclass(kw_only=True)
class Options:
    """The arguments."""

    family: str = "pi0"  # or pi05, smolvla
    out: str = "runs/small_pi"
    data: str = ""  # a LeRobot folder, whose statistics are those of state and actions; "": [-1, 1]
    action_dim: int = 7
    proprio_dim: int = 9
    cameras: list[str] = field(default_factory=lambda: ["base_camera"])
    chunk: int = 5
    image_size: int = 28  # a multiple of 14
    hidden_size: int = 32
    layers: int = 2
    seed: int = 0
    instruction: str = "pick up the red cube and move it to the green goal"


def write_small(own: Options) -> Path:
    """Writes the folder, prints it and returns it."""
    folder = Path(own.out)
    backbone = folder / BACKBONE
    backbone.mkdir(parents=True, exist_ok=True)
    bounds = {"min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0, "mean": 0.0, "std": 1.0}
    statistics = {
        name: {kind: [value] * size for kind, value in bounds.items()}
        for name, size in (("observation.state", own.proprio_dim), ("action", own.action_dim))
    }
    if own.data:
        recorded = json.loads((Path(own.data) / "meta" / "stats.json").read_text())
        statistics = {name: recorded[name] for name in statistics}
    words = list(dict.fromkeys(own.instruction.split()))
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *words))}
    word_tokenizer(vocabulary, "<bos>").save(str(backbone / "tokenizer.json"))
    write_json(backbone / "tokenizer_config.json", {"pad_token": "<pad>"})
    smolvla = own.family == Family.smolvla
    write_json(backbone / (CONFIG if smolvla else SIZES), _smolvlm(own) if smolvla else _sizes(own))
    sizes = {name: len(kinds["mean"]) for name, kinds in statistics.items()}
    write_json(folder / CONFIG, _described(own, sizes["observation.state"], sizes["action"]))
    config = read_config(folder / CONFIG, backbone)
    tensors = {name: {k: torch.tensor(v).float() for k, v in kinds.items()} for name, kinds in statistics.items()}
    made = read_processors(folder, config).with_statistics(tensors, {})
    with seeded(own.seed):
        network = new_network(config)
        for parameter in network.trained(language=True, vision=True):
            if parameter.ndim > 1:  # with the smaller ones of published networks a narrow one returns much the same
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    files = {path.name: path.read_bytes() for path in backbone.iterdir()}
    tokenizer = PaddedTokenizer(backbone, made.max_length, made.longest)
    write_checkpoint(Checkpoint(folder, config, made, tokenizer, network, files), folder)
    print(f"written to {folder}")
    return folder


def word_tokenizer(vocabulary: dict[str, int], begin: str) -> Tokenizer:
    """Returns a tokenizer of whole words; `begin` is put before each text."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    first = [(begin, vocabulary[begin])]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=first)
    return tokenizer


def _described(own: Options, state: int, actions: int) -> dict[str, object]:
    size = [own.image_size, own.image_size]
    shows = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, *size]} for name in own.cameras}
    mode = "QUANTILES" if own.family == Family.pi05 else "MEAN_STD"
    shared = {
        "type": own.family,
        "n_obs_steps": 1,
        "input_features": {**shows, "observation.state": {"type": "STATE", "shape": [state]}},
        "output_features": {"action": {"type": "ACTION", "shape": [actions]}},
        "chunk_size": own.chunk,
        "n_action_steps": own.chunk,
        "max_state_dim": max(32, state),
        "max_action_dim": max(32, actions),
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "tokenizer_max_length": 48,
    }
    if own.family == Family.smolvla:
        vlm = {"vlm_model_name": "small", "num_vlm_layers": own.layers, "num_expert_layers": -1}
        ways = {"self_attn_every_n_layers": 2, "attention_mode": "cross_attn", "expert_width_multiplier": 0.75}
        return {**shared, **vlm, **ways, "num_steps": 4, "resize_imgs_with_padding": size}
    names = {"paligemma_variant": "small", "action_expert_variant": "small", "image_resolution": size}
    return {**shared, **names, "num_inference_steps": 4}


def _sizes(own: Options) -> dict[str, object]:
    tower = {"depth": own.layers, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8}
    vision = {"hidden_size": own.hidden_size, "intermediate_size": 2 * own.hidden_size, "num_hidden_layers": own.layers}
    return {
        "vlm": {**tower, "width": own.hidden_size, "mlp_dim": 2 * own.hidden_size},
        "expert": {**tower, "width": own.hidden_size // 2, "mlp_dim": own.hidden_size},
        "vision": {**vision, "num_attention_heads": 2, "patch_size": 14},
        "vocab": len(_SPECIAL) + len(set(own.instruction.split())),
    }


def _smolvlm(own: Options) -> dict[str, object]:
    tower = {"hidden_size": own.hidden_size, "intermediate_size": 2 * own.hidden_size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5}
    vocabulary = {"vocab_size": len(_SPECIAL) + len(set(own.instruction.split()))}
    vision = {**tower, "num_hidden_layers": own.layers, "num_attention_heads": 2}
    return {
        "scale_factor": 2,
        "text_config": {**tower, **heads, **vocabulary, "num_hidden_layers": own.layers},
        "vision_config": {**vision, "image_size": own.image_size, "patch_size": 7},
    }


if __name__ == "__main__":
    main(write_small, Options)
