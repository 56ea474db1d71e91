"""One override of the command line, such as `env.num_envs=8`: read, and checked against the schema."""

from __future__ import annotations

import functools
import typing
from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from rlinf_embodied.compose.explain import did_you_mean, keys, unknown_key
from rlinf_embodied.compose.files import SWITCHES, choice_folder, choices
from rlinf_embodied.config import ControlConfig, TrainConfig
from rlinf_embodied.config.renamed import require_current, require_current_choice
from rlinf_embodied.errors import ConfigError

# keys whose values are places of files: a name may hold anything, with quotes around it or without
PATH_KEYS = (
    "hierarchy.checkpoint",
    *("run.dir", "resume", "checkpoint", "env", "policy", "plan", "plan.file", "plan.profile"),
    *("policy.folder", "out", "data", "sft.checkpoint"),
    *("warm_start.checkpoint", "warm_start.demonstrations", "warm_start.teacher", "warm_start.cache_dir"),
)


ALIASES = {"env.id": "env.task"}  # what others call a key, as Gymnasium its envs


def spelled(text: str) -> str:
    """Returns an override under the key's own name, where an alias was given."""
    key, assigned, value = text.partition("=")
    return f"{ALIASES.get(key, key)}{assigned}{value}"


@functools.cache  # Hydra's grammar takes a millisecond, and each check reads the override anew
def parsed(text: str) -> Override:
    """Returns an override as Hydra reads it.

    Raises:
        ConfigError: it has not the form key=value, or holds signs that have to be quoted.
    """
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"{text!r} cannot be read as an override, which has the form key=value: "
            "quote values with spaces, commas, '=' or brackets, as in 'key=\"a, b\"'"
        ) from error


def readable(text: str) -> str:
    """Returns an override that Hydra can read: a path with signs that mean something to Hydra is quoted."""
    key, assigned, path = text.partition("=")
    if not assigned or not (key in PATH_KEYS or key.startswith("data.files.")):
        return text
    if "${" in path:
        raise ConfigError(f"{key} is {path!r}, but '${{' begins a reference to another key: rename the file or folder")
    try:
        value = parsed(text).value()
    except ConfigError:
        value = ()  # no text: Hydra does not know a sign
    return (
        text if value is None or isinstance(value, str) else f"{key}={QuotedString(path, Quote.single).with_quotes()}"
    )


def checked_override(text: str, schema: type, groups: Sequence[str]) -> str:
    """Returns an override that names something; free-form keys (`dict` fields) get Hydra's sign for a new key."""
    override = parsed(text)
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
        require_current(key)
        raise unknown_key(key, known, groups)
    if override.is_delete():
        raise ConfigError(f"{text} deletes {key}, but every key has a value: set {key}=<value> instead")
    value = override.value()
    return f"{key}={SWITCHES[key][value]}" if key in SWITCHES and isinstance(value, bool) else text


def placed(text: str, schema: type, groups: Sequence[str]) -> str:
    """Returns a choice such as algorithm=ppo with the folder in which the schema's own choices lie."""
    group, _, choice = text.partition("=")
    folder = choice_folder(group, schema)
    return text if group not in groups or folder == group else f"{folder}@{group}={choice}"


def _check_choice(group: str, value: object, schema: type) -> None:
    """Raises where a group has no such choice; those of the store (plan files, checkpoints) count as well."""
    names = choices(group, schema)
    stored: typing.Any = ConfigStore.instance().repo
    for part in choice_folder(group, schema).split("/"):
        stored = stored.get(part, {})
    if isinstance(value, str) and (value in names or f"{value}.yaml" in stored):
        return
    require_current_choice(group, str(value))
    takes_files = group in ("plan", "env") or (group == "policy" and schema in (TrainConfig, ControlConfig))
    files = ", or a path to a .yaml file" if takes_files else ""
    hint = f"one of configs/{choice_folder(group, schema)}{files}"
    generic = " (any ManiSkill task: env=maniskill env.task=<id>)" if group == "env" else ""
    raise ConfigError(
        f"{group} is {value!r}, but it must be {hint}:{did_you_mean(str(value), names, f'{group}=')} "
        f"choose from {', '.join(names)}{generic}"
    )
