"""The files under configs/, and configs of runs as files."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.compose.explain import explained
from rlinf_embodied.config import ControlConfig, MathConfig
from rlinf_embodied.config.renamed import with_current_keys
from rlinf_embodied.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
FILE_SUFFIXES = (".yaml", ".yml", ".json")  # of a file that stands where a choice of a group could
_OWN = {MathConfig: "reasoning", ControlConfig: "control"}  # where a workflow has choices of its own
SWITCHES = {"run.exact": {True: "exact", False: "off"}}  # enumerations that also take true and false

_Config = TypeVar("_Config")


def choices(group: str, schema: type | None = None) -> list[str]:
    """Returns the names of the files of a config group, sorted; those of a schema's own where it has some."""
    return sorted(path.stem for path in (CONFIG_DIR / choice_folder(group, schema)).glob("*.yaml"))


def choice_folder(group: str, schema: type | None) -> str:
    """Returns the folder of a group's files below configs/: those of a workflow's own come first."""
    own = f"{_OWN.get(schema)}/{group}"
    return own if (CONFIG_DIR / own).is_dir() else group


def read_mapping(path: Path) -> dict[str, object]:
    """Returns the keys and values in a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read, is no valid YAML, or holds something else.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the path of an existing YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date like 2001-13-01
        where = " ".join(str(error).split())
        raise ConfigError(f"{path} is no valid YAML: mend the file ({where})") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}, but keys with values are needed: mend the file")
    return data


def to_yaml(config: object) -> str:
    """Returns a config (any dataclass of config/) as YAML; `load` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def load(path: Path, schema: type[_Config]) -> _Config:
    """Returns the config in a YAML file, such as the config.yaml of a run.

    Raises:
        ConfigError: the file cannot be read, or does not fit the schema.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), _switched(with_current_keys(read_mapping(path))))
        return typing.cast(_Config, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, OverflowError) as error:
        raise explained(error, schema, str(path)) from error


def _switched(data: dict[str, object]) -> dict[str, object]:
    """Returns the content of a file with names of enumerations in place of true and false."""
    for key, names in SWITCHES.items():
        section, _, name = key.partition(".")
        inside = data.get(section)
        if isinstance(inside, dict) and isinstance(inside.get(name), bool):
            data = {**data, section: {**inside, name: names[inside[name]]}}
    return data
