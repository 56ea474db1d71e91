"""Folders of language policies, and the constructor argument of stages.

config.json  model.safetensors  tokenizer.json ...     as save_pretrained writes them
adapter/adapter_config.json  adapter_model.safetensors as peft writes them, for a policy with adapters
evaluation.json                                        the config sections that an evaluation needs
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from rlinf_embodied.config import LanguagePolicyConfig, MathConfig, Precision
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.learning.weights import SharedPolicy, move
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.runtime.host import StageContext
from rlinf_embodied.telemetry.run_folder import library_versions

REFERENCE = "reference"  # the share of a frozen copy of the starting policy


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Constructor argument of a stage."""

    config: MathConfig
    folder: str  # of the model; "": a new model
    share: str = "policy"  # stages of a worker with the same name share one copy of the weights
    dtype: torch.dtype | None = None  # of that copy's parameters; None: config.policy.precision
    without_adapters: bool = False  # uses the model with adapters switched off


def sampling_copy(stage_config: StageConfig) -> StageConfig:
    """Returns the argument of a stage that samples: with generation.precision=bfloat16 it has a separate copy."""
    if stage_config.config.generation.precision is not Precision.bfloat16:
        return stage_config
    return replace(stage_config, share="generation", dtype=torch.bfloat16)


def round_matrices(module: nn.Module, precision: Precision) -> None:
    """Stores the weights of a frozen model's linear layers in the precision of its passes, whose bits do not change.

    In bfloat16 autocast would round these weights in every pass (rlinf_embodied.device.computing).  It does not round
    embeddings, also if they are tied to the head, and norms.
    """
    if precision is Precision.bfloat16:
        layers = {layer: list(layer.parameters(recurse=False)) for layer in module.modules()}
        others = {p for layer, parameters in layers.items() if not isinstance(layer, nn.Linear) for p in parameters}
        for parameter in {p for parameters in layers.values() for p in parameters} - others:
            parameter.data = parameter.data.to(torch.bfloat16)


def load_policy(
    config: LanguagePolicyConfig,
    folder: str,
    seed: int,
    device: str,
    dtype: torch.dtype | None = None,
    matrices: Precision = Precision.float32,
) -> SharedPolicy[LanguagePolicy]:
    """Returns the policy of a folder ("": a new one, drawn from the seed) on a device.

    With `dtype` parameters are converted to it before they reach the device; None: they stay as config.precision says,
    except for `round_matrices`.
    """
    if dtype is not None:
        config = copy.copy(config)  # `replace` would check that trained weights are float32
        config.precision = Precision(str(dtype).removeprefix("torch."))  # no float32 copy is read
    policy_class = cast(type[LanguagePolicy], load_target(config._target_))
    policy = policy_class.from_config(config, Path(folder) if folder else None, seed)
    for parameter in policy.module.parameters() if dtype is not None else ():  # adapters; not buffers (rotary)
        parameter.data = parameter.data.to(dtype)
    round_matrices(policy.module, matrices)
    move(policy.module, device)
    return SharedPolicy(policy, device=device)


def shared_model(context: StageContext, stage_config: StageConfig) -> SharedPolicy[LanguagePolicy]:
    """Returns the worker's copy of a model, loaded on first use."""
    run, settings = stage_config.config, (stage_config.folder, stage_config.config.run.seed, context.device)
    matrices = run.algorithm.precision if stage_config.share == REFERENCE else Precision.float32
    load = lambda: load_policy(run.policy, *settings, stage_config.dtype, matrices)  # noqa: E731
    return cast(SharedPolicy[LanguagePolicy], context.share(stage_config.share, load))


def save_policy(policy: LanguagePolicy, folder: Path, config: MathConfig) -> None:
    """Writes a policy with the config sections that its evaluation needs."""
    policy.save(folder, config.policy.folder or config.warm_start.checkpoint or "")
    names = ("data", "policy", "generation", "tool", "agent", "reward")
    sections = {name: asdict(getattr(config, name)) for name in names}
    content = {"workflow": "reasoning", **sections, "libraries": library_versions()}
    (folder / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
