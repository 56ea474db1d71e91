"""The Hydra edge: command-line overrides and the files under configs/ become one typed, checked config.

Order of events: the overrides are checked against the schemas (unknown groups, choices and keys are named with their
neighbours), Hydra merges files and overrides into the typed tree (wrong types), and `OmegaConf.to_object` builds the
dataclasses once (impossible combinations).  Nothing heavy is imported on the way: a typing error costs half a second.
"""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.config import (
    EmulationConfig,
    EnvConfig,
    EvaluateAnswersConfig,
    EvaluateConfig,
    ExportConfig,
    ImitationConfig,
    MathConfig,
    PlanConfig,
    PlanningConfig,
    TrainConfig,
)
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.targets import load_target

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
TRAIN_GROUPS = ("env", "policy", "algorithm", "plan", "cluster", "run")
MATH_GROUPS = ("data", "policy", "warm_start", "algorithm", "plan", "cluster", "run")
SFT_GROUPS = ("env", "policy", "cluster")
EXPORT_GROUPS = ("env",)
EVALUATE_GROUPS = ("env", "cluster", "run")
ANSWERS_GROUPS = ("cluster", "run")
PLANNING_GROUPS = ("run",)
FILE_SUFFIXES = (".yaml", ".yml", ".json")  # of a file that stands where a choice of a group could
# keys whose values are places of files: a name may hold anything, with quotes around it or without
PATH_KEYS = (
    *("run.dir", "resume", "checkpoint", "env", "plan", "plan.file", "plan.profile", "policy.folder", "out", "data"),
    *("warm_start.checkpoint", "warm_start.demonstrations", "warm_start.teacher", "warm_start.cache_dir"),
    "sft.checkpoint",
)
_KNOWN = {"env.task": "envs.expert_tasks.EXPERT_TASKS"}  # good values of what files leave open, as a dotted path
_SWITCHES = {"run.exact": {True: "exact", False: "off"}}  # enumerations that also take true and false

# what files under configs/ may compute from other keys
_RESOLVERS: dict[str, Callable[..., object]] = {
    "sum": lambda a, b: int(a) + int(b),
    "divide": lambda a, b: int(a) // int(b),
    "equal": lambda a, b: a == b,
    "if": lambda condition, then, otherwise: then if condition else otherwise,
}

_Config = TypeVar("_Config")


def compose_train(overrides: Sequence[str]) -> TrainConfig:
    """Returns the training config for overrides such as `["env=maniskill_push", "run.seed=1"]`.

    Raises:
        ConfigError: an unknown group, choice or key, a wrong type, or an impossible combination.
    """
    return _compose("train_vla", TrainConfig, TRAIN_GROUPS, overrides)


def compose_math(overrides: Sequence[str]) -> MathConfig:
    """Returns the config of experiments/train_llm_math.py; its own choices lie in configs/reasoning/.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return _compose("train_llm_math", MathConfig, MATH_GROUPS, overrides)


def compose_sft(overrides: Sequence[str]) -> ImitationConfig:
    """Returns the config of experiments/train_sft.py.

    Raises:
        ConfigError: as for `compose_train`.
    """
    _require_given("data", overrides, "data=<file>.h5, data=<LeRobot folder>, or several of them joined by commas")
    return _compose("train_sft", ImitationConfig, SFT_GROUPS, overrides)


def compose_export(overrides: Sequence[str]) -> ExportConfig:
    """Returns the config of experiments/export_dataset.py; the env is that of the checkpoint unless it is given.

    Raises:
        ConfigError: as for `compose_train`.
    """
    _require_given("out", overrides, "out=<file>.h5 for ManiSkill, or out=<new folder> for LeRobot")
    return _compose("export_dataset", ExportConfig, EXPORT_GROUPS, _with_env_of_checkpoint(overrides, None))


def _require_given(key: str, overrides: Sequence[str], example: str) -> None:
    if not any(text.startswith(f"{key}=") and text != f"{key}=" for text in overrides):
        raise ConfigError(f"{key} is not given, but the command needs it: give {example}")


def compose_evaluate(overrides: Sequence[str], env: EnvConfig | None = None) -> EvaluateConfig:
    """Returns the evaluation config.

    Args:
        overrides: as for `compose_train`.
        env: the section of a checkpoint, None: that of `checkpoint=<dir>`; it stands where no `env=<choice>` is given,
            below overrides such as `env.num_envs=8`.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return _compose("evaluate", EvaluateConfig, EVALUATE_GROUPS, _with_env_of_checkpoint(overrides, env))


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
    return _compose("evaluate_answers", EvaluateAnswersConfig, ANSWERS_GROUPS, overrides, node)


