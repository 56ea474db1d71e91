"""Where a task cannot take the batched route, stock envs take its place, and the reason is said once."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)

# What ManiSkill and SAPIEN were seen to raise while a task is built that cannot be (or not by the batched route).
BUILD_ERRORS = (RuntimeError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError, OSError)
BUILD_ERRORS += (ImportError,)

_UNSUPPORTED_MODE = "not in supported modes"  # in ManiSkill's assertion on control modes


def is_wrong_mode(error: Exception) -> bool:
    """Whether ManiSkill says that the robot has no such control mode, on whichever route."""
    return isinstance(error, AssertionError) and _UNSUPPORTED_MODE in str(error)


@cache
def _say(message: str) -> None:
    logger.warning(message)


def say_fallback(task_id: str, reason: Exception) -> None:
    """Says why stock envs are used, once per process and reason."""
    _say(
        f"{task_id} does not run on the batched CPU backend ({type(reason).__name__}: {reason}): one stock env object "
        "per row is used, which is slower"
    )
