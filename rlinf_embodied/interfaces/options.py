"""Options of a plug-in, which declares them as a dataclass: settings that this project does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.config.checks import did_you_mean
from rlinf_embodied.errors import ConfigError

_Options = TypeVar("_Options")


@dataclass(kw_only=True, slots=True)
class NoOptions:
    """Options of a plug-in without any: every name is refused."""


def typed(options: Mapping[str, Any], kind: type[_Options], path: str) -> _Options:
    """Returns the options at `path` of the config as a `kind`, with its defaults for omitted ones.

    Raises:
        ConfigError: a name is unknown, or a value has another type or is refused; the message names its path.
    """
    if options and not fields(kind):  # pyright: ignore[reportArgumentType] - a dataclass
        name, value = next(iter(options.items()))
        rule = "there are no options here: leave it out, or name a dataclass as options_type of the class"
        raise ConfigError(f"{path}.{name} is {value!r}, but {rule}")
    known = [each.name for each in fields(kind)]  # pyright: ignore[reportArgumentType] - a dataclass
    for name in options:
        if name not in known:
            action = did_you_mean(name, known, f"{path}.") or f" use one of {', '.join(known)}"
            raise ConfigError(f"{path}.{name} is {options[name]!r}, but there is no such option:{action}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), dict(options))
        return cast(_Options, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        key = f"{path}.{error.full_key}" if error.full_key else path
        value = OmegaConf.select(OmegaConf.create(dict(options)), str(error.full_key or ""), default=None)
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key} is {value!r}, but {reason}: see {kind.__module__}.{kind.__name__}") from error
