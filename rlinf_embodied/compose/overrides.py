"""One `key=value` of the command line: read by the type of its key, checked against the schema; errors for wrong ones.

A text is taken as it stands, so that a path may hold any character; quotes around it are removed.  Every other value is
YAML: `3`, `1e-3`, `true`, `null`, `[a,b]`, `{a: 1}`.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from rlinf_embodied.config.checks import did_you_mean
from rlinf_embodied.errors import ConfigError

_ALIASES = {"env.id": "env.task"}  # Gymnasium's name
_SWITCHES = {"run.exact": {"true": "exact", "false": "off"}}  # enumerations that also take true and false


def split_override(text: str) -> tuple[str, str]:
    """Returns key and text of an override such as `env.num_envs=8`, without quotes around the text."""
    key, _, value = text.partition("=")
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return _ALIASES.get(key.strip(), key.strip()), value[1:-1] if quoted else value


def read_override(text: str, known: Mapping[str, object], groups: Sequence[str]) -> tuple[str, Any]:
    """Returns key and value of an override; `known` are the types of all keys.

    Raises:
        ConfigError: the key is unknown, or the value cannot be read.
    """
    (key, value), raw = split_override(text), text.partition("=")[2]
    if key in groups:
        return key, value
    open_key = next((k for k, kind in known.items() if key.startswith(f"{k}.") and typing.get_origin(kind) is dict), "")
    kind = known.get(key) or (typing.get_args(known[open_key])[1] if open_key else None)
    if kind is None:
        raise _unknown_key(key, known, groups)
    if "=" not in text:
        raise ConfigError(f"{text!r} has no value: use {key}=<value>")
    arms = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if raw == "null" and type(None) in arms:
        return key, None
    if [arm for arm in arms if arm is not type(None)] == [str]:
        return key, value
    if any(hasattr(arm, "__members__") for arm in arms):
        return key, _SWITCHES.get(key, {}).get(value.lower(), value)
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={raw}"]))
        return key, typing.cast(dict, read)["value"]
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{key} is {value!r}, which cannot be read ({why}): lists are [a,b], mappings {{a: 1}}"
        ) from error


@functools.cache  # each override is looked up, and reading the types of all sections takes milliseconds
def keys(schema: type) -> Mapping[str, object]:
    """Returns every key of a schema by its dotted path, with its type; sections are included."""
    return types.MappingProxyType(dict(_walk(schema, "")))


def _walk(schema: type, prefix: str) -> Iterator[tuple[str, object]]:
    hints = typing.get_type_hints(schema)
    for entry in fields(schema):
        kind = hints[entry.name]
        yield prefix + entry.name, kind
        if is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), f"{prefix}{entry.name}.")


def _unknown_key(key: str, known: Mapping[str, object], groups: Sequence[str]) -> ConfigError:
    """Returns the error for a key that no schema has; it suggests a similar key and lists those of its section."""
    section = key.rpartition(".")[0]
    while section and not is_dataclass(known.get(section)):
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    inside = [k.removeprefix(prefix) for k in known if k.startswith(prefix) and "." not in k.removeprefix(prefix)]
    same_leaf = [k for k in known if "." in k and k.rpartition(".")[2] == key.rpartition(".")[2]]
    guess = f" did you mean {same_leaf[0]}?" if same_leaf else did_you_mean(key, [*known, *groups])
    return ConfigError(
        f"{key} is unknown: keys are checked against the schemas in rlinf_embodied/config/;{guess} "
        f"{section or 'the top level'} has {', '.join(inside)}"
    )


def explained(error: Exception, known: Mapping[str, object], source: str) -> ConfigError:
    """Returns OmegaConf's error as one line; the reason for a wrong type is in the exception's cause only."""
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OmegaConfBaseException):
        reason = reason.__cause__ or reason.__context__
    if reason is None:
        first_lines = " ".join(line.strip() for line in str(error).splitlines()[:3])
        return ConfigError(f"{source} cannot be composed ({first_lines}): correct it")
    path = str(reason.full_key or source)
    if isinstance(reason, MissingMandatoryValue):
        where = "the command" if source == "the command line" else source
        return ConfigError(f"{path} is not given, but {where} needs it: give {path}=<value>")
    message, where = str(reason.msg or reason).splitlines()[0], "" if source == "the command line" else f" in {source}"
    section = known.get(path.rpartition(".")[0])  # a list or dict that contains it, or a dataclass
    kind = known.get(path) or (typing.get_args(section) or (None,))[-1]
    if kind is None:
        action = did_you_mean(path, list(known)).strip() or "correct or remove the key"
        value = "given" if reason.value is None else repr(reason.value)  # OmegaConf does not keep an unknown key's
        return ConfigError(f"{path} is {value}{where}, but no schema has it ({message}): {action}")
    members = getattr(kind, "__members__", None)
    plain = isinstance(kind, type) and typing.get_origin(kind) is None
    name = f"one of {', '.join(members)}" if members else typing.cast(type, kind).__name__ if plain else str(kind)
    return ConfigError(f"{path} is {reason.value!r}{where}, but it must be {name} ({message}): give such a value")
