"""Profiles as JSON files of measured seconds and bytes: the format, and every check of it.

One stage of such a file (every name carries its unit; a loop's stage has s_per_chunk_step in the place of s_per_call):

    "actor": {"items_per_device": [32, 64], "devices": [1, 8],
              "s_per_call": [[10.0, 10.8], [19.5, 20.4]],              seconds, by items (rows) and devices (columns)
              "resident_bytes": [[5e10, 2e10], [5e10, 2e10]],          on each device, as long as the stage stays there
              "working_bytes": [[1e10, 1e10], [1.5e10, 1.5e10]],       beside that, while a call runs
              "parked_bytes": 1e9, "park_s": 2.0, "unpark_s": 2.0,     on the device once offloaded; the switch itself
              "cores_per_device": 2}                                   "stays": true, where it cannot be offloaded
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rlinf_embodied.cluster.hardware import Links
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.planning.profile import Floats, Profile, StageProfile, WeightProfile, Workload

_LARGEST = 1e30  # beyond any seconds and bytes; sums of such numbers stay finite
FORMAT = "rlinf-profile/1"

_STAGE_TABLES = ("s_per_call", "s_per_chunk_step", "resident_bytes", "working_bytes")
_FIELDS = {"parked_bytes": "offloaded_bytes", "park_s": "offload_s", "unpark_s": "onload_s"}  # by key of the file
_STAGE_NUMBERS = ("parked_bytes", "park_s", "unpark_s", "cores_per_device", "bootstrap_fraction", "spread_s")
_STAGE_KEYS = (
    *_STAGE_TABLES,
    *_STAGE_NUMBERS,
    "items_per_device",
    "devices",
    "kind_factors",
    "finish_quantiles",
    "stays",
    "note",
)
_WEIGHT_KEYS = ("bytes", "export_s", "install_s")
_KEYS = (
    *("format", "name", "device_kind", "fingerprint", "workload", "sources", "stages"),
    *("edge_bytes_per_item", "weights", "links", "disturbed"),
)
_LINK_KEYS = ("within_node_bytes_per_s", "across_nodes_bytes_per_s", "latency_s")
_WORKLOAD_KEYS = (
    "workflow",
    "num_items",
    "items_per_block",
    "chunk_steps",
    "expected_rounds",
    "max_rounds",
    "together",
    "every",
)


def load_profile(path: Path) -> Profile:
    """Returns the profile in a JSON file.

    Raises:
        ConfigError: the file cannot be read, or breaks a rule of the format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give the path of a profile") from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(f"{path} is no valid JSON ({error}): mend or measure it again") from error
    return parse_profile(data, str(path))


def parse_profile(data: object, path: str = "profile") -> Profile:
    """Returns the profile in plain data.

    Raises:
        ConfigError: names the key, its value and the rule.
    """
    body = _mapping(data, path, _KEYS)
    if body.get("format") != FORMAT:
        raise ConfigError(
            f"{path}.format is {body.get('format')!r}, but this version reads {FORMAT!r}: measure it again"
        )
    stages = body.get("stages")
    if not isinstance(stages, Mapping) or not stages:
        raise ConfigError(f"{path}.stages is {stages!r}, but a profile holds at least one stage: measure it again")
    workload = body.get("workload")
    names: Mapping[str, str] = {}
    weights = _mapping(body.get("weights", {}), f"{path}.weights")
    edges = _mapping(body.get("edge_bytes_per_item", {}), f"{path}.edge_bytes_per_item")
    return Profile(
        name=str(body.get("name", path)),
        device_kind=str(body.get("device_kind", "cpu")),
        stages={
            names.get(name, name): _stage(names.get(name, name), entry, f"{path}.stages.{name}")
            for name, entry in stages.items()
        },
        edge_bytes_per_item={
            _ends(k, path, names): _number(v, f"{path}.edge_bytes_per_item.{k}") for k, v in edges.items()
        },
        weights={_ends(key, path, names): _weights(value, f"{path}.weights.{key}") for key, value in weights.items()},
        fingerprint={key: str(value) for key, value in _mapping(body.get("fingerprint", {}), path).items()},
        workload=None if workload is None else _workload(workload, f"{path}.workload"),
        sources={key: str(value) for key, value in _mapping(body.get("sources", {}), path).items()},
        disturbed=_number(body.get("disturbed", 0.0), f"{path}.disturbed"),
        links=None if body.get("links") is None else _links(body["links"], f"{path}.links"),
    )


def _links(data: object, path: str) -> Links:
    return Links(**{key: _number(value, f"{path}.{key}") for key, value in _mapping(data, path, _LINK_KEYS).items()})


