"""The `key=value` words of a command that composes no config: a dataclass has the keys, their types and defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

from rlinf_embodied.errors import ConfigError, RlinfError

_Case = TypeVar("_Case")
_Options = TypeVar("_Options")


def parse(options: type[_Options], words: Sequence[str]) -> tuple[_Options, list[str]]:
    """Returns (the options that words give, over their defaults; all other words).

    A field that is False by default may be given by its name alone.

    Raises:
        ConfigError: a value has not the type of its default.
    """
    defaults = {field.name: field.default for field in fields(options)}  # pyright: ignore[reportArgumentType]
    given, rest = {}, []
    for text in words:
        key, equals, value = text.partition("=")
        if key not in defaults or not (equals or defaults[key] is False):
            rest.append(text)
            continue
        kind = type(defaults[key])
        try:
            given[key] = value in ("", "true") if kind is bool else kind(value)
        except ValueError:
            raise ConfigError(
                f"{key} is {value!r}, but it must be a {kind.__name__}: use {key}={defaults[key]}"
            ) from None
    return options(**given), rest


def parse_all(options: type[_Options], words: Sequence[str], name: str, needed: Sequence[str] = ()) -> _Options:
    """Returns the options of a command that takes no other words.

    Args:
        options: a dataclass.
        words: of the command line.
        name: of the command, for errors.
        needed: options whose default is empty and will not do.

    Raises:
        ConfigError: there is another word, one that is needed is missing, or a value has not the type of its default.
    """
    found, unknown = parse(options, words)
    known = ", ".join(field.name for field in fields(options))  # pyright: ignore[reportArgumentType]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no argument of {name}: use some of {known}")
    for option in needed:
        if not getattr(found, option):
            raise ConfigError(f"{option} is missing: {name} needs {option}=..., and takes {known}")
    return found


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


def exit_code(command: Callable[[Sequence[str]], int], words: Sequence[str] | None = None) -> int:
    """Runs a command with the words of the command line; returns its exit code, 2 with one line where it fails.

    Args:
        command: takes words and returns an exit code.
        words: None: those after the script's name.
    """
    try:
        return command(sys.argv[1:] if words is None else words)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
