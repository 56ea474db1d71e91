"""What a wrong key or value is answered with: its path, the rule and the next action, in one line."""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.errors import ConfigError


def keys(schema: type) -> dict[str, object]:
    """Returns every key of a schema by its dotted path, with its type; sections are included."""
    return dict(_keys(schema))


@functools.cache  # each override is looked up, and reading the types of all sections takes milliseconds
def _keys(schema: type) -> tuple[tuple[str, object], ...]:
    return tuple(_walk(schema, ""))


def _walk(schema: type, prefix: str) -> Iterator[tuple[str, object]]:
    hints = typing.get_type_hints(schema)
    for entry in fields(schema):
        kind = hints[entry.name]
        yield prefix + entry.name, kind
        if is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), f"{prefix}{entry.name}.")


def unknown_key(key: str, known: Mapping[str, object], groups: Sequence[str]) -> ConfigError:
    """Returns the error of a key that no schema has: the likeliest one meant, and what its section has."""
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


def did_you_mean(word: str, names: Sequence[str], prefix: str = "") -> str:
    """Returns a question with the name nearest to a word; an empty text where none is near."""
    close = difflib.get_close_matches(word, names, n=1)
    return f" did you mean {prefix}{close[0]}?" if close else ""


def explained(error: Exception, schema: type, source: str) -> ConfigError:
    """Returns OmegaConf's error as one line; the reason for a wrong type sits in the cause only."""
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OmegaConfBaseException):
        reason = reason.__cause__ or reason.__context__
    if reason is None:
        first_lines = " ".join(line.strip() for line in str(error).splitlines()[:3])
        if isinstance(error, OverflowError):  # of a key for numbers that may have a fraction
            first_lines += ": use a number that a float holds, such as 1e6"
        return ConfigError(f"{source} cannot be composed: {first_lines}")
    path = str(reason.full_key or source)
    known = keys(schema)
    kind = known.get(path) or _item_type(known.get(path.rpartition(".")[0]))
    message = str(reason.msg or reason).splitlines()[0]
    rule = f"it must be {_type_name(kind)}" if kind is not None else "the schema in rlinf_embodied/config/ forbids it"
    neighbour = did_you_mean(path, list(known)).strip() or "correct the key"
    action = neighbour if kind is None else f"use {_example(kind)}"
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
