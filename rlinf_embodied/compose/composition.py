"""Presets, files and overrides become one typed, checked config.

Three layers are merged, later ones over earlier ones: the defaults of the schema (rlinf_embodied/config/), what Hydra
composes from configs/<command>.yaml and its default or chosen presets, and the overrides.  All keys are checked, and
the dataclasses are built once, which checks their combinations.

An algorithm's dataclass is in its module, which imports torch.  So all other keys are merged and checked first, then
the process is pinned (portable/), then the module is imported.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied import portable
from rlinf_embodied.cluster.hardware import uses_accelerators
from rlinf_embodied.compose.overrides import explained, keys, read_override, split_override
from rlinf_embodied.config import (
    LOSSES,
    AlgorithmConfig,
    ClusterConfig,
    EvaluateAnswersConfig,
    EvaluateConfig,
    Exactness,
    ExportConfig,
    LanguageAlgorithmConfig,
    MathConfig,
    PolicyLoss,
    ServeEnvConfig,
    TrainConfig,
)
from rlinf_embodied.config.checks import did_you_mean, require, within
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in, load_target, targets_of

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
FILE_SUFFIXES = (".yaml", ".yml", ".json")  # of a file given instead of a preset
# the file under configs/ that lists the presets of a command; other schemas have none
_FILES: dict[type, str] = {
    TrainConfig: "train_vla",
    MathConfig: "train_llm_math",
    EvaluateConfig: "evaluate",
    EvaluateAnswersConfig: "evaluate_answers",
    ExportConfig: "export_dataset",
    ServeEnvConfig: "export_dataset",
}
_ALGORITHMS: dict[object, str] = {  # base class of an open section's dataclasses -> the default dataclass
    AlgorithmConfig: "rlinf_embodied.algorithms.ppo.PPOConfig",
    LanguageAlgorithmConfig: "rlinf_embodied.config.ReasoningAlgorithmConfig",
}
_GLOBAL = "# @package _global_"  # first line of a preset that sets keys of several sections
_RESOLVERS = {  # functions with which files under configs/ compute values from other keys
    "sum": lambda a, b: int(a) + int(b),
    "divide": lambda a, b: int(a) // int(b),
    "divide_up": lambda a, b: -(-int(a) // int(b)),
    "gymnasium_steps": lambda task: load_target("envs.gym.row.time_limit")(task),
    "equal": lambda a, b: a == b,
    "if": lambda condition, then, otherwise: then if condition else otherwise,
}
_Config = TypeVar("_Config")


class Preset(NamedTuple):
    """A group's folder below configs/, and its default file."""

    folder: str
    default: str


@functools.cache
def groups(schema: type) -> dict[str, Preset]:
    """Returns the groups of presets that a command has, by name, in the order in which they are merged."""
    name, presets = _FILES.get(schema), {}
    for entry in read_mapping(CONFIG_DIR / f"{name}.yaml")["defaults"] if name else ():
        if entry != "_self_":
            ((key, default),) = entry.items()  # `group: preset`, or `folder@group: preset`
            folder, _, group = key.rpartition("@")
            presets[group] = Preset(folder or group, default)
    return presets


def choices(group: str, schema: type) -> list[str]:
    """Returns the names of the presets of a command's group, sorted."""
    return sorted(path.stem for path in (CONFIG_DIR / groups(schema)[group].folder).glob("*.yaml"))


def compose(
    schema: type[_Config],
    overrides: Sequence[str] = (),
    sections: Mapping[str, object] | None = None,
    begin: Callable[[ClusterConfig, list[str]], None] | None = None,
) -> _Config:
    """Returns the config for overrides such as `["env=maniskill_push", "run.seed=1"]`.

    Args:
        schema: the dataclass to be built.
        overrides: `key=value` for every key of the schema, `group=preset` or `group=<file>`.
        sections: values of whole sections, which replace their default presets.
        begin: called with the cluster and the dotted paths of the code that the config names, before any of it is
            imported; not called if run.dry=true.

    Raises:
        ConfigError: an unknown group, preset or key, a wrong type, or an impossible combination.
    """
    values = dict(split_override(text) for text in overrides)
    chosen = {key: value for key, value in values.items() if key in groups(schema)}
    sections = {key: value for key, value in (sections or {}).items() if key not in chosen}
    files = ", ".join(value for value in chosen.values() if _is_file(value)) or "configs/"
    with _explaining(keys(schema), files):
        presets = _presets(schema, chosen, sections)
    bases = _open_sections(schema)
    targets = {path: values.get(f"{path}._target_") or _target(presets, path, base) for path, base in bases.items()}
    closed = [text for text in overrides if not targets or _is_closed(split_override(text)[0], schema)]
    config = _merged(schema, {}, [_without(layer, targets) for layer in (sections, presets)], closed, files)
    _require_filled(presets, values)
    if targets:
        with _explaining(keys(schema), "the command line"), suppress(ConfigError):  # commands that need pinning raise
            pin(config)
        if begin and not config.run.dry:
            begin(config.cluster, [*targets_of(OmegaConf.to_container(config, resolve=False)), *targets.values()])
    kinds = {path: _plug_in(target, path, bases[path]) for path, target in targets.items()}
    if kinds:
        kinds, layers, overrides = _with_losses(kinds, [sections, presets], overrides)
        config = _merged(schema, kinds, layers, overrides, files)
    with _explaining(_keys(schema, kinds), "the command line"):
        return _built(config)


