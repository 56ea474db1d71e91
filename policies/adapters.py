"""Low-rank adapters (LoRA) by peft: added to a model's linear layers, and merged for export."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.checkpoint_folder import read_tensors, seeded
from rlinf_embodied.config import LoraSettings
from rlinf_embodied.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig

_BASE, ADAPTER, _PEFT = ".base_layer.", ".lora_", "base_model.model."  # parts of peft's parameter names
ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's files


def inject_adapters(
    module: nn.Module, settings: LoraSettings, seed: int, path: str, without_gradient: Iterable[nn.Module] = ()
) -> None:
    """Adds adapters to a module and freezes all else; its outputs do not change.

    Args:
        module: modified in place.
        settings: targets are last parts of linear layers' names, or all-linear: all but an output layer "lm_head".
        seed: of their initial weights.
        path: config path of the settings, for error messages.
        without_gradient: submodules that receive no gradient; their layers get no adapters.

    Raises:
        ConfigError: peft is not installed, a target matches no linear layer that receives a gradient, or a tied head.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"{path} is set, but the package peft is not installed: pip install 'rlinf-embodied[lora]', or set "
            f"{path}.rank=0"
        ) from error
    frozen = {id(layer) for part in without_gradient for layer in part.modules()}
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    trainable = [name for name, part in linear.items() if id(part) not in frozen]
    _require_targets(list(linear), trainable, settings.targets, path)
    targets = [name for name in trainable if _is_target(name, settings.targets)]
    tied = module if isinstance(module, PreTrainedModel) and module.config.tie_word_embeddings else None
    if tied is not None and any(linear[name] is tied.get_output_embeddings() for name in targets):
        raise ConfigError(
            f"{path}.targets is {settings.targets}, but the model's head and embeddings are one matrix, to which an "
            "adapter of one of them cannot be merged: use [all-linear], which leaves both out"
        )
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=0.0)  # pyright: ignore[reportArgumentType] - a float works as well
    with seeded(seed, "adapters"):
        inject_adapter_in_model(config, module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(ADAPTER in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft gives adapters the precision of their layer
    module.eval()


def _require_targets(linear: Sequence[str], trained: Sequence[str], targets: Sequence[str], path: str) -> None:
    known = ", ".join(sorted({name.rpartition(".")[2] for name in trained}))
    for target in targets:
        if any(_is_target(name, [target]) for name in trained):
            continue
        exists = any(_is_target(name, [target]) for name in linear)
        rule = (
            f"the layers {target!r} receive no gradient: they are frozen, or unused"
            if exists
            else f"no linear layer of the model has the name {target!r}"
        )
        raise ConfigError(f"{path}.targets is {list(targets)}, but {rule}: use [all-linear], or some of {known}")


def _is_target(name: str, targets: Sequence[str]) -> bool:
    last = name.rpartition(".")[2]
    return last != "lm_head" if list(targets) == ["all-linear"] else last in targets


def dense_weight(linear: nn.Module) -> Tensor:
    """Returns the weight [out, in] that a linear layer applies, adapters included unless they are disabled."""
    weight = cast(Tensor, getattr(linear, "base_layer", linear).weight)
    for name in () if getattr(linear, "disable_adapters", True) else cast("list[str]", linear.active_adapters):
        weight = weight + linear.get_delta_weight(name)  # pyright: ignore[reportCallIssue]
    return weight


def dense_bias(linear: nn.Module) -> Tensor | None:
    """Returns the bias [out] of a linear layer, adapted or not."""
    return cast("Tensor | None", getattr(linear, "base_layer", linear).bias)


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Disables a module's adapters within the block."""
    layers: list[Any] = [part for part in module.modules() if hasattr(part, "get_delta_weight")]
    for layer in layers:
        layer._disable_adapters = True  # peft's own method freezes parameters
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """Returns the weights without adapters, by the names of the plain model."""
    return {name.replace(_BASE, "."): tensor for name, tensor in module.state_dict().items() if ADAPTER not in name}


def write_adapters(model: nn.Module, folder: Path, base: str = "", task: str | None = None) -> None:
    """Writes the adapters of a model as peft does (adapter_config.json, adapter_model.safetensors), if it has any.

    `base` is the folder or name of the base model; "": unknown.  `task` is peft's task type.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if ADAPTER in name}
    if state:
        folder.mkdir(parents=True, exist_ok=True)
        (config,) = cast("Mapping[str, PeftConfig]", model.peft_config).values()
        replace(config, base_model_name_or_path=base or None, task_type=task).save_pretrained(str(folder))
        named = {f"{_PEFT}{name.replace('.default', '')}": tensor for name, tensor in state.items()}
        save_file({name: t.contiguous() for name, t in named.items()}, folder / ADAPTERS)


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """Returns the adapters that `write_adapters` wrote, by the names of the model's parameters."""
    tensors = read_tensors(folder / ADAPTERS).items()
    return {re.sub(r"(\.lora_[AB])\.", r"\1.default.", name.removeprefix(_PEFT)): tensor for name, tensor in tensors}


@torch.no_grad()
def merged_model(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the plain architecture with the weights that `model` applies.

    Weights without an adapter are shared, not copied; a model without adapters is returned unchanged.  Merged weights
    have the model's precision, and below float32, rounding loses most of a small update: merge only for export.
    """
    state = plain_state(model)
    adapted = [name for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]
    if not adapted:
        return model
    for name in adapted:
        module = model.get_submodule(name)
        state[f"{name}.weight"] = dense_weight(module).detach().to(state[f"{name}.weight"].dtype)
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(state, assign=True)
    plain.tie_weights()
    for name, buffer in list(plain.named_buffers()):
        if buffer.is_meta:  # not in the state dict, such as rotary frequencies
            owner, _, last = name.rpartition(".")
            plain.get_submodule(owner).register_buffer(last, model.get_buffer(name).clone(), persistent=False)
    plain.generation_config = model.generation_config
    return plain.eval()
