"""The config.json of a LeRobot folder of pi0, pi0.5 or SmolVLA, and the section policy.options.

The file only names its backbone (`gemma_2b`, `HuggingFaceTB/SmolVLM2-500M-Video-Instruct`).  The sizes of the published
backbones are below; others are read from the backbone's folder: config.json of a SmolVLM, or sizes.json of a pi0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from policies.checkpoint_folder import CONFIG, OPTIONS, read_json
from policies.flow import FlowSettings
from rlinf_embodied.config import LoraSettings, Precision
from rlinf_embodied.config.checks import require_numbers
from rlinf_embodied.data.recorded import ACTION, STATE
from rlinf_embodied.errors import CheckpointError

SIZES = "sizes.json"
WHOLE = "give a complete folder of a pi0, pi05 or smolvla in LeRobot's layout"

_VISION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
_TEXT = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_GEMMA = {"gemma_300m": (1024, 18, 4096, 8, 1, 256), "gemma_2b": (2048, 18, 16384, 8, 1, 256)}  # see TowerSizes
_SIGLIP = dict(zip(_VISION, (1152, 4304, 27, 16, 14), strict=True))
_PALIGEMMA_VOCABULARY = 257_152
SMOLVLM_NAME = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
_SMOLVLM = {  # the used fields of its config.json
    "scale_factor": 4,
    "text_config": dict(zip(_TEXT, (960, 2560, 32, 15, 5), strict=True))
    | {"head_dim": 64, "rms_norm_eps": 1e-5, "vocab_size": 49280},
    "vision_config": dict(zip(_VISION, (768, 3072, 12, 12, 16), strict=True)) | {"image_size": 512},
}
_VISION_DEFAULTS = dict(zip(_VISION, (1152, 3072, 12, 16, 32), strict=True)) | {"image_size": 224}  # of transformers
_MULTIPLE = 256  # of the intermediate size of SmolVLA's expert


class Family(StrEnum):
    """The field `type` of config.json."""

    pi0 = "pi0"
    pi05 = "pi05"
    smolvla = "smolvla"


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """The sizes of a language model or an action expert."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PiConfig:
    """All settings of the network; `raw` holds every field of the file."""

    family: Family
    raw: Mapping[str, Any]
    cameras: tuple[str, ...]  # camera features in the file's order, for example "observation.images.base_0_rgb"
    state_dim: int
    action_dim: int
    chunk: int  # actions of a chunk
    max_state_dim: int  # width to which states are padded; actions to max_action_dim
    max_action_dim: int
    steps: int  # integration steps
    image_size: tuple[int, int]  # height and width of the vision tower's input
    empty_cameras: int
    text: TowerSizes
    expert: TowerSizes
    vocabulary: int
    vision: Mapping[str, int]  # as in transformers' SiglipVisionConfig
    norm_eps: float  # of both towers
    periods: tuple[float, float]  # shortest and longest period of the time embedding
    beta: tuple[float, float]  # of the distribution of training times
    time_range: tuple[float, float]  # scale and offset of training times
    scale_factor: int = 1  # patches per image token, along each side
    self_attention_every: int = 1  # in layers; the others attend only to the prefix (0: all do)
    image_tokens: bool = False  # whether special tokens surround each image's tokens
    train_state: bool = True  # whether SmolVLA's projection of the state is trained

    @property
    def expert_at(self) -> tuple[int, ...]:
        """For each layer of the expert, the index of the language model's layer whose keys and values it reads."""
        return tuple(range(0, self.text.depth, self.text.depth // self.expert.depth))

    def crosses(self, layer: int) -> bool:
        """Whether the expert's layer at this layer of the language model attends only to the prefix."""
        every = self.self_attention_every
        return not (every > 0 and layer % every == 0)

    def of_robot(self, state: int, action: int) -> PiConfig:
        """Returns the config for a robot of other state and action dimensions, as LeRobot does in fine-tuning."""
        inputs = {**self.raw["input_features"], STATE: {"type": "STATE", "shape": [state]}}
        outputs = {ACTION: {"type": "ACTION", "shape": [action]}}
        raw = {**self.raw, "input_features": inputs, "output_features": outputs}
        return replace(self, raw=raw, state_dim=state, action_dim=action)


def read_config(path: Path, backbone: Path) -> PiConfig:
    """Returns the config of a config.json, with the sizes of the backbone in a folder.

    Raises:
        CheckpointError: a file is damaged, of another policy, or has a setting that is not supported.
    """
    raw = read_json(path, WHOLE)
    kinds = [family.value for family in Family]
    if raw.get("type") not in kinds:
        raise CheckpointError(f"{path}: type is {raw.get('type')!r}, but only {', '.join(kinds)} can be read: {WHOLE}")
    family = Family(raw["type"])
    try:
        return (_smolvla if family is Family.smolvla else _pi)(raw, family, backbone)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path} or the sizes in {backbone} cannot be understood ({error!r}): copy them again"
        ) from error


