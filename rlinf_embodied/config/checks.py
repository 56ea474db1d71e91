"""Checks whose errors name the config path, the value, the rule and the next action."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from rlinf_embodied.errors import CheckpointError, ConfigError

_FINITE = sys.float_info.max  # the largest finite number


def require(holds: bool, path: str, value: object, rule: str, action: str) -> None:
    """Raises a ConfigError if `rule` does not hold for the value at a path such as "env.chunk"; names the remedy."""
    if not holds:
        raise ConfigError(f"{path} is {value!r}, but {rule}: {action}")


def require_numbers(
    section: Any, path: str, *names: str, low: float = 0, above: bool = False, high: float = _FINITE
) -> None:
    """Checks that numbers of a section are at least (or `above`) `low` and at most `high`; None passes."""
    rule = f"it must be at least {low}" if low else "it must be positive" if above else "it must not be negative"
    rule = rule if high >= _FINITE else f"it must lie in {'(' if above else '['}{low}, {high}]"
    for entry in fields(section):
        value = getattr(section, entry.name)
        if entry.name in names and value is not None:
            holds = (value > low if above else value >= low) and value <= high
            action = "leave it out" if entry.default is None else f"use {entry.default}"
            require(holds, f"{path}.{entry.name}".removeprefix("."), value, rule, action)


def require_one_of(section: Any, path: str, name: str, *choices: object) -> None:
    """Checks that the value `name` of a section is one of `choices`."""
    value, known = getattr(section, name), [str(choice) for choice in choices if choice is not None]
    rule = f"it is {', '.join(known[:-1])} or {known[-1]}"
    require(value in choices, f"{path}.{name}".removeprefix("."), value, rule, f"use {known[0]}")


def did_you_mean(word: str, names: Sequence[str], prefix: str = "") -> str:
    """Returns a question that suggests the name most similar to `word`; an empty text if none is similar."""
    close = difflib.get_close_matches(word, names, n=1)
    return f" did you mean {prefix}{close[0]}?" if close else ""


def by_dotted_key(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested sections: {"run": {"seed": 1}, "links": {}} gives {"run.seed": 1, "links": {}}."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        values |= by_dotted_key(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return values


@contextmanager
def within(section: str) -> Iterator[None]:
    """Prefixes the paths in errors raised inside the block with `section`, which has sections named like others.

    Within "hierarchy" the error "algorithm.gamma is 2.0, ..." becomes "hierarchy.algorithm.gamma is 2.0, ...".
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        prefix = f"{section}." if section else ""
        raise type(error)(re.sub(r"(?<![\w./])(?=(algorithm|policy)\.[\w.]+( is |=))", prefix, str(error))) from error
