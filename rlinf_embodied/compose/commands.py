"""Command-line overrides and the files under configs/ become one typed, checked config.

Order of events: the overrides are checked against the schemas (unknown groups, choices and keys are named with their
neighbours), Hydra merges files and overrides into the typed tree (wrong types), and `OmegaConf.to_object` builds the
dataclasses once (impossible combinations).  Nothing heavy is imported on the way: a typing error costs half a second.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from typing import TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.compose.explain import explained
from rlinf_embodied.compose.files import CONFIG_DIR, choice_folder, read_mapping
from rlinf_embodied.compose.overrides import checked_override, parsed, placed, readable, spelled
from rlinf_embodied.compose.user_files import stored_plan, stored_section
from rlinf_embodied.config import (
    ControlConfig,
    EmulationConfig,
    EnvConfig,
    ImitationConfig,
    MathConfig,
    PlanningConfig,
    PolicyConfig,
    TrainConfig,
)
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.targets import load_target

TRAIN_GROUPS = ("env", "policy", "algorithm", "plan", "cluster", "run")
MATH_GROUPS = ("data", "policy", "warm_start", "algorithm", "plan", "cluster", "run")
SFT_GROUPS = ("env", "policy", "cluster")
CONTROL_GROUPS = ("env", "policy", "algorithm", "plan", "cluster", "run")
PLANNING_GROUPS = ("run",)
_KNOWN = {"env.task": "envs.expert_tasks.EXPERT_TASKS"}  # good values of what files leave open, as a dotted path

# what files under configs/ may compute from other keys
_RESOLVERS: dict[str, Callable[..., object]] = {
    "sum": lambda a, b: int(a) + int(b),
    "divide": lambda a, b: int(a) // int(b),
    "equal": lambda a, b: a == b,
    "if": lambda condition, then, otherwise: then if condition else otherwise,
    "gymnasium_steps": lambda task: load_target("envs.gym.row.time_limit")(task),
}

_Config = TypeVar("_Config")


def compose_train(overrides: Sequence[str]) -> TrainConfig:
    """Returns the training config for overrides such as `["env=maniskill_push", "run.seed=1"]`.

    Raises:
        ConfigError: an unknown group, choice or key, a wrong type, or an impossible combination.
    """
    return compose_config("train_vla", TrainConfig, TRAIN_GROUPS, overrides)


def compose_sft(overrides: Sequence[str]) -> ImitationConfig:
    """Returns the config of experiments/train_sft.py.

    Raises:
        ConfigError: as for `compose_train`.
    """
    require_given("data", overrides, "data=<file>.h5, data=<LeRobot folder>, or several of them joined by commas")
    return compose_config("train_sft", ImitationConfig, SFT_GROUPS, overrides)


def require_given(key: str, overrides: Sequence[str], example: str) -> None:
    """Checks that a key without a default is given.

    Raises:
        ConfigError: it is not.
    """
    if not any(text.startswith(f"{key}=") and text != f"{key}=" for text in overrides):
        raise ConfigError(f"{key} is not given, but the command needs it: give {example}")


def compose_math(overrides: Sequence[str]) -> MathConfig:
    """Returns the config of experiments/train_llm_math.py; its own choices lie in configs/reasoning/.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return compose_config("train_llm_math", MathConfig, MATH_GROUPS, overrides)


def compose_control(overrides: Sequence[str]) -> ControlConfig:
    """Returns the config of experiments/train_control.py; its own choices lie in configs/control/.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return compose_config("train_control", ControlConfig, CONTROL_GROUPS, overrides)


def compose_planning(overrides: Sequence[str]) -> PlanningConfig:
    """Returns the config of experiments/plan.py.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return compose_config("planning", PlanningConfig, PLANNING_GROUPS, overrides)


def compose_emulation(overrides: Sequence[str]) -> EmulationConfig:
    """Returns the config of experiments/emulate.py.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return compose_config("emulate", EmulationConfig, (), overrides)


def compose_config(
    name: str, schema: type[_Config], groups: Sequence[str], overrides: Sequence[str], node: object = None
) -> _Config:
    """Composes configs/<name>.yaml over a schema (or values of one, `node`) and builds the dataclasses.

    Raises:
        ConfigError: an unknown group, choice or key, a wrong type, or an impossible combination.
    """
    store = ConfigStore.instance()
    store.store(name=f"{name.split('_')[0]}_schema", node=node or schema)
    for resolver_name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(resolver_name, resolver, replace=True)
    try:
        given = [readable(spelled(text)) for text in overrides]
        stored = [stored_plan(text, schema) if "plan" in groups else text for text in given]
        stored = [stored_section(text, "env", EnvConfig) if "env" in groups else text for text in stored]
        if schema in (TrainConfig, ImitationConfig, ControlConfig):
            stored = [stored_section(text, "policy", PolicyConfig) for text in stored]
        checked = [placed(checked_override(text, schema, groups), schema, groups) for text in stored]
        _require_filled(checked, schema, groups)
        # Hydra takes any key that is also a folder under configs/ for a group; where it is a plain key it is set last
        named = {text: parsed(text).key_or_group for text in checked}
        taken = {*groups, *(choice_folder(group, schema) for group in groups)}
        plain = [text for text, key in named.items() if key not in taken and (CONFIG_DIR / key).is_dir()]
        with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3", job_name=name):
            merged = compose(name, overrides=[text for text in checked if text not in plain])
        for override in map(parsed, plain):
            OmegaConf.update(merged, override.key_or_group, override.value())
        return typing.cast(_Config, OmegaConf.to_object(merged))
    except (HydraException, OmegaConfBaseException, OverflowError) as error:
        raise explained(error, schema, "the command line") from error


def _require_filled(overrides: Sequence[str], schema: type, groups: Sequence[str]) -> None:
    """Checks that what a chosen file leaves open (`???`) is given: Hydra would take the schema's default for it.

    Raises:
        ConfigError: it is not.
    """
    given = {parsed(text).key_or_group for text in overrides}
    for text in overrides:
        group, _, choice = text.partition("=")
        path = CONFIG_DIR / choice_folder(group, schema) / f"{choice}.yaml"
        if group not in groups or not path.is_file():
            continue
        for key, value in read_mapping(path).items():
            if value == "???" and f"{group}.{key}" not in given:
                known = typing.cast("Sequence[str]", load_target(_KNOWN[f"{group}.{key}"]))
                raise ConfigError(
                    f"{group}.{key} is not given, but {text} stands for any: give {group}.{key}=<name>, for example "
                    f"one of those with a scripted expert: {', '.join(known)}"
                )
