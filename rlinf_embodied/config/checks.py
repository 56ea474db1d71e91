"""The form of every check: path, value, rule, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rlinf_embodied.errors import CheckpointError, ConfigError


def require(holds: bool, path: str, value: object, rule: str, action: str) -> None:
    """Checks a value of the configuration.

    Args:
        holds: whether the rule is kept.
        path: of the value, for example "env.chunk".
        value: as given.
        rule: what it should be.
        action: what to do about it.

    Raises:
        ConfigError: it does not hold.
    """
    if not holds:
        raise ConfigError(f"{path} is {value!r}, but {rule}: {action}")


@contextmanager
def within(section: str) -> Iterator[None]:
    """Has what is refused within it named by its path in a section that holds others of the same form.

    Args:
        section: for example "hierarchy": "algorithm.gamma is 2.0, ..." becomes "hierarchy.algorithm.gamma is 2.0, ...";
            "" for none.

    Raises:
        ConfigError: the one that was raised, under that path.
        CheckpointError: likewise.
    """
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        named = re.sub(
            r"(?<![\w./])(?=(algorithm|policy)\.[\w.]+( is |=))", f"{section}." if section else "", str(error)
        )
        raise type(error)(named) from error