def _shared(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    features = {**raw["input_features"]}
    cameras = [name for name, feature in features.items() if feature["type"] == "VISUAL"]
    for k in range(raw.get("empty_cameras", 0)):
        name = f"observation.images.empty_camera_{k}"
        cameras += [name] if name not in cameras else []
    outputs = {**raw["output_features"]}
    mode = raw.get("normalization_mapping", {}).get("VISUAL", "IDENTITY")
    _only("normalization_mapping.VISUAL", mode, "IDENTITY")
    _only("n_obs_steps", raw.get("n_obs_steps", 1), 1)
    return {
        "family": family,
        "raw": raw,
        "cameras": tuple(cameras),
        "state_dim": features[STATE]["shape"][0] if STATE in features else 0,
        "action_dim": outputs[ACTION]["shape"][0],
        "chunk": raw["chunk_size"],
        "max_state_dim": raw["max_state_dim"],
        "max_action_dim": raw["max_action_dim"],
        "empty_cameras": raw.get("empty_cameras", 0),
        "periods": (raw.get("min_period", 4e-3), raw.get("max_period", 4.0)),
        "beta": (raw.get("time_sampling_beta_alpha", 1.5), raw.get("time_sampling_beta_beta", 1.0)),
        "time_range": (raw.get("time_sampling_scale", 0.999), raw.get("time_sampling_offset", 0.001)),
    }


def _pi(raw: Mapping[str, Any], family: Family, backbone: Path) -> PiConfig:
    sizes = read_json(backbone / SIZES, WHOLE) if (backbone / SIZES).is_file() else {}
    towers = {}
    for part, name in (("vlm", "paligemma_variant"), ("expert", "action_expert_variant")):
        variant = raw[name]
        if not sizes and variant not in _GEMMA:
            raise CheckpointError(
                f"{CONFIG}: {name} is {variant!r}, but only the sizes of {', '.join(_GEMMA)} are known: write those of "
                f"this one to {backbone / SIZES}"
            )
        towers[part] = TowerSizes(**sizes[part]) if sizes else TowerSizes(*_GEMMA[variant])
    text, expert = towers["vlm"], towers["expert"]
    _only("depth of the expert", expert.depth, text.depth)
    _only("head_dim of the expert", expert.head_dim, text.head_dim)
    height, width = raw["image_resolution"]
    _only("image_resolution", width, height)
    return PiConfig(
        **_shared(raw, family),
        steps=raw["num_inference_steps"],
        image_size=(height, width),
        text=text,
        expert=expert,
        vocabulary=sizes.get("vocab", _PALIGEMMA_VOCABULARY),
        vision={**sizes.get("vision", _SIGLIP), "image_size": height},
        norm_eps=sizes.get("rms_norm_eps", 1e-6),
    )


def _smolvla(raw: Mapping[str, Any], family: Family, backbone: Path) -> PiConfig:
    path = backbone / CONFIG
    if not path.is_file() and (name := raw["vlm_model_name"]) != SMOLVLM_NAME:
        raise CheckpointError(
            f"{CONFIG}: vlm_model_name is {name!r}, whose sizes are not known: copy its {CONFIG} to {backbone}"
        )
    vlm = read_json(path, WHOLE) if path.is_file() else _SMOLVLM
    text = cast("dict[str, Any]", vlm["text_config"])
    vision = {**_VISION_DEFAULTS, **cast("dict[str, Any]", vlm["vision_config"])}
    for name in ("adapt_to_pi_aloha", "use_delta_joint_actions_aloha"):
        _only(name, raw.get(name, False), False)
    heads = text["num_attention_heads"], text.get("num_key_value_heads") or text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads[0]
    num_layers = raw["num_vlm_layers"] if raw["num_vlm_layers"] > 0 else text["num_hidden_layers"]
    depth = raw["num_expert_layers"] if raw["num_expert_layers"] > 0 else num_layers
    every = raw["self_attn_every_n_layers"] if "cross" in raw["attention_mode"] else 1
    if num_layers % depth or (depth < num_layers and 0 < every < num_layers):
        raise CheckpointError(
            f"{CONFIG}: num_expert_layers is {depth} and num_vlm_layers {num_layers}, but the first must divide the "
            "second, and with fewer of them self_attn_every_n_layers must be 0 or at least num_vlm_layers"
        )
    size = int(text["hidden_size"] * raw["expert_width_multiplier"])
    mlp_dim = -(-4 * int(2 * size / 3) // _MULTIPLE) * _MULTIPLE
    columns, rows = raw["resize_imgs_with_padding"] or (vision["image_size"], vision["image_size"])
    _only("resize_imgs_with_padding", columns, rows)
    return PiConfig(
        **_shared(raw, family),
        steps=raw["num_steps"],
        image_size=(rows, columns),
        text=TowerSizes(text["hidden_size"], num_layers, text["intermediate_size"], *heads, head_dim),
        expert=TowerSizes(size, depth, mlp_dim, *heads, head_dim),
        vocabulary=text["vocab_size"],
        vision={name: vision[name] for name in (*_VISION, "image_size")},
        norm_eps=text.get("rms_norm_eps", 1e-6),
        scale_factor=vlm.get("scale_factor", 2),
        self_attention_every=every,
        image_tokens=raw.get("add_image_special_tokens", False),
        train_state=raw.get("train_state_proj", True),
    )


def _only(name: str, value: object, supported: object) -> None:
    if value != supported:
        raise CheckpointError(f"{CONFIG}: {name} is {value!r}, but only {supported!r} can be read here: {WHOLE}")


# ------------------------------------------------------------------------------------------------------- policy.options
@dataclass(kw_only=True, slots=True)
class PiOptions(FlowSettings):
    """How a folder's policy acts, and which parts are trained; steps=0 uses the folder's number."""

    backbone: str | None = None  # folder of the backbone's tokenizer and sizes; null: backbone/ in the checkpoint
    cameras: dict[str, str] = field(default_factory=dict)  # policy's -> env's camera; {}: by name, or else in order
    clip_actions: bool = True  # to [-1, 1]; false for envs whose actions have the units of the data
    expert_only: bool = True  # false: the language model is trained as well
    freeze_vision: bool = True  # with expert_only=false
    cache_prefix: bool = True  # rollouts store keys and values of a frozen language model instead of images
    lora: LoraSettings = field(default_factory=lambda: LoraSettings(rank=0))  # on the parts that are trained otherwise
    precision: Precision = Precision.float32  # of frozen parts
    checkpoint_activations: bool = False  # recompute them in the backward pass, layer by layer
    critic_hidden_size: int = 256

    def __post_init__(self) -> None:
        self.require_valid()
        require_numbers(self, OPTIONS, "critic_hidden_size", low=1)