def _plain_sections(overrides: Sequence[str]) -> dict[str, typing.Any]:
    """Returns sections for a causal language model as save_pretrained writes it; {} where the folder holds none."""
    kinds = _checkpoint_json(overrides, "config.json").get("architectures") or []
    if not any("ForCausalLM" in str(kind) or "LMHead" in str(kind) for kind in kinds):
        return {}
    asked = any(text.startswith(("data.files.", "data._target_=")) for text in overrides)
    data = {"form": "natural"} | ({"level": ""} if asked else {})
    return {"workflow": "reasoning", "data": data, "policy": {}, "generation": {"max_new_tokens": 512}, "reward": {}}


def _saved_sections(overrides: Sequence[str]) -> dict[str, typing.Any]:
    """Returns what evaluation.json of the checkpoint says; {} where there is none that can be read."""
    return _checkpoint_json(overrides, "evaluation.json")


def _checkpoint_json(overrides: Sequence[str], name: str) -> dict[str, typing.Any]:
    named = [_parsed(_readable(text)).value() for text in overrides if text.startswith("checkpoint=")]
    try:
        return dict(json.loads((Path(str(named[-1])).expanduser() / name).read_text(encoding="utf-8")))
    except (IndexError, OSError, ValueError, TypeError):
        return {}


def _env_of_checkpoint(overrides: Sequence[str]) -> EnvConfig | None:
    """Returns the env section of the checkpoint that is to be evaluated; None where there is none that can be read."""
    try:
        saved = _saved_sections(overrides)["env"]
        merged = OmegaConf.merge(OmegaConf.structured(EnvConfig), saved)
        return typing.cast(EnvConfig, OmegaConf.to_object(merged))
    except (ValueError, KeyError, TypeError, OmegaConfBaseException, ConfigError):
        return None  # whoever loads the checkpoint says what is wrong with it


def compose_planning(overrides: Sequence[str]) -> PlanningConfig:
    """Returns the config of experiments/plan.py.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return _compose("planning", PlanningConfig, PLANNING_GROUPS, overrides)


def compose_emulation(overrides: Sequence[str]) -> EmulationConfig:
    """Returns the config of experiments/emulate.py.

    Raises:
        ConfigError: as for `compose_train`.
    """
    return _compose("emulate", EmulationConfig, (), overrides)


def read_mapping(path: Path) -> dict[str, object]:
    """Returns the keys and values in a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read, is no valid YAML, or holds something else.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the path of an existing YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no valid YAML: mend the file ({error})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, but keys with values are needed: mend the file")
    return data