def pin(config: Any) -> None:
    """Pins the process, before torch is imported, if run.exact=portable and the config computes on CPU cores.

    Raises:
        ConfigError: the process cannot be pinned.
    """
    cluster, run = getattr(config, "cluster", None), config.run
    if run.exact is Exactness.portable and not run.dry and not (cluster and uses_accelerators(cluster)):
        portable.pin()


def split(schema: type[_Config], overrides: Sequence[str]) -> tuple[_Config, list[str]]:
    """Returns the config of the overrides whose keys a schema has, and all others; raises as `compose` does."""
    known = [text for text in overrides if text.partition("=")[0] in keys(schema)]
    return compose(schema, known), [text for text in overrides if text not in known]


def load(path: Path, schema: type[_Config]) -> _Config:
    """Returns the config in a YAML file, such as the config.yaml of a run; raises as `compose` does."""
    data = read_mapping(path)
    kinds = {path: _plug_in(_target(data, path, base), path, base) for path, base in _open_sections(schema).items()}
    kinds, layers, _ = _with_losses(kinds, [data], ())
    config = _merged(schema, kinds, layers, (), str(path))
    with _explaining(_keys(schema, kinds), str(path)):
        return _built(config)


def to_yaml(config: object) -> str:
    """Returns a config (any dataclass of config/) as YAML; `load` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def read_mapping(path: Path) -> dict[str, Any]:
    """Returns the keys and values in a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read, or holds no mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date like 2001-13-01
        raise ConfigError(f"{path} is no valid YAML: correct the file ({' '.join(str(error).split())})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, but keys with values are needed: correct the file")
    return data


def stored_variant(data: Mapping[str, object]) -> dict[str, object]:
    """Returns the variant that a plan.json holds: items for exactly its number of devices."""
    number = data.get("num_devices", 1)
    variant: dict[str, object] = {"min_devices": number, "max_devices": number, "items": data.get("items")}
    return variant | {key: data[key] for key in ("exclusive", "staleness") if key in data}


# ----------------------------------------------------------------------------------------------------------- the schema
@functools.cache
def _open_sections(schema: type) -> dict[str, type]:
    """Returns the sections whose `_target_` names their dataclass: its base class, by path."""
    return {path: typing.cast(type, kind) for path, kind in keys(schema).items() if kind in _ALGORITHMS}


def _is_closed(key: str, schema: type) -> bool:
    """Returns whether a key can be checked without the dataclasses of the open sections."""
    is_open = any(f"{key}.".startswith(f"{path}.") for path in _open_sections(schema))
    return key.partition(".")[0] in keys(schema) and not is_open


def _without(layer: Mapping[str, object], paths: Collection[str], prefix: str = "") -> dict[str, object]:
    kept = {key: value for key, value in layer.items() if f"{prefix}{key}" not in paths}
    return {k: _without(v, paths, f"{prefix}{k}.") if isinstance(v, Mapping) else v for k, v in kept.items()}


def _target(data: Mapping[str, Any], path: str, base: type) -> str:
    """Returns the dotted path of an algorithm's dataclass, in the section at a path."""
    return OmegaConf.select(OmegaConf.create({**data}), f"{path}._target_") or _ALGORITHMS[base]


def _plug_in(target: str, section: str, base: type) -> type:
    """Returns the dataclass of an algorithm or policy loss, and imports its module."""
    path, rule = f"{section}._target_", f"it is the dotted path of a dataclass below {base.__name__}"
    kind = load_plug_in(target, path)
    fits = isinstance(kind, type) and issubclass(kind, base) and is_dataclass(kind)
    require(fits, path, target, rule, "see docs/own_algorithm.md")
    return typing.cast(type, kind)


