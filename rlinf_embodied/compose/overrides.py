"""One `key=value` of the command line: read by the type of its key, and checked against the schema.

A text is taken as it stands, so that a path may hold any character; quotes around it are removed.  Every other value is
YAML: `3`, `1e-3`, `true`, `null`, `[a,b]`, `{a: 1}`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf

from rlinf_embodied.compose.explain import keys, unknown_key
from rlinf_embodied.errors import ConfigError

_Case = TypeVar("_Case")
_ALIASES = {"env.id": "env.task"}  # Gymnasium's name
SWITCHES = {"run.exact": {"true": "exact", "false": "off"}}  # enumerations that also take true and false


def read_override(text: str, schema: type, groups: Sequence[str]) -> tuple[str, Any]:
    """Returns key and value of an override such as `env.num_envs=8`; the name of a flag alone stands for true.

    Raises:
        ConfigError: the key is unknown, or the value cannot be read.
    """
    key, assigned, value = text.partition("=")
    key = _ALIASES.get(key.strip(), key.strip())
    if key in groups:
        return key, _unquoted(value)
    known = keys(schema)
    kind = type_of(key, known)
    if kind is None:
        raise unknown_key(key, known, groups)
    if not assigned:
        if kind is bool:
            return key, True
        raise ConfigError(f"{text!r} has no value: use {key}=<value>")
    return key, _value(key, value, kind)


def names_of(text: str) -> list[str]:
    """Returns the names of a list such as "a,b"; none for an empty text."""
    return [name for name in text.split(",") if name]


def chosen(names: str, cases: Mapping[str, _Case], option: str = "cases") -> dict[str, _Case]:
    """Returns the cases of a list such as "serial,collocated-2", all of them for an empty one.

    Raises:
        ConfigError: there is no such case.
    """
    wanted = names_of(names) or list(cases)
    for name in wanted:
        if name not in cases:
            raise ConfigError(f"{option} has {name!r}, but there are {', '.join(cases)}: use some of these")
    return {name: cases[name] for name in wanted}


def type_of(key: str, known: Mapping[str, object]) -> object:
    """Returns the type of a key, None if the schema has no such key; a mapping takes any key below its own."""
    if key in known:
        return known[key]
    open_key = next((k for k, kind in known.items() if key.startswith(f"{k}.") and typing.get_origin(kind) is dict), "")
    return typing.get_args(known[open_key])[1] if open_key else None


def _value(key: str, value: str, kind: object) -> Any:
    arms = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value == "null" and type(None) in arms:
        return None
    if str in arms and len([arm for arm in arms if arm is not type(None)]) == 1:
        return _unquoted(value)
    if any(hasattr(arm, "__members__") for arm in arms):
        return SWITCHES.get(key, {}).get(value.lower(), _unquoted(value))
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        return typing.cast(dict, read)["value"]
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{key} is {value!r}, which cannot be read ({why}): lists are [a,b], mappings {{a: 1}}"
        ) from error


def _unquoted(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value