def to_yaml(config: object) -> str:
    """Returns a config (any dataclass of config/) as YAML; `load` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def load(path: Path, schema: type[_Config]) -> _Config:
    """Returns the config in a YAML file, such as the config.yaml of a run.

    Raises:
        ConfigError: the file cannot be read, or does not fit the schema.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), _switched(read_mapping(path)))
        return typing.cast(_Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise _explained(error, schema, str(path)) from error


def _switched(data: dict[str, object]) -> dict[str, object]:
    """Returns the content of a file with names of enumerations in place of true and false."""
    for key, names in _SWITCHES.items():
        section, _, name = key.partition(".")
        inside = data.get(section)
        if isinstance(inside, dict) and isinstance(inside.get(name), bool):
            data = {**data, section: {**inside, name: names[inside[name]]}}
    return data


def choices(group: str, schema: type | None = None) -> list[str]:
    """Returns the names of the files of a config group, sorted; those of a schema's own where it has some."""
    return sorted(path.stem for path in (CONFIG_DIR / _folder(group, schema)).glob("*.yaml"))


def _folder(group: str, schema: type | None) -> str:
    """Returns the folder of a group's files below configs/: of the reasoning workflow those of its own come first."""
    own = f"reasoning/{group}"
    return own if schema is MathConfig and (CONFIG_DIR / own).is_dir() else group


def keys(schema: type) -> dict[str, object]:
    """Returns every key of a schema by its dotted path, with its type; sections are included."""
    return dict(_walk(schema, ""))


def _walk(schema: type, prefix: str) -> Iterator[tuple[str, object]]:
    hints = typing.get_type_hints(schema)
    for entry in fields(schema):
        kind = hints[entry.name]
        yield prefix + entry.name, kind
        if is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), f"{prefix}{entry.name}.")


def _compose(
    name: str, schema: type[_Config], groups: Sequence[str], overrides: Sequence[str], node: object = None
) -> _Config:
    """Composes configs/<name>.yaml over a schema (or values of one, `node`) and builds the dataclasses."""
    store = ConfigStore.instance()
    store.store(name=f"{name.split('_')[0]}_schema", node=node or schema)
    for resolver_name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(resolver_name, resolver, replace=True)
    try:
        readable = [_readable(text) for text in overrides]
        stored = [_stored_plan(text, schema) if "plan" in groups else text for text in readable]
        stored = [_stored_env(text) if "env" in groups else text for text in stored]
        checked = [_placed(_checked(text, schema, groups), schema, groups) for text in stored]
        _require_filled(checked, schema, groups)
        # Hydra takes any key that is also a folder under configs/ for a group; where it is a plain key it is set last
        named = {text: _parsed(text).key_or_group for text in checked}
        taken = {*groups, *(_folder(group, schema) for group in groups)}
        plain = [text for text, key in named.items() if key not in taken and (CONFIG_DIR / key).is_dir()]
        with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3", job_name=name):
            merged = compose(name, overrides=[text for text in checked if text not in plain])
        for override in map(_parsed, plain):
            OmegaConf.update(merged, override.key_or_group, override.value())
        return typing.cast(_Config, OmegaConf.to_object(merged))
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(error, schema, "the command line") from error


def _checked(text: str, schema: type, groups: Sequence[str]) -> str:
    """Returns an override that names something; free-form keys (`dict` fields) get Hydra's sign for a new key."""
    override = _parsed(text)
    key = override.key_or_group
    if override.is_sweep_override():
        raise ConfigError(
            f"{text!r} gives {key} several values, but a run has one: use {key}=<value>, for lists {key}=[a,b]"
        )
    if key in groups and not override.is_delete():
        _check_choice(key, override.value(), schema)
        return text
    known = keys(schema)
    parent = next((k for k, kind in known.items() if typing.get_origin(kind) is dict and key.startswith(f"{k}.")), None)
    if parent is not None:
        return text if text[0] in "+~" else f"++{text}"
    if key not in known:
        raise _unknown_key(key, known, groups)
    if override.is_delete():
        raise ConfigError(f"{text} deletes {key}, but every key has a value: set {key}=<value> instead")
    value = override.value()
    return f"{key}={_SWITCHES[key][value]}" if key in _SWITCHES and isinstance(value, bool) else text


def _placed(text: str, schema: type, groups: Sequence[str]) -> str:
    """Returns a choice such as algorithm=ppo with the folder in which the schema's own choices lie."""
    group, _, choice = text.partition("=")
    folder = _folder(group, schema)
    return text if group not in groups or folder == group else f"{folder}@{group}={choice}"


