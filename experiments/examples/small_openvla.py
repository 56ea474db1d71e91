"""A small OpenVLA with random weights in the published layout, to try `policy=openvla` and `policy=openvla_oft` with.

python -m experiments.examples.small_openvla out=runs/small_openvla [data=runs/pick_lerobot] [action_dim=7]
    [proprio_dim=0] [image_size=56] [hidden_size=64] [layers=2] [seed=0]
    [instruction="pick up the red cube and move it to the green goal"]

Every tensor has the name and the axes of the published files.  Most of the about 5 million parameters embed the 32,064
tokens of the vocabulary.  Its tokenizer knows the words of one instruction.  Actions lie in [-1, 1]; with `data`, a
LeRobot folder, actions and proprioception have the sizes and ranges of the dataset, and there is OFT's projector
of proprioception (`policy.options.proprio=true`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.examples.small_pi import word_tokenizer
from policies.checkpoint_folder import write_json
from policies.openvla.config import config_of
from policies.openvla.folder import Checkpoint, write_checkpoint
from policies.openvla.images import PREPROCESSOR
from policies.openvla.network import OpenVLA
from policies.openvla.oft import OpenVLAOFT, ProprioProjector
from policies.openvla.prompt import BOS_TOKEN, STOP_TOKEN, prompt_for
from rlinf_embodied.command_line import main

_FIRST_WORD = 512  # ids of words; those below are left to signs
_PAD = 32000
_HALF = [[0.5] * 3, [0.5] * 3]


@dataclass(kw_only=True)
class Options:
    """The arguments."""

    out: str = "runs/small_openvla"
    data: str = ""  # a LeRobot folder, whose ranges are those of actions and proprioception; "": [-1, 1]
    action_dim: int = 7
    proprio_dim: int = 0  # of the robot's own state; 0: the network has no projector for it
    image_size: int = 56  # a multiple of 14
    hidden_size: int = 64
    layers: int = 2
    seed: int = 0
    instruction: str = "pick up the red cube and move it to the green goal"


def write_small(own: Options) -> Path:
    """Writes the folder, prints it and returns it."""
    folder = Path(own.out)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [[3, own.image_size, own.image_size]] * 2
    write_json(
        folder / PREPROCESSOR,
        {"image_resize_strategy": "resize-naive", "input_sizes": sizes, "means": _HALF, "stds": _HALF},
    )
    words = {word: _FIRST_WORD + i for i, word in enumerate(dict.fromkeys(prompt_for(own.instruction).split()))}
    vocabulary = {"<unk>": 0, "<s>": BOS_TOKEN, "</s>": STOP_TOKEN, **words}
    word_tokenizer(vocabulary, "<s>").save(str(folder / "tokenizer.json"))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(own.seed)
        network = OpenVLA(config_of(_shapes(own)))
        ranges = _ranges(own)
        projector = ProprioProjector(own.hidden_size, len(ranges["proprio"]["q01"])) if "proprio" in ranges else None
    model = OpenVLAOFT(network, 1, len(ranges["action"]["q01"]), proprio_projector=projector)
    write_checkpoint(Checkpoint(folder, network.config, {"small": ranges}, network), folder, model)
    print(f"written to {folder}")
    return folder


def _ranges(own: Options) -> dict[str, dict[str, list]]:
    """Returns what -1 and 1 stand for, by what it is said of."""
    dims = {"action": own.action_dim} | ({"proprio": own.proprio_dim} if own.proprio_dim else {})
    bounds = {name: ([-1.0] * dim, [1.0] * dim) for name, dim in dims.items()}
    if own.data:
        recorded = json.loads((Path(own.data) / "meta" / "stats.json").read_text())
        kinds = {"action": recorded["action"], "proprio": recorded["observation.state"]}
        bounds = {name: (stats["min"], stats["max"]) for name, stats in kinds.items()}
    return {name: {"q01": low, "q99": high, "mask": [True] * len(low)} for name, (low, high) in bounds.items()}


def _shapes(own: Options) -> dict[str, object]:
    heads = max(1, own.hidden_size // 32)
    tower = {"depth": 3, "embed_dim": own.hidden_size, "num_heads": heads, "mlp_ratio": 2.0}
    return {
        "model_type": "openvla",
        "image_sizes": [own.image_size] * 2,
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_model_args": [tower, tower],
        "text_config": {
            "model_type": "llama",
            "hidden_size": own.hidden_size,
            "intermediate_size": 2 * own.hidden_size,
            "num_attention_heads": heads,
            "num_hidden_layers": own.layers,
            "vocab_size": _PAD + 64,
            "pad_token_id": _PAD,
        },
    }


if __name__ == "__main__":
    main(write_small, Options)
