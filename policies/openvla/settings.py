"""What config.json of a published OpenVLA folder says, checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from policies.checkpoint_folder import read_json
from rlinf_embodied.errors import CheckpointError

CONFIG = "config.json"
WHOLE = "give a complete OpenVLA checkpoint folder"
_MODEL_TYPE = "openvla"
_NUM_TOWERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVLAConfig:
    """The shapes of a network; `raw` keeps every field of the file, so that it can be written again.

    Attributes:
        image_size: pixels per side of what the towers see.
        timm_model_ids: the DINOv2 tower, then the SigLIP tower.
        timm_model_args: keyword arguments for timm per tower, where it differs from timm's own model.
        act_layers: activation per tower, None for timm's own.
        text: keyword arguments of transformers' LlamaConfig.
        vocab_size: columns of the logits, padding columns included.
        num_tokens: tokens of the tokenizer that count; the last `num_bins` of them are actions.
        num_bins: edges of the action bins.
        pad_token_id: fills up shorter rows.
        statistics: action statistics per dataset, for folders without dataset_statistics.json.
    """

    image_size: int
    timm_model_ids: tuple[str, str]
    timm_model_args: tuple[Mapping[str, object], Mapping[str, object]]
    act_layers: tuple[str | None, str | None]
    text: Mapping[str, object]
    vocab_size: int
    num_tokens: int
    num_bins: int
    pad_token_id: int
    statistics: Mapping[str, object]
    raw: Mapping[str, object]

    @property
    def action_columns(self) -> slice:
        """The tokens that are actions, as columns of the logits."""
        return slice(self.num_tokens - self.num_bins, self.num_tokens)


def read_config(folder: Path) -> OpenVLAConfig:
    """Returns the config of a checkpoint folder.

    Raises:
        CheckpointError: config.json is missing or damaged, or describes another kind of model.
    """
    return config_of(read_json(folder / CONFIG, WHOLE), str(folder / CONFIG))


def config_of(raw: Mapping[str, object], where: str = CONFIG) -> OpenVLAConfig:
    """Returns the config that the fields of a config.json make; `where` stands in messages.

    Raises:
        CheckpointError: a field is missing, or its value is of another kind of model.
    """
    _require_openvla(raw, where)
    text = dict(cast("Mapping[str, object]", _field(raw, "text_config", where)))
    text.pop("torch_dtype", None)  # the caller says in which type the weights are wanted
    vocab_size = cast(int, text.get("vocab_size", 32000))
    num_tokens = vocab_size - cast(int, raw.get("pad_to_multiple_of", 64))
    num_bins = cast(int, raw.get("n_action_bins", 256))
    if not 2 <= num_bins <= num_tokens:
        raise CheckpointError(
            f"{where}: n_action_bins is {num_bins}, but at least 2 and at most {num_tokens} tokens can be actions "
            "(text_config.vocab_size less pad_to_multiple_of): copy the file again"
        )
    ids = _pair(raw, "timm_model_ids", where)
    return OpenVLAConfig(
        image_size=_image_size(raw, where),
        timm_model_ids=cast("tuple[str, str]", ids),
        timm_model_args=cast("tuple[dict[str, object], dict[str, object]]", _pair(raw, "timm_model_args", where, {})),
        act_layers=cast("tuple[str | None, str | None]", _pair(raw, "timm_override_act_layers", where, None)),
        text=text,
        vocab_size=vocab_size,
        num_tokens=num_tokens,
        num_bins=num_bins,
        pad_token_id=cast(int, raw.get("pad_token_id", 32000)),
        statistics=cast("Mapping[str, object]", raw.get("norm_stats") or {}),
        raw=raw,
    )


def _require_openvla(raw: Mapping[str, object], where: str) -> None:
    kind = raw.get("model_type")
    if kind != _MODEL_TYPE:
        raise CheckpointError(
            f"{where}: model_type is {kind!r}, but only {_MODEL_TYPE!r} can be read here: give an OpenVLA or "
            "OpenVLA-OFT folder (language models: policy=causal_lm)"
        )
    if raw.get("use_fused_vision_backbone", True) is not True:
        raise CheckpointError(
            f"{where}: use_fused_vision_backbone is {raw['use_fused_vision_backbone']!r}, but the two towers DINOv2 "
            "and SigLIP are needed: give a folder with both"
        )
    text = raw.get("text_config")
    model = text.get("model_type", "llama") if isinstance(text, Mapping) else None
    if model != "llama":
        raise CheckpointError(
            f"{where}: text_config.model_type is {model!r}, but only 'llama' is built: give a Llama-based folder"
        )


def _field(raw: Mapping[str, object], name: str, where: str) -> object:
    if name not in raw:
        raise CheckpointError(f"{where} has no {name}, which an OpenVLA config needs: copy the file again")
    return raw[name]


_REQUIRED = object()


def _pair(raw: Mapping[str, object], name: str, where: str, otherwise: object = _REQUIRED) -> tuple[object, object]:
    if otherwise is not _REQUIRED and raw.get(name) is None:
        return (otherwise, otherwise)
    values = _field(raw, name, where)
    if not isinstance(values, list) or len(values) != _NUM_TOWERS:
        raise CheckpointError(
            f"{where}: {name} is {values!r}, but it must list one entry for each of the two towers: copy the file again"
        )
    return (values[0], values[1])


def _image_size(raw: Mapping[str, object], where: str) -> int:
    first, second = _pair(raw, "image_sizes", where)
    if first != second or not isinstance(first, int):
        raise CheckpointError(
            f"{where}: image_sizes is {[first, second]}, but both towers must see images of one size: "
            "give another folder"
        )
    return first
