"""Presets, files and overrides become one typed, checked config.

Order of events, each over the one before: the defaults of the schema (rlinf_embodied/config/), what Hydra composes of
configs/<command>.yaml with the presets that it lists or those chosen in their place, and the overrides.  All keys are
checked, and the dataclasses are built once, which checks their combinations.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.compose.overrides import did_you_mean, explained, keys, read_override, split_override
from rlinf_embodied.config import (
    AlgorithmConfig,
    EvaluateAnswersConfig,
    EvaluateConfig,
    ExportConfig,
    LanguageAlgorithmConfig,
    MathConfig,
    PPOConfig,
    ReasoningAlgorithmConfig,
    TrainConfig,
)
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in, load_target

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
FILE_SUFFIXES = (".yaml", ".yml", ".json")  # of a file that stands where a preset of a group could
# the file that lists the presets of a command; other schemas have none
_FILES: dict[type, str] = {
    TrainConfig: "train_vla",
    MathConfig: "train_llm_math",
    EvaluateConfig: "evaluate",
    EvaluateAnswersConfig: "evaluate_answers",
    ExportConfig: "export_dataset",
}
_ALGORITHMS: dict[type, tuple[type, type]] = {  # of a training: what they are all below, and the default
    TrainConfig: (AlgorithmConfig, PPOConfig),
    MathConfig: (LanguageAlgorithmConfig, ReasoningAlgorithmConfig),
}
_GLOBAL = "# @package _global_"  # first line of a preset that sets keys of several sections
_RESOLVERS = {  # what files under configs/ may compute from other keys
    "sum": lambda a, b: int(a) + int(b),
    "divide": lambda a, b: int(a) // int(b),
    "divide_up": lambda a, b: -(-int(a) // int(b)),
    "gymnasium_steps": lambda task: load_target("envs.gym.row.time_limit")(task),
    "equal": lambda a, b: a == b,
    "if": lambda condition, then, otherwise: then if condition else otherwise,
}
_Config = TypeVar("_Config")


class Preset(NamedTuple):
    """A group's folder below configs/, and the file in it that is taken by default."""

    folder: str
    default: str


@functools.cache
def groups(schema: type) -> dict[str, Preset]:
    """Returns the groups of presets that a command has, by name, in the order in which they are merged."""
    name, found = _FILES.get(schema), {}
    for entry in read_mapping(CONFIG_DIR / f"{name}.yaml")["defaults"] if name else ():
        if entry != "_self_":
            ((key, default),) = entry.items()  # `group: preset`, or `folder@group: preset`
            folder, _, group = key.rpartition("@")
            found[group] = Preset(folder or group, default)
    return found


def choices(group: str, schema: type | None = None) -> list[str]:
    """Returns the names of the presets of a group, sorted; those of a command, or of configs/<group>."""
    preset = groups(schema).get(group) if schema else None
    return sorted(path.stem for path in (CONFIG_DIR / (preset.folder if preset else group)).glob("*.yaml"))


def compose(
    schema: type[_Config], overrides: Sequence[str] = (), sections: Mapping[str, object] | None = None
) -> _Config:
    """Returns the config for overrides such as `["env=maniskill_push", "run.seed=1"]`.

    Args:
        schema: the dataclass to be built.
        overrides: `key=value` for every key of the schema, `group=preset` or `group=<file>`.
        sections: values of whole sections that take the place of their default presets.

    Raises:
        ConfigError: an unknown group, preset or key, a wrong type, or an impossible combination.
    """
    words = dict(split_override(text) for text in overrides)
    chosen = {key: value for key, value in words.items() if key in groups(schema)}
    sections = {key: value for key, value in (sections or {}).items() if key not in chosen}
    source = ", ".join(value for value in chosen.values() if _is_file(value)) or "configs/"
    typed: type = schema
    try:
        presets = _presets(schema, chosen, sections)
        typed = _with_algorithm(schema, words.get("algorithm._target_") or _target(presets))
        given = dict(read_override(text, typed, list(groups(schema))) for text in overrides)
        config = OmegaConf.merge(_structured(typed), sections, presets)
        source = "the command line"
        for key, value in given.items():
            if key not in chosen:
                OmegaConf.update(config, key, value, merge=True, force_add=key not in keys(typed))
        _require_filled(presets, {**chosen, **given})
        return _built(schema, config)
    except (HydraException, OmegaConfBaseException, OverflowError) as error:
        raise explained(error, typed, source) from error


def split(schema: type[_Config], overrides: Sequence[str]) -> tuple[_Config, list[str]]:
    """Returns the config of the overrides whose keys a schema has, and all others; raises as `compose` does."""
    mine = [text for text in overrides if text.partition("=")[0] in keys(schema)]
    return compose(schema, mine), [text for text in overrides if text not in mine]


def load(path: Path, schema: type[_Config]) -> _Config:
    """Returns the config in a YAML file, such as the config.yaml of a run; raises as `compose` does."""
    data = read_mapping(path)
    typed = _with_algorithm(schema, _target(data))
    try:
        return _built(schema, OmegaConf.merge(_structured(typed), data))
    except (OmegaConfBaseException, OverflowError) as error:
        raise explained(error, typed, str(path)) from error


