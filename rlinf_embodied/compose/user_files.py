"""Choices of groups that are no files under configs/: an env, a policy or a plan in a file of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_embodied.compose.explain import explained
from rlinf_embodied.compose.files import FILE_SUFFIXES, choice_folder, read_mapping
from rlinf_embodied.compose.overrides import parsed
from rlinf_embodied.config import PlanConfig
from rlinf_embodied.errors import ConfigError


def stored_section(text: str, group: str, schema: type) -> str:
    """Makes a file a choice of the group: `env=my/robot.yaml` is stored and becomes `env=file_robot`."""
    path = _file_of(text, group)
    if path is None:
        return text
    try:
        node = OmegaConf.merge(OmegaConf.structured(schema), read_mapping(path))
    except OmegaConfBaseException as error:
        raise explained(error, schema, str(path)) from error
    return _store_file(group, group, path, node)


def stored_plan(text: str, schema: type) -> str:
    """Makes a plan file a choice of the group: `plan=my/plan.yaml` is stored and becomes `plan=file_plan`."""
    path = _file_of(text, "plan")
    if path is None:
        return text
    data = read_mapping(path)
    if "items" in data and "variants" not in data:  # the form of <run.dir>/plan.json: for one number of devices
        data = {"name": data.get("name"), "variants": [stored_variant(data)]}
    data = {**data, "name": data.get("name") or path.stem, "file": str(path.resolve())}
    if not data.get("variants"):
        raise ConfigError(
            f"plan is {str(path)!r}, but the file has neither `items` nor `variants`: see configs/plan/collocated.yaml for the form"
        )
    try:
        node = OmegaConf.merge(OmegaConf.structured(PlanConfig), data)
    except OmegaConfBaseException as error:
        raise explained(error, PlanConfig, str(path)) from error
    return _store_file("plan", choice_folder("plan", schema), path, node)


def stored_variant(data: Mapping[str, object]) -> dict[str, object]:
    """Returns the variant that a plan.json holds: items for its number of devices and no other."""
    number = data.get("num_devices", 1)
    variant: dict[str, object] = {"min_devices": number, "max_devices": number, "items": data.get("items")}
    return variant | {key: data[key] for key in ("exclusive", "staleness") if key in data}


def _file_of(text: str, group: str) -> Path | None:
    """Returns the file that is given where a choice of a group could stand, None where there is none."""
    value = parsed(text).value() if text.startswith(f"{group}=") else None
    if not isinstance(value, str) or not (value.endswith(FILE_SUFFIXES) or "/" in value):
        return None
    return Path(value).expanduser()


def _store_file(group: str, folder: str, path: Path, node: object) -> str:
    name = "file_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in path.stem)
    ConfigStore.instance().store(group=folder, name=name, node=node)
    return f"{group}={name}"
