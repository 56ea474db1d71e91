"""Dotted paths: how configs name what is imported only where it is needed."""

from __future__ import annotations

import importlib
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError

_ROOT = Path(__file__).resolve().parent.parent
_NOT_THEIRS = (  # code whose frames tell the author of a plug-in nothing
    *(str(_ROOT / name) for name in ("rlinf_embodied", "envs", "policies")),
    *(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")),
)


def load_target(target: str) -> Callable[..., object]:
    """Returns the object at a dotted path, for example "envs.maniskill.ManiSkillEnv" (Hydra's `_target_`)."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def load_plug_in(target: str, path: str, *arguments: str) -> Callable[..., object]:
    """Returns a function or class of the user's that a config names by a dotted path.

    Args:
        target: for example "my_rewards.short_and_right".
        path: of the value in the config, for errors.
        arguments: names of what it will be called with, in order.

    Raises:
        ConfigError: it cannot be imported or called so.
    """
    module, _, name = target.rpartition(".")
    require(bool(module), path, target, "it is a dotted path", "use <module>.<function>")
    try:
        found = load_target(target)
    except ImportError as error:
        raise ConfigError(
            f"{path} is {target!r}, but {module} cannot be imported ({error}): put its folder on PYTHONPATH, which "
            "workers get as well"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{path} is {target!r}, but {module} has no {name} ({error}): correct the name") from error
    require(
        callable(found), path, target, f"{name} is called with ({', '.join(arguments)})", "name a function or class"
    )
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{path} is {target!r}, but {name} is called with ({', '.join(arguments)}), which it does not take "
            f"({error}): change its parameters"
        ) from error
    except ValueError:  # some built-in functions do not tell their parameters
        pass
    return found


def told(error: Exception) -> str:
    """Returns what a plug-in raised, with the lines of its author's own files on the way there, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not str(Path(frame.filename).resolve()).startswith(_NOT_THEIRS)]
    lines = [f"\n  {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}" for frame in theirs]
    return f"{type(error).__name__}: {error}{''.join(lines)}"
