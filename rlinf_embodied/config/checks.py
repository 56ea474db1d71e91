"""The form of every check: path, value, rule, and what to do next."""

from __future__ import annotations

from rlinf_embodied.errors import ConfigError


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
