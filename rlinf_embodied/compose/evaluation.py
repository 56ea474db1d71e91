"""The configs of an evaluation and of an export: what is not overridden is that of the checkpoint."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.compose.commands import compose_config, require_given
from rlinf_embodied.compose.overrides import parsed, readable
from rlinf_embodied.config import EnvConfig, EvaluateAnswersConfig, EvaluateConfig, ExportConfig
from rlinf_embodied.config.renamed import with_current_keys
from rlinf_embodied.errors import ConfigError

EVALUATE_GROUPS = ("env", "cluster", "run")
ANSWERS_GROUPS = ("cluster", "run")
EXPORT_GROUPS = ("env",)


def compose_evaluate(overrides: Sequence[str], env: EnvConfig | None = None) -> EvaluateConfig:
    """Returns the evaluation config.

    Args:
        overrides: as for `compose_train`.
        env: the section of a checkpoint, None: that of `checkpoint=<dir>`; it stands where no `env=<choice>` is given,
            below overrides such as `env.num_envs=8`.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return compose_config("evaluate", EvaluateConfig, EVALUATE_GROUPS, _with_env_of_checkpoint(overrides, env))


def compose_export(overrides: Sequence[str]) -> ExportConfig:
    """Returns the config of experiments/export_dataset.py; the env is that of the checkpoint unless it is given.

    Raises:
        ConfigError: as for `compose_train`.
    """
    require_given("out", overrides, "out=<file>.h5 for ManiSkill, or out=<new folder> for LeRobot")
    return compose_config("export_dataset", ExportConfig, EXPORT_GROUPS, _with_env_of_checkpoint(overrides, None))


def _with_env_of_checkpoint(overrides: Sequence[str], env: EnvConfig | None) -> Sequence[str]:
    """Returns overrides in which the env of a checkpoint is the choice of the group, unless they choose another."""
    env = env or _env_of_checkpoint(overrides)
    if env is None or any(text.startswith("env=") for text in overrides):
        return overrides
    ConfigStore.instance().store(group="env", name="from_checkpoint", node=OmegaConf.structured(env))
    return ["env=from_checkpoint", *overrides]


def compose_answers(overrides: Sequence[str]) -> EvaluateAnswersConfig | None:
    """Returns the evaluation config where `checkpoint=<dir>` names a language model, else None.

    Sections that are not overridden are those of a checkpoint of the reasoning workflow; for a plain folder of
    Hugging Face they are what such a model needs: problems in sentences, and 512 new tokens.

    Raises:
        ConfigError: as for `compose_train`.
    """
    saved = _saved_sections(overrides) or _plain_sections(overrides)
    if saved.get("workflow") != "reasoning":
        return None
    try:
        sections = {name: saved[name] for name in ("data", "policy", "generation", "reward")}
        node = OmegaConf.merge(OmegaConf.structured(EvaluateAnswersConfig), sections)
    except (KeyError, OmegaConfBaseException):
        return None  # whoever loads the checkpoint says what is wrong with it
    return compose_config("evaluate_answers", EvaluateAnswersConfig, ANSWERS_GROUPS, overrides, node)


def _env_of_checkpoint(overrides: Sequence[str]) -> EnvConfig | None:
    """Returns the env section of the checkpoint that is to be evaluated; None where there is none that can be read."""
    try:
        saved = _saved_sections(overrides)["env"]
        merged = OmegaConf.merge(OmegaConf.structured(EnvConfig), saved)
        return typing.cast(EnvConfig, OmegaConf.to_object(merged))
    except (ValueError, KeyError, TypeError, OmegaConfBaseException, ConfigError):
        return None  # whoever loads the checkpoint says what is wrong with it


def _plain_sections(overrides: Sequence[str]) -> dict[str, typing.Any]:
    """Returns sections for a causal language model as save_pretrained writes it; {} where the folder holds none."""
    kinds = _checkpoint_json(overrides, "config.json").get("architectures") or []
    if not any("ForCausalLM" in str(kind) or "LMHead" in str(kind) for kind in kinds):
        return {}
    asked = any(text.startswith(("data.files.", "data._target_=")) for text in overrides)
    data = {"prompt_template": "natural"} | ({"level": ""} if asked else {})
    return {"workflow": "reasoning", "data": data, "policy": {}, "generation": {"max_new_tokens": 512}, "reward": {}}


def _saved_sections(overrides: Sequence[str]) -> dict[str, typing.Any]:
    """Returns what evaluation.json of the checkpoint says; {} where there is none that can be read."""
    return with_current_keys(_checkpoint_json(overrides, "evaluation.json"))


def _checkpoint_json(overrides: Sequence[str], name: str) -> dict[str, typing.Any]:
    named = [parsed(readable(text)).value() for text in overrides if text.startswith("checkpoint=")]
    try:
        return dict(json.loads((Path(str(named[-1])).expanduser() / name).read_text(encoding="utf-8")))
    except (IndexError, OSError, ValueError, TypeError):
        return {}