def _parsed(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"{text!r} cannot be read as an override, which has the form key=value: "
            "quote values with spaces, commas, '=' or brackets, as in 'key=\"a, b\"'"
        ) from error


def _readable(text: str) -> str:
    """Returns an override that Hydra can read: a path with signs that mean something to Hydra is quoted."""
    key, assigned, path = text.partition("=")
    if not assigned or not (key in PATH_KEYS or key.startswith("data.files.")):
        return text
    if "${" in path:
        raise ConfigError(f"{key} is {path!r}, but '${{' begins a reference to another key: rename the file or folder")
    try:
        value = _parsed(text).value()
    except ConfigError:
        value = ()  # no text: Hydra does not know a sign
    return (
        text if value is None or isinstance(value, str) else f"{key}={QuotedString(path, Quote.single).with_quotes()}"
    )


def _check_choice(group: str, value: object, schema: type) -> None:
    """Raises where a group has no such choice; those of the store (plan files, checkpoints) count as well."""
    names = choices(group, schema)
    stored: typing.Any = ConfigStore.instance().repo
    for part in _folder(group, schema).split("/"):
        stored = stored.get(part, {})
    if isinstance(value, str) and (value in names or f"{value}.yaml" in stored):
        return
    files = ", or a path to a .yaml file" if group in ("plan", "env") else ""
    hint = f"one of configs/{_folder(group, schema)}{files}"
    generic = " (any ManiSkill task: env=maniskill env.task=<id>)" if group == "env" else ""
    raise ConfigError(
        f"{group} is {value!r}, but it must be {hint}:{_did_you_mean(str(value), names, f'{group}=')} "
        f"choose from {', '.join(names)}{generic}"
    )


def _unknown_key(key: str, known: Mapping[str, object], groups: Sequence[str]) -> ConfigError:
    section = key.rpartition(".")[0]
    while section and not is_dataclass(known.get(section)):
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    inside = [k.removeprefix(prefix) for k in known if k.startswith(prefix) and "." not in k.removeprefix(prefix)]
    same_leaf = [k for k in known if "." in k and k.rpartition(".")[2] == key.rpartition(".")[2]]
    guess = f" did you mean {same_leaf[0]}?" if same_leaf else _did_you_mean(key, [*known, *groups])
    return ConfigError(
        f"{key} is unknown: keys are checked against the schemas in rlinf_embodied/config/;{guess} "
        f"{section or 'the top level'} has {', '.join(inside)}"
    )


