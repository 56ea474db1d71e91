"""The sizes of a SmolVLA: the published ones by default, others by policy.options or by a published config.json.

Source of names and numbers: huggingface/lerobot, src/lerobot/policies/smolvla (configuration_smolvla.py,
smolvlm_with_expert.py), arXiv:2506.01844, and the tensors of lerobot/smolvla_base.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.checkpoint_folder import read_json
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.options import typed

TYPE = "smolvla"
_ACTION = "give the config.json of a SmolVLA"
_BACKBONE = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
_OPTIONS = {  # what config.json calls them
    "num_steps": "steps",
    "train_expert_only": "expert_only",
    "num_vlm_layers": "num_layers",
    "expert_width_multiplier": "expert_width",
    "self_attn_every_n_layers": "self_attention_every",
    "max_state_dim": "max_state_dim",
    "max_action_dim": "max_action_dim",
}
_FIXED = {"vlm_model_name": _BACKBONE, "attention_mode": "cross_attn", "num_expert_layers": -1}
_MULTIPLE = 256  # of an expert's intermediate size


@dataclass(kw_only=True, slots=True)
class SmolVLAOptions:
    """The section policy.options; what is left out is as published."""

    steps: int = 10  # K of a chain, in training and evaluation
    expert_only: bool = True  # false: the language model learns, too, but for its last layer
    hidden_size: int = 960  # of the language model
    num_layers: int = 16  # the first of 32; the expert has as many
    num_heads: int = 15
    num_kv_heads: int = 5
    head_dim: int = 64
    intermediate_size: int = 2560
    vocab_size: int = 49280
    image_size: int = 512  # to which cameras' images are resized
    patch_size: int = 16
    pixel_shuffle: int = 4  # patches to a token, along each side
    vision_hidden_size: int = 768
    vision_num_layers: int = 12
    vision_num_heads: int = 12
    vision_intermediate_size: int = 3072
    expert_width: float = 0.75  # of hidden_size
    self_attention_every: int = 2  # layers of the expert; the others see the language model alone
    max_state_dim: int = 32  # shorter vectors are padded with zeros
    max_action_dim: int = 32
    instruction_length: int = 48  # word tokens
    critic_hidden_size: int = 256
    freeze_stem: bool = True  # in RL: the images' tokens are cached with the rollout

    def __post_init__(self) -> None:
        require_numbers(
            self,
            "policy.options",
            "steps",
            "num_layers",
            "self_attention_every",
            "max_state_dim",
            "max_action_dim",
            low=1,
        )
        require_numbers(self, "policy.options", "instruction_length", "critic_hidden_size", low=1)
        cell = self.patch_size * self.pixel_shuffle
        rule = f"tokens are squares of {cell} pixels (patch_size * pixel_shuffle)"
        require(self.image_size % cell == 0, "policy.options.image_size", self.image_size, rule, "use a multiple")
        rule = f"it and the expert's ({self.expert_size}) are even, and multiples of the {self.num_heads} heads"
        fits = all(size % 2 == 0 and size % self.num_heads == 0 for size in (self.hidden_size, self.expert_size))
        require(fits, "policy.options.hidden_size", self.hidden_size, rule, "use another one, or expert_width")
        rule = f"heads share keys and values in groups, policy.options.num_kv_heads is {self.num_kv_heads}"
        divides = self.num_heads % self.num_kv_heads == 0
        require(divides, "policy.options.num_heads", self.num_heads, rule, "use a multiple")

    @property
    def expert_size(self) -> int:
        """The expert's hidden size, 720 as published."""
        return int(self.hidden_size * self.expert_width)

    @property
    def expert_intermediate_size(self) -> int:
        """8 / 3 of its hidden size, rounded up to a multiple of 256; 2048 as published."""
        return -(-4 * int(2 * self.expert_size / 3) // _MULTIPLE) * _MULTIPLE


def read_shapes(path: Path) -> SmolVLAOptions:
    """Returns the sizes of a config.json as LeRobot writes it.

    Raises:
        CheckpointError: it is damaged, of another kind of policy, or of a SmolVLA that cannot be built here.
        ConfigError: a size breaks a rule.
    """
    raw = read_json(path, _ACTION)
    for name, value in ({"type": TYPE} | _FIXED).items():
        if raw.get(name, _FIXED.get(name)) != value:
            raise CheckpointError(f"{path}: {name} is {raw.get(name)!r}, but only {value!r} can be built: {_ACTION}")
    given: dict[str, Any] = {ours: raw[theirs] for theirs, ours in _OPTIONS.items() if theirs in raw}
    if sides := raw.get("resize_imgs_with_padding"):
        given["image_size"] = sides[0]
    return typed(given, SmolVLAOptions, str(path))