def _with_losses(
    kinds: Mapping[str, type], layers: Sequence[Mapping[str, Any]], overrides: Sequence[str]
) -> tuple[dict[str, type], list[Mapping], list[str]]:
    """Adds the dataclasses of policy losses in algorithms' sections, and replaces names of losses by their `_target_`.

    Returns the dataclasses by path, the layers and the overrides.

    Raises:
        ConfigError: there is no such name, or `_target_` names no policy loss.
    """
    values, all_kinds, losses = dict(map(split_override, overrides)), dict(kinds), OmegaConf.create({})
    paths = [f"{path}.{name}" for path, kind in kinds.items() for name, k in keys(kind).items() if k is PolicyLoss]
    for path in paths:
        key, section = f"{path}._target_", {}
        for layer in layers:
            loss = OmegaConf.select(OmegaConf.create({**layer}), path)
            if OmegaConf.is_dict(loss):
                section |= typing.cast(dict, OmegaConf.to_container(loss, resolve=False))
            elif loss is not None:
                section = {"_target_": _loss_target(str(loss), path)}
        default = section.get("_target_") or LOSSES["clipped"]
        named = _loss_target(values[path], path) if path in values else default
        target = values.get(key) or named
        all_kinds[path] = _plug_in(target, path, PolicyLoss)
        OmegaConf.update(losses, path, {**(section if target == default else {}), "_target_": target})
    other_overrides = [text for text in overrides if split_override(text)[0] not in paths]
    return all_kinds, [*(_without(layer, paths) for layer in layers), typing.cast(Mapping, losses)], other_overrides


def _loss_target(name: str, path: str) -> str:
    """Returns the dotted path of the policy loss with this name."""
    rule = f"it is one of {', '.join(LOSSES)}, or a section"
    require(name in LOSSES, path, name, rule, f"give one, or {path}._target_=<module>.<Class> (docs/own_algorithm.md)")
    return LOSSES[name]


def _keys(schema: type, kinds: Mapping[str, type]) -> dict[str, object]:
    """Returns every key of a schema with its type, given the dataclasses of its open sections."""
    return {**keys(schema), **{f"{path}.{name}": k for path, kind in kinds.items() for name, k in keys(kind).items()}}


def _merged(
    schema: type, kinds: Mapping[str, type], layers: Sequence[Mapping], overrides: Sequence[str], files: str
) -> Any:
    """Returns the defaults of a schema and its open sections, with layers (from `files`) and overrides merged in."""
    known, config = _keys(schema, kinds), OmegaConf.merge(_structured(schema))
    values = dict(read_override(text, known, list(groups(schema))) for text in overrides)
    for path, kind in kinds.items():
        OmegaConf.update(config, path, _structured(kind), merge=False)
    with _explaining(known, files):
        config = OmegaConf.merge(config, *layers)
    with _explaining(known, "the command line"):
        for key, value in values.items():
            if key in known and key not in groups(schema):
                OmegaConf.update(config, key, value, merge=True)
            elif key not in groups(schema):  # of an open section; its values may be dataclasses (eval.sets)
                whole = functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)
                config = OmegaConf.merge(config, whole)
    return config


@contextmanager
def _explaining(known: Mapping[str, object], source: str) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, OverflowError) as error:
        raise explained(error, known, source) from error


@functools.cache  # building it takes longer than merging a copy of it
def _structured(schema: type) -> Any:
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    config = OmegaConf.structured(schema)
    OmegaConf.set_readonly(config, False)  # of a frozen dataclass
    return config


def _built(config: Any) -> Any:
    """Returns a config as an object of its schema, which checks it."""
    if "hierarchy" in config:  # the errors of its sections have paths that begin with `policy` and `algorithm`
        with within("hierarchy"):
            OmegaConf.to_object(OmegaConf.create([config.hierarchy.policy, config.hierarchy.algorithm]))
    return OmegaConf.to_object(config)


# ---------------------------------------------------------------------------------------------------------- the presets
def _presets(schema: type, chosen: Mapping[str, str], sections: Mapping[str, object]) -> dict[str, Any]:
    """Returns the values of the command's file and its presets, composed by Hydra, without the groups in `sections`."""
    selected = []
    for group, preset in groups(schema).items():
        key = group if preset.folder == group else f"{preset.folder}@{group}"
        if group in chosen:
            selected.append(f"{key}={_preset_name(group, chosen[group], preset, schema)}")
        elif group in sections:
            selected.append(f"~{key}")
    files = any(map(_is_file, chosen.values()))
    name = _FILES.get(schema)
    return (_composed.__wrapped__ if files else _composed)(name, tuple(selected)) if name else {}


@functools.cache  # it takes longer than all other steps together; a user's files are not cached: they may change
def _composed(name: str, selected: tuple[str, ...]) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(CONFIG_DIR), job_name=name, version_base="1.3"):
        composed = hydra.compose(name, overrides=list(selected))
    return typing.cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False))


def _is_file(value: str) -> bool:
    return value.endswith(FILE_SUFFIXES) or "/" in value


def _preset_name(group: str, value: str, preset: Preset, schema: type) -> str:
    """Returns the name under which Hydra finds a chosen preset; a user's file is registered under a new name."""
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
    """Checks that keys without a value in a preset (`???`) are given; the schema's default would not suit it."""
    sections = {group: section for group, section in presets.items() if isinstance(section, Mapping)}
    for key in (f"{group}.{name}" for group in sections for name, value in sections[group].items() if value == "???"):
        if key not in given:
            raise ConfigError(f"{key} is not given, and its preset has no default for it: give {key}=<name>")
