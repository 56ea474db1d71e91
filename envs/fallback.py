"""What is said where a task cannot be built, or cannot take the batched route: stock envs then take its place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from rlinf_embodied.errors import ConfigError, SimulatorError

logger = logging.getLogger(__name__)

# What ManiSkill and SAPIEN were seen to raise while a task is built that cannot be (or not by the batched route).
BUILD_ERRORS = (RuntimeError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError, OSError)
BUILD_ERRORS += (ImportError,)


def is_wrong_mode(error: Exception) -> bool:
    """Whether ManiSkill says that the robot has no such control mode, on whichever route."""
    return isinstance(error, AssertionError) and "not in supported modes" in str(error)


@contextmanager
def explained(mode_path: str, attempt: str) -> Iterator[None]:
    """Within it, what ManiSkill raises while it builds a task becomes an error that says what was tried.

    Args:
        mode_path: where the control mode comes from.
        attempt: the task and its arguments, in words: "... cannot be built with ...".

    Raises:
        ConfigError: the robot has no such control mode.
        SimulatorError: anything else that ManiSkill raised.
    """
    try:
        yield
    except BUILD_ERRORS as error:
        if is_wrong_mode(error):
            raise ConfigError(f"{mode_path} is {error}: use one of these") from error
        raise SimulatorError(f"{attempt} ({type(error).__name__}: {error}): check these against the task") from error


@cache
def _say(message: str) -> None:
    logger.warning(message)


def say_fallback(task_id: str, reason: Exception) -> None:
    """Says why stock envs are used, once per process and reason."""
    _say(
        f"{task_id} does not run on the batched CPU backend ({type(reason).__name__}: {reason}): one stock env object "
        "per row is used, which is slower"
    )