def _workload(data: object, path: str) -> Workload:
    body = _mapping(data, path, _WORKLOAD_KEYS)
    for key in ("workflow", "num_items"):
        if key not in body:
            raise ConfigError(f"{path}.{key} is missing, but a workload names its workflow and size: add it")
    whole: dict[str, int] = {}
    for key in body:
        value = body[key]
        if key in ("workflow", "expected_rounds"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise ConfigError(f"{path}.{key} is {value!r}, but it is a whole number from 1: mend it")
        whole["blocks_per_batch" if key == "together" else key] = value
    rounds = _number(body.get("expected_rounds", 1.0), f"{path}.expected_rounds")
    return Workload(str(body["workflow"]), expected_rounds=rounds, **whole)


def _weights(data: object, path: str) -> WeightProfile:
    body = _mapping(data, path, _WEIGHT_KEYS)
    return WeightProfile(**{key: _number(body.get(key, 0.0), f"{path}.{key}") for key in _WEIGHT_KEYS})


def _ends(text: str, path: str, names: Mapping[str, str]) -> tuple[str, str]:
    source, arrow, target = (part.strip() for part in text.partition("->"))
    if not (source and arrow and target):
        raise ConfigError(f"{path}: the edge {text!r} has not the form 'source->target': mend it")
    return names.get(source, source), names.get(target, target)


def _stage(name: str, data: object, path: str) -> StageProfile:
    body = _mapping(data, path, _STAGE_KEYS)
    timed = [key for key in ("s_per_call", "s_per_chunk_step") if key in body]
    if len(timed) != 1:
        raise ConfigError(
            f"{path} has {timed or 'no times'}, but one of s_per_call, s_per_chunk_step is needed: mend the profile"
        )
    items = _axis(body.get("items_per_device"), f"{path}.items_per_device")
    devices = _axis(body.get("devices"), f"{path}.devices")
    shape = (len(items), len(devices))
    tables = {
        key: _table(body.get(key), shape, f"{path}.{key}") for key in (timed[0], "resident_bytes", "working_bytes")
    }
    if len(items) == 1 and timed[0] == "s_per_call" and tables["s_per_call"].any():
        raise ConfigError(f"{path}.items_per_device is {items.tolist()}, but a slope needs two points: measure another")
    factors = _mapping(body.get("kind_factors", {}), f"{path}.kind_factors")
    return StageProfile(
        name=name,
        items_per_device=items,
        devices=devices,
        seconds=tables[timed[0]],
        resident_bytes=tables["resident_bytes"],
        working_bytes=tables["working_bytes"],
        in_loop=timed[0] == "s_per_chunk_step",
        stays=_flag(body.get("stays", False), f"{path}.stays"),
        kind_factors={key: _number(value, f"{path}.kind_factors.{key}") for key, value in factors.items()},
        finish_quantiles=_quantiles(body.get("finish_quantiles", ()), f"{path}.finish_quantiles"),
        **{
            _FIELDS.get(key, key): _number(body[key], f"{path}.{key}")
            for key in _STAGE_NUMBERS
            if key in body and key != "spread_s"
        },
    )


def _mapping(data: object, path: str, known: tuple[str, ...] = ()) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} is {data!r}, but keys with values are needed: mend the profile")
    for key in data if known else ():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f" did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{path}.{key} is unknown:{hint} times are in seconds (_s, s_per_...) and sizes in bytes (_bytes), and "
                f"the keys are {', '.join(known)}"
            )
    return data


def _number(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        raise ConfigError(
            f"{path} is {value!r}, but seconds, bytes and cores are finite and not negative: measure again"
        )
    return float(value)


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{path} is {value!r}, but it is true or false: mend the profile")
    return value


def _axis(value: object, path: str) -> Floats:
    numbers = [_number(v, path) for v in value] if isinstance(value, (list, tuple)) else []
    if not numbers or numbers[0] <= 0 or any(a >= b for a, b in itertools.pairwise(numbers)):
        raise ConfigError(f"{path} is {value!r}, but it is an ascending list of positive numbers: mend the profile")
    return np.array(numbers)


def _table(value: object, shape: tuple[int, int], path: str) -> Floats:
    """Returns a table of that shape; one number stands for a constant, nothing for zeros."""
    if value is None or isinstance(value, (int, float)):
        return np.full(shape, _number(value or 0.0, path))
    rows = value if isinstance(value, (list, tuple)) else []
    if len(rows) != shape[0] or any(not isinstance(row, (list, tuple)) or len(row) != shape[1] for row in rows):
        raise ConfigError(
            f"{path} is {value!r}, but it is a table of {shape[0]} rows (items_per_device) and {shape[1]} columns "
            "(devices): mend the profile"
        )
    return np.array([[_number(cell, path) for cell in row] for row in rows])


def _quantiles(value: object, path: str) -> tuple[tuple[float, float], ...]:
    listed = isinstance(value, (list, tuple))
    if not listed or any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in value):
        raise ConfigError(f"{path} is {value!r}, but it is a list of [share of items, share of time]: mend the profile")
    pairs = tuple((_number(items, path), _number(time, path)) for items, time in value)
    if pairs and (sorted(pairs) != list(pairs) or pairs[-1] != (1.0, 1.0)):
        raise ConfigError(f"{path} is {value!r}, but its pairs ascend and end at [1, 1]: mend the profile")
    return pairs
