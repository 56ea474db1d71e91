"""Plug-ins: what configs name by dotted paths, and errors that show the user's own lines."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rlinf_embodied.config import EnvConfig, EnvOptions
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError, RlinfError

_ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(_ROOT / name for name in ("rlinf_embodied", "envs", "policies", "experiments"))
_EXAMPLES = _ROOT / "experiments/examples"  # they are what a user would write
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SHOWN = 5  # frames
# keys whose values are dotted paths (env.options.adapter)
_NAMES_CODE = ("_target_", "critic_target", "model_target", "adapter")


def load_target(target: str) -> Callable[..., object]:
    """Returns the object at a dotted path, for example "envs.maniskill.ManiSkillEnv" (`_target_`).

    Raises:
        ConfigError: it is of Python's own library: a file from anywhere, such as a checkpoint, may name it.
    """
    module, _, name = target.rpartition(".")
    safe = module.partition(".")[0] not in sys.stdlib_module_names
    rule = "nothing of Python's own library is a plug-in"
    require(safe, "_target_", target, rule, "name a class of an installed package")
    return getattr(importlib.import_module(module), name)


def env_options(env: EnvConfig) -> EnvOptions:
    """Returns env.options as the env's module reads them; of an env without `read_options`, no options.

    Raises:
        ConfigError: an option is unknown or invalid.
    """
    module = importlib.import_module(env._target_.rpartition(".")[0])
    read = getattr(module, "read_options", None)
    options = None if read is None else read(env)
    return options if isinstance(options, EnvOptions) else EnvOptions()


def targets_of(section: object) -> Iterator[str]:
    """Yields the dotted paths of the code that a section names: env, its adapter, policy, critic, reward, algorithm."""
    if isinstance(section, Mapping):
        yield from (path for name in _NAMES_CODE if isinstance(path := section.get(name), str) and path)
        section = [*section.values()]
    for inner in section if isinstance(section, (list, tuple)) else ():
        yield from targets_of(inner)


def source_digest(targets: Iterable[str]) -> str:
    """Returns the SHA-256 of the modules, or whole packages, in which the objects at dotted paths are written."""
    places = set[Path]()
    for target in targets:
        top = importlib.util.find_spec(target.partition(".")[0])
        if top is not None and top.origin is not None:
            places.add(Path(top.origin).parent if top.submodule_search_locations else Path(top.origin))
    digest = hashlib.sha256()
    for place in sorted(places):
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.exists() else []:
            digest.update(f"{path.relative_to(place.parent)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def load_plug_in(target: str, path: str, *arguments: str) -> Callable[..., object]:
    """Returns a function or class of the user's that a config names by a dotted path.

    Args:
        target: for example "my_rewards.short_and_right".
        path: of the value in the config, for errors.
        arguments: names of what it will be called with, in order; none: anything.

    Raises:
        ConfigError: it cannot be imported or called so.
    """
    module, _, name = target.rpartition(".")
    require(bool(module), path, target, "it is a dotted path", "use <module>.<function>")
    call = f"{name} is called with ({', '.join(arguments)})"
    try:
        found = load_target(target)
    except ConfigError:
        raise
    except Exception as error:  # whatever a module of the user's does while it is imported
        raise ConfigError(
            f"{path} is {target!r}, but {module} cannot be imported ({raised_by_user(error) or error}): correct that, "
            "or put its folder on PYTHONPATH, which workers get as well"
        ) from error
    require(callable(found), path, target, call, "name a function or class")
    if not arguments:
        return found
    with suppress(ValueError):  # some built-in functions do not tell their parameters
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as error:
            raise ConfigError(f"{path} is {target!r}, but {call}, not so ({error}): change its parameters") from error
    return found


def raised_by_user(error: BaseException) -> str | None:
    """Returns what was raised and the user's lines that led there, None where none of them did.

    For example "KeyError: 'proprio', from\n  /home/me/my_mlp.py, line 41, in value: return self.critic(...)".
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame.filename)]
    if not frames:
        return None
    lines = [f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-_SHOWN:]]
    return "\n".join([f"{type(error).__name__}: {error}, from", *lines])


@contextmanager
def named_when_raised(refusal: Callable[[str], RlinfError]) -> Iterator[None]:
    """Answers what the user's code raises in the block with an error of ours; what we raise there stays as it is.

    Args:
        refusal: makes the error of the text of `raised_by_user`.

    Raises:
        RlinfError: the user's code raised.
    """
    try:
        yield
    except RlinfError:
        raise
    except Exception as error:
        users = raised_by_user(error)
        if users is None:
            raise
        raise refusal(users) from error


def _is_of_user(filename: str) -> bool:
    path = Path(filename).resolve()
    if not path.is_file() or path.is_relative_to(_EXAMPLES):
        return path.is_file()
    return not any(path.is_relative_to(folder) for folder in (*_OURS, *_LIBRARIES))
