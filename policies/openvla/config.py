"""The config.json of a published OpenVLA folder, and the section policy.options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from policies.checkpoint_folder import CONFIG, OPTIONS
from rlinf_embodied.config import LoraSettings, Precision
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.errors import CheckpointError

WHOLE = "give a complete OpenVLA checkpoint folder"


# ---------------------------------------------------------------------------------------------------------- config.json
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVLAConfig:
    """The shapes of a network."""

    image_size: int  # pixels per side of the towers' input
    timm_model_ids: tuple[str, str]  # the DINOv2 tower, then the SigLIP tower
    timm_model_args: tuple[Mapping[str, Any], Mapping[str, Any]]  # overrides of timm's model arguments
    act_layers: tuple[str | None, str | None]  # activation per tower, None for timm's default
    text: Mapping[str, Any]  # keyword arguments of transformers' LlamaConfig
    num_tokens: int  # vocabulary without padding; the last `num_bins` tokens are actions
    num_bins: int  # edges of the action bins
    pad_token_id: int  # pads shorter rows
    statistics: Mapping[str, object]  # action statistics per data set, for folders without dataset_statistics.json
    raw: Mapping[str, object]  # every field of the file, to write it again

    @property
    def action_columns(self) -> slice:
        """The columns of the logits that are action tokens."""
        return slice(self.num_tokens - self.num_bins, self.num_tokens)


def config_of(raw: Mapping[str, Any], where: str = CONFIG) -> OpenVLAConfig:
    """Returns the config of the fields of a config.json; `where` names the file in errors.

    Raises:
        CheckpointError: a field is missing or invalid, or the model is not supported.
    """
    text = dict(raw.get("text_config") or {})
    for name, value, wanted in (
        ("model_type", raw.get("model_type"), "openvla"),
        ("use_fused_vision_backbone", raw.get("use_fused_vision_backbone", True), True),
        ("text_config.model_type", text.get("model_type", "llama"), "llama"),
    ):
        if value != wanted:
            raise CheckpointError(
                f"{where}: {name} is {value!r}, but only {wanted!r} can be read here: give an OpenVLA or OpenVLA-OFT "
                "folder (language models: policy=folder of train_llm_math.py)"
            )
    text.pop("torch_dtype", None)  # the caller chooses the dtype
    num_tokens = text.get("vocab_size", 32000) - raw.get("pad_to_multiple_of", 64)  # without padding columns
    num_bins = raw.get("n_action_bins", 256)
    if not 2 <= num_bins <= num_tokens:
        raise CheckpointError(
            f"{where}: n_action_bins is {num_bins}, but at least 2 and at most {num_tokens} tokens can be actions "
            "(text_config.vocab_size less pad_to_multiple_of): copy the file again"
        )
    sizes = _pair(raw, "image_sizes", where)
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{where}: image_sizes is {list(sizes)}, but both towers must see images of one size: give another folder"
        )
    return OpenVLAConfig(
        image_size=sizes[0],
        timm_model_ids=_pair(raw, "timm_model_ids", where),
        timm_model_args=_pair(raw, "timm_model_args", where, [{}, {}]),
        act_layers=_pair(raw, "timm_override_act_layers", where, [None, None]),
        text=text,
        num_tokens=num_tokens,
        num_bins=num_bins,
        pad_token_id=raw.get("pad_token_id", 32000),
        statistics=raw.get("norm_stats") or {},
        raw=raw,
    )


def _pair(raw: Mapping[str, Any], name: str, where: str, otherwise: object = None) -> tuple[Any, Any]:
    values = raw.get(name) or otherwise
    if not isinstance(values, list) or len(values) != 2:
        raise CheckpointError(
            f"{where}: {name} is {values!r}, but it must list one entry for each of the two towers: copy the file again"
        )
    return values[0], values[1]


# ------------------------------------------------------------------------------------------------------- policy.options
class Decoding(StrEnum):
    """How a chunk's tokens are decoded."""

    autoregressive = "autoregressive"  # OpenVLA: one after the other, one action at a time
    parallel = "parallel"  # OpenVLA-OFT: a chunk at once


class Head(StrEnum):
    """How a chunk's actions are predicted: as tokens of the vocabulary, or by L1 regression."""

    discrete = "discrete"
    l1 = "l1"


class Gripper(StrEnum):
    """Conversion of an action's last dimension, the gripper."""

    as_it_is = "as_it_is"
    binary = "binary"  # data: 1 opens; env: 1 opens.  1 above 0.5, else -1
    inverted = "inverted"  # data: 1 opens; env: -1 opens (LIBERO).  -1 above 0.5, else 1


class Resize(StrEnum):
    """How a camera's image is resized to the towers' input size."""

    bicubic = "bicubic"  # by the folder's image processor
    jpeg_lanczos = "jpeg_lanczos"  # JPEG round trip, then Lanczos, as in the authors' evaluations on LIBERO


@dataclass(kw_only=True, slots=True)
class OpenVLAOptions:
    """How a folder's policy acts, and which parts are trained."""

    decoding: Decoding = Decoding.autoregressive
    unnorm_key: str | None = None  # the folder's data set whose statistics count; None: of `data`, or the only one
    clip_actions: bool = True  # to [-1, 1]; false for envs whose actions have the units of the data
    gripper: Gripper = Gripper.as_it_is
    resize: Resize = Resize.bicubic
    crop_area: float = 1.0  # share of the resized image that is kept, around its centre; authors' evaluations: 0.9
    head: Head = Head.discrete  # l1: for fine-tuning and evaluation, not for RL
    proprio: bool = False  # whether the robot's state is a token
    new_parts: bool = False  # random weights for an L1 head or projector that the folder lacks, to fine-tune them
    stop_token: bool = True  # whether parallel decoding appends the stop token, as in the reference
    prompt_length: int = 48  # tokens of the prompt, including the instruction
    freeze_vision: bool = True  # in RL and imitation; frozen towers get no adapters
    lora: LoraSettings = field(default_factory=lambda: LoraSettings(rank=0))
    checkpoint_activations: bool = False  # recompute them in the backward pass, block by block
    precision: Precision = Precision.float32  # of the weights
    critic_hidden_size: int = 256

    def __post_init__(self) -> None:
        parallel = self.decoding is Decoding.parallel
        for name, plain in (("proprio", False), ("head", Head.discrete)):
            value, rule = getattr(self, name), "only OpenVLA-OFT supports it"
            require(parallel or value == plain, f"{OPTIONS}.{name}", value, rule, "set decoding=parallel")
        require(self.prompt_length >= 4, f"{OPTIONS}.prompt_length", self.prompt_length, "a prompt is longer", "use 48")
        require_numbers(self, OPTIONS, "critic_hidden_size", low=1)
        require_numbers(self, OPTIONS, "crop_area", above=True, high=1)