def _did_you_mean(word: str, names: Sequence[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(word, names, n=1)
    return f" did you mean {prefix}{close[0]}?" if close else ""


def _file_of(text: str, group: str) -> Path | None:
    """Returns the file that is given where a choice of a group could stand, None where there is none."""
    value = _parsed(text).value() if text.startswith(f"{group}=") else None
    if not isinstance(value, str) or not (value.endswith(FILE_SUFFIXES) or "/" in value):
        return None
    return Path(value).expanduser()


def _stored_env(text: str) -> str:
    """Makes a file a choice of the group: `env=my/robot.yaml` is stored and becomes `env=file_robot`."""
    path = _file_of(text, "env")
    if path is None:
        return text
    try:
        node = OmegaConf.merge(OmegaConf.structured(EnvConfig), read_mapping(path))
    except OmegaConfBaseException as error:
        raise _explained(error, EnvConfig, str(path)) from error
    return _store_file("env", "env", path, node)


def _store_file(group: str, folder: str, path: Path, node: object) -> str:
    name = "file_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in path.stem)
    ConfigStore.instance().store(group=folder, name=name, node=node)
    return f"{group}={name}"


def _require_filled(overrides: Sequence[str], schema: type, groups: Sequence[str]) -> None:
    """Checks that what a chosen file leaves open (`???`) is given: Hydra would take the schema's default for it.

    Raises:
        ConfigError: it is not.
    """
    given = {_parsed(text).key_or_group for text in overrides}
    for text in overrides:
        group, _, choice = text.partition("=")
        path = CONFIG_DIR / _folder(group, schema) / f"{choice}.yaml"
        if group not in groups or not path.is_file():
            continue
        for key, value in read_mapping(path).items():
            if value == "???" and f"{group}.{key}" not in given:
                known = typing.cast("Sequence[str]", load_target(_KNOWN[f"{group}.{key}"]))
                raise ConfigError(
                    f"{group}.{key} is not given, but {text} stands for any: give {group}.{key}=<name>, for example "
                    f"one of those with a scripted expert: {', '.join(known)}"
                )


def _stored_plan(text: str, schema: type) -> str:
    """Makes a plan file a choice of the group: `plan=my/tree.yaml` is stored and becomes `plan=file_tree`."""
    path = _file_of(text, "plan")
    if path is None:
        return text
    data = read_mapping(path)
    if "tree" in data and "trees" not in data:  # the form of <run.dir>/plan.json: one tree for one number of devices
        data = {"name": data.get("name"), "trees": [stored_tree(data)]}
    data = {**data, "name": data.get("name") or path.stem, "file": str(path.resolve())}
    if not data.get("trees"):
        raise ConfigError(
            f"plan is {str(path)!r}, but the file has no `trees`: see configs/plan/collocated.yaml for the form"
        )
    try:
        node = OmegaConf.merge(OmegaConf.structured(PlanConfig), data)
    except OmegaConfBaseException as error:
        raise _explained(error, PlanConfig, str(path)) from error
    return _store_file("plan", _folder("plan", schema), path, node)


def stored_tree(data: Mapping[str, object]) -> dict[str, object]:
    """Returns the variant that a plan.json holds: a tree for its number of devices and no other."""
    number = data.get("num_devices", 1)
    return {"min_devices": number, "max_devices": number, "tree": data.get("tree")}


def _explained(error: Exception, schema: type, source: str) -> ConfigError:
    """Returns Hydra's or OmegaConf's error as one line; the reason for a wrong type sits in the cause only."""
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OmegaConfBaseException):
        reason = reason.__cause__ or reason.__context__
    if reason is None:
        first_lines = " ".join(line.strip() for line in str(error).splitlines()[:3])
        return ConfigError(f"{source} cannot be composed: {first_lines}")
    path = str(reason.full_key or source)
    known = keys(schema)
    kind = known.get(path) or _item_type(known.get(path.rpartition(".")[0]))
    message = str(reason.msg or reason).splitlines()[0]
    rule = f"it must be {_type_name(kind)}" if kind is not None else "the schema in rlinf_embodied/config/ forbids it"
    action = f"use {_example(kind)}" if kind is not None else _did_you_mean(path, list(known)).strip() or "mend the key"
    where = "" if source == "the command line" else f" in {source}"
    return ConfigError(f"{path} is {reason.value!r}{where}, but {rule} ({message}): {action}")


def _item_type(kind: object) -> object:
    """Returns the type of the values of a dict or list type, None for any other."""
    return typing.get_args(kind)[-1] if typing.get_origin(kind) in (dict, list) and typing.get_args(kind) else None


def _type_name(kind: object) -> str:
    names = getattr(kind, "__members__", None)
    if names is not None:
        return "one of " + ", ".join(names)
    return kind.__name__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)


def _example(kind: object) -> str:
    """Returns what a value of this type looks like on the command line."""
    names = getattr(kind, "__members__", None)
    if names is not None:
        return " or ".join(names)
    if is_dataclass(kind):
        names = ", ".join(entry.name for entry in fields(typing.cast(type, kind)))
        return f"<section>.<key>=<value> with one of its keys ({names}), or a choice where it is a group"
    origin = typing.get_origin(kind)
    if origin in (list, dict):
        return "a list such as [a,b]" if origin is list else "keys and values such as {a: 1}"
    samples = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
    return " or ".join(samples.get(arm, str(arm)) for arm in typing.get_args(kind) or (kind,))
