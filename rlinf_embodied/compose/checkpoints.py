"""The config of an evaluation or an export: sections that are not given are those of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.compose.composition import compose
from rlinf_embodied.config import EnvConfig, EvaluateAnswersConfig, EvaluateConfig, ExportConfig
from rlinf_embodied.errors import ConfigError


def compose_evaluate(overrides: Sequence[str], env: EnvConfig | None = None) -> EvaluateConfig:
    """Returns the config of an evaluation in a simulator.

    Args:
        overrides: as for `compose`.
        env: the env section of a checkpoint; None: that of `checkpoint=<dir>`.

    Raises:
        ConfigError: as for `compose`.
    """
    return compose(EvaluateConfig, overrides, _env_section(overrides, env))


def compose_export(overrides: Sequence[str]) -> ExportConfig:
    """Returns the config of experiments/export_dataset.py.

    Raises:
        ConfigError: as for `compose`.
    """
    return compose(ExportConfig, overrides, _env_section(overrides, None))


def compose_answers(overrides: Sequence[str]) -> EvaluateAnswersConfig | None:
    """Returns the config of an evaluation if `checkpoint=<dir>` names a language model, else None.

    Sections that are not overridden are those of a checkpoint of the reasoning workflow; for a plain folder of
    Hugging Face they are what such a model needs: problems in sentences, and 512 new tokens.

    Raises:
        ConfigError: as for `compose`.
    """
    saved = _json(overrides, "evaluation.json") or _plain_model(overrides)
    if saved.get("workflow") != "reasoning":
        return None
    try:
        sections = {name: saved[name] for name in ("data", "policy", "generation", "reward")}
        OmegaConf.merge(OmegaConf.structured(EvaluateAnswersConfig), sections)
    except (KeyError, OmegaConfBaseException):
        return None  # loading the checkpoint explains what is wrong with it
    return compose(EvaluateAnswersConfig, overrides, sections)


def _env_section(overrides: Sequence[str], env: EnvConfig | None) -> dict[str, object]:
    """Returns the env section of the checkpoint; nothing if there is none that can be read."""
    try:
        section = env or _json(overrides, "evaluation.json")["env"]
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EnvConfig), section))
        return {"env": section}
    except (ValueError, KeyError, TypeError, OmegaConfBaseException, ConfigError):
        return {}  # loading the checkpoint explains what is wrong with it


def _plain_model(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Returns sections for a causal language model as save_pretrained writes it; {} if the folder holds none."""
    kinds = _json(overrides, "config.json").get("architectures") or []
    if not any("ForCausalLM" in str(kind) or "LMHead" in str(kind) for kind in kinds):
        return {}
    own_problems = any(text.startswith(("data.files.", "data._target_=")) for text in overrides)
    data = {"prompt_template": "natural"} | ({"level": ""} if own_problems else {})
    return {"workflow": "reasoning", "data": data, "policy": {}, "generation": {"max_new_tokens": 512}, "reward": {}}


def _json(overrides: Sequence[str], name: str) -> dict[str, Any]:
    folders = [text.partition("=")[2].strip("'\"") for text in overrides if text.startswith("checkpoint=")]
    try:
        return dict(json.loads((Path(folders[-1]).expanduser() / name).read_text(encoding="utf-8")))
    except (IndexError, OSError, ValueError, TypeError):
        return {}
