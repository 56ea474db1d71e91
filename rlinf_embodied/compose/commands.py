"""The commands' configs; evaluations and exports take omitted sections from the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.compose.composition import compose
from rlinf_embodied.compose.overrides import split_override
from rlinf_embodied.config import (
    EnvConfig,
    EvaluateAnswersConfig,
    EvaluateConfig,
    ExportConfig,
    MathConfig,
    ServeEnvConfig,
    TrainConfig,
)
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError

_Config = TypeVar("_Config")

compose_train = partial(compose, TrainConfig)  # overrides -> the config of experiments/train_vla.py
compose_math = partial(compose, MathConfig)  # overrides -> the config of experiments/train_llm_math.py


def _with_env(schema: type[_Config], overrides: Sequence[str]) -> _Config:
    """Returns the config of a command; its default env is the checkpoint's, if that can be read."""
    section = _json(overrides, "evaluation.json").get("env")
    return compose(schema, overrides, {"env": section} if _fits(EnvConfig, section) else {})


compose_export = partial(_with_env, ExportConfig)  # of experiments/export_dataset.py
compose_serve_env = partial(_with_env, ServeEnvConfig)  # of experiments/serve_env.py
compose_evaluate = partial(_with_env, EvaluateConfig)  # of an evaluation in a simulator


def compose_evaluation(overrides: Sequence[str]) -> EvaluateConfig | EvaluateAnswersConfig:
    """Returns the config of experiments/evaluate.py, which fits the workflow of the checkpoint."""
    folder = _folder(overrides)
    action = "give <run.dir>/checkpoints/latest, or a Hugging Face folder of a causal language model"
    exists = folder is None or folder.exists()
    require(exists, "checkpoint", str(folder), "there is no such folder", action)
    return compose_answers(overrides) or compose_evaluate(overrides)


def compose_answers(overrides: Sequence[str]) -> EvaluateAnswersConfig | None:
    """Returns the config of an evaluation if `checkpoint=<dir>` names a language model, else None.

    Sections that are not overridden are those of the checkpoint.  A plain Hugging Face folder has none, so its
    defaults are problems in sentences and 512 new tokens.
    """
    saved = _json(overrides, "evaluation.json") or _plain_model(overrides)
    sections = {name: saved.get(name) for name in ("data", "policy", "generation", "reward")}
    sections |= {name: saved[name] for name in ("tool", "agent") if name in saved}
    if saved.get("workflow") != "reasoning" or not _fits(EvaluateAnswersConfig, sections):
        return None
    return compose(EvaluateAnswersConfig, overrides, sections)


def _fits(schema: type, section: object) -> bool:
    """Returns whether a saved section can be used; if not, loading the checkpoint explains what is wrong with it."""
    try:
        config = OmegaConf.merge(OmegaConf.structured(schema), section)
        return section is not None and (schema is EvaluateAnswersConfig or bool(OmegaConf.to_object(config)))
    except (ValueError, TypeError, OmegaConfBaseException, ConfigError):
        return False


def _plain_model(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns sections for a causal language model as save_pretrained writes it; {} if the folder holds none."""
    kinds = _json(overrides, "config.json").get("architectures") or []
    if not any("ForCausalLM" in str(kind) or "LMHead" in str(kind) for kind in kinds):
        return {}
    custom_problems = any(text.startswith(("data.files.", "data._target_=")) for text in overrides)
    data = {"prompt_template": "natural"} | ({"level": ""} if custom_problems else {})
    return {"workflow": "reasoning", "data": data, "policy": {}, "generation": {"max_new_tokens": 512}, "reward": {}}


def _folder(overrides: Sequence[str]) -> Path | None:
    values = dict(map(split_override, overrides))
    compared = [name.strip() for name in values.get("compare", "").split(",")]
    folder = values.get("checkpoint") or next((name for name in compared if Path(name).expanduser().is_dir()), None)
    return Path(folder).expanduser() if folder else None


def _json(overrides: Sequence[str], name: str) -> dict[str, Any]:
    folder = _folder(overrides)
    try:
        return dict(json.loads((folder / name).read_text(encoding="utf-8"))) if folder is not None else {}
    except (OSError, ValueError, TypeError):
        return {}
