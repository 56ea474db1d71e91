"""Dotted paths: how configs name what is imported only where it is needed."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.user_code import raised_by_user


def load_target(target: str) -> Callable[..., object]:
    """Returns the object at a dotted path, for example "envs.maniskill.ManiSkillEnv" (Hydra's `_target_`)."""
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def source_digest(target: str) -> str:
    """Returns the SHA-256 of the file in which the object at a dotted path is written; empty where it has none."""
    try:
        source = inspect.getsourcefile(load_target(target))  # pyright: ignore[reportArgumentType]
    except TypeError:
        return ""
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""


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
    found = _imported(target, path)
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


def _imported(target: str, path: str) -> Callable[..., object]:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module of the user's does while it is imported
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        told = None if missing else raised_by_user(error)
        if told is not None:
            raise ConfigError(f"{path} is {target!r}, but importing {module} raised {told}\nMend it there") from error
        said = f"{path} is {target!r}, but {module}"
        if isinstance(error, AttributeError):
            raise ConfigError(f"{said} has no {name} ({error}): correct the name") from error
        action = "put its folder on PYTHONPATH, which workers get as well" if missing else "mend that file"
        raise ConfigError(f"{said} cannot be imported ({error}): {action}") from error
