"""Compares a run's configuration with the defaults of its command and with other runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from rlinf_embodied.compose import compose_math, compose_train, to_yaml
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.runs import Run

_COMPOSERS: dict[str, Callable[[], object]] = {  # by a section that only this command has
    "generation": lambda: compose_math([]),
    "env": lambda: compose_train([]),
}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns a value, as text, for each dotted key: {"run": {"seed": 1}} gives {"run.seed": "1"}."""
    found: dict[str, str] = {}
    for key, value in config.items():
        inside = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": _text(value)}
    return found


def _text(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def defaults(run: Run) -> dict[str, str] | str:
    """Returns the configuration of the run's command without any override, or why it cannot be determined."""
    compose = next((compose for section, compose in _COMPOSERS.items() if section in run.config), None)
    if compose is None:
        return "config.yaml is missing, or of no command that is known"
    try:
        return flat(yaml.safe_load(to_yaml(compose())))
    except ConfigError as error:
        return f"the defaults cannot be made: {error}"


def changed(config: Mapping[str, str], usual: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns (value, default) of the keys that both have and that differ."""
    return {key: (value, usual[key]) for key, value in config.items() if usual.get(key, value) != value}


def alike(runs: Sequence[Run]) -> bool:
    """Returns whether all runs have the same keys."""
    return len({frozenset(flat(run.config)) for run in runs}) == 1


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the values, run by run, of the keys that all runs have and that differ, except the run folder."""
    configs = [flat(run.config) for run in runs]
    shared = [key for key in configs[0] if key != "run.dir" and all(key in config for config in configs)]
    table = {key: [config[key] for config in configs] for key in shared}
    return {key: values for key, values in table.items() if len(set(values)) > 1}