def to_yaml(config: object) -> str:
    """Returns a config (any dataclass of config/) as YAML; `load` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def read_mapping(path: Path) -> dict[str, Any]:
    """Returns the keys and values in a YAML or JSON file; a ConfigError says why it cannot be read."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date like 2001-13-01
        raise ConfigError(f"{path} is no valid YAML: correct the file ({' '.join(str(error).split())})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, but keys with values are needed: correct the file")
    return data


def stored_variant(data: Mapping[str, object]) -> dict[str, object]:
    """Returns the variant that a plan.json holds: items for its number of devices and no other."""
    number = data.get("num_devices", 1)
    variant: dict[str, object] = {"min_devices": number, "max_devices": number, "items": data.get("items")}
    return variant | {key: data[key] for key in ("exclusive", "staleness") if key in data}


# ----------------------------------------------------------------------------------------------------------- the schema
@functools.cache
def _with_algorithm(schema: type, target: str) -> type:
    """Returns a training's schema with the dataclass of the chosen algorithm as its section `algorithm`."""
    if schema not in _ALGORITHMS:
        return schema
    base, default = _ALGORITHMS[schema]
    path, rule = "algorithm._target_", f"it is the dotted path of a dataclass below {base.__name__}"
    kind = load_plug_in(target, path) if target else default
    fits = isinstance(kind, type) and issubclass(kind, base) and is_dataclass(kind)
    require(fits, path, target, rule, "see docs/own_algorithm.md")
    return make_dataclass(schema.__name__, [("algorithm", kind)], bases=(schema,), kw_only=True)  # pyright: ignore


def _target(data: Mapping[str, Any]) -> str:
    section = data.get("algorithm")
    return str(section.get("_target_", "")) if isinstance(section, Mapping) else ""


@functools.cache  # building it takes longer than merging a copy of it
def _structured(schema: type) -> Any:
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    config = OmegaConf.structured(schema)
    OmegaConf.set_readonly(config, False)  # of a frozen dataclass
    return config


def _built(schema: type[_Config], config: Any) -> _Config:
    """Returns a config as an object of the schema's own class, which checks it."""
    found: Any = OmegaConf.to_object(config)
    same = type(found) is schema
    return found if same else schema(**{entry.name: getattr(found, entry.name) for entry in fields(found)})


# ---------------------------------------------------------------------------------------------------------- the presets
def _presets(schema: type, chosen: Mapping[str, str], sections: Mapping[str, object]) -> dict[str, Any]:
    """Returns what the command's file and its presets set, composed by Hydra; groups of `sections` are left out."""
    selected = []
    for group, preset in groups(schema).items():
        place = group if preset.folder == group else f"{preset.folder}@{group}"
        if group in chosen:
            selected.append(f"{place}={_preset_name(group, chosen[group], preset, schema)}")
        elif group in sections:
            selected.append(f"~{place}")
    files = any(map(_is_file, chosen.values()))
    name = _FILES.get(schema)
    return (_composed.__wrapped__ if files else _composed)(name, tuple(selected)) if name else {}


@functools.cache  # it takes longer than all other steps together; files of the user's may change
def _composed(name: str, selected: tuple[str, ...]) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(CONFIG_DIR), job_name=name, version_base="1.3"):
        composed = hydra.compose(name, overrides=list(selected))
    return typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))


def _is_file(value: str) -> bool:
    return value.endswith(FILE_SUFFIXES) or "/" in value


def _preset_name(group: str, value: str, preset: Preset, schema: type) -> str:
    """Returns the name under which Hydra finds a chosen preset; a file of the user's is stored under one."""
    if _is_file(value):
        path = Path(value).expanduser()
        data = read_mapping(path)
        data = _plan_section(path, data) if group == "plan" else data
        package = "_global_" if path.read_text(encoding="utf-8").startswith(_GLOBAL) else group
        name = "file_" + "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in path.stem)
        ConfigStore.instance().store(group=preset.folder, name=name, node=data, package=package)
        return name
    names = choices(group, schema)
    if value not in names:
        raise ConfigError(
            f"{group} is {value!r}, but it must be one of configs/{preset.folder}, or a path to a .yaml file:"
            f"{did_you_mean(value, names, f'{group}=')} choose from {', '.join(names)}"
        )
    return value


def _plan_section(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Returns the plan section for a plan file, or for the plan.json of a run."""
    if "items" in data and "variants" not in data:
        data = {"name": data.get("name"), "variants": [stored_variant(data)]}
    rule, action = "the file has neither `items` nor `variants`", "see configs/plan/collocated.yaml"
    require(bool(data.get("variants")), "plan", str(path), rule, action)
    return {**data, "name": data.get("name") or path.stem, "file": str(path.resolve())}


def _require_filled(presets: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """Checks that what a preset leaves open (`???`) is given: the default of the schema would be wrong for it."""
    sections = {group: section for group, section in presets.items() if isinstance(section, Mapping)}
    for key in (f"{group}.{name}" for group in sections for name, value in sections[group].items() if value == "???"):
        if key not in given:
            raise ConfigError(f"{key} is not given, and its preset stands for any: give {key}=<name>")
