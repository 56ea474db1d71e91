"""What the stages cost on real devices: a JSON file of measured seconds and bytes, and how it is read between points.

One stage of such a file (every name carries its unit; a loop's stage has s_per_chunk_step in the place of s_per_call):

    "actor": {"items_per_device": [32, 64], "devices": [1, 8],
              "s_per_call": [[10.0, 10.8], [19.5, 20.4]],              seconds, by items (rows) and devices (columns)
              "resident_bytes": [[5e10, 2e10], [5e10, 2e10]],          on each device, as long as the stage stays there
              "working_bytes": [[1e10, 1e10], [1.5e10, 1.5e10]],       beside that, while a call runs
              "parked_bytes": 1e9, "park_s": 2.0, "unpark_s": 2.0,     on the device once offloaded; the switch itself
              "cores_per_device": 2}
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlinf_embodied.cluster.hardware import Links
from rlinf_embodied.errors import ConfigError

FORMAT = "rlinf-profile/1"
Floats = NDArray[np.float64]

_STAGE_TABLES = ("s_per_call", "s_per_chunk_step", "resident_bytes", "working_bytes")
_STAGE_NUMBERS = ("parked_bytes", "park_s", "unpark_s", "cores_per_device", "bootstrap_fraction", "spread_s")
_STAGE_KEYS = (
    *_STAGE_TABLES,
    *_STAGE_NUMBERS,
    "items_per_device",
    "devices",
    "kind_factors",
    "finish_quantiles",
    "note",
)
_WEIGHT_KEYS = ("bytes", "export_s", "install_s")
_KEYS = (
    *("format", "name", "device_kind", "fingerprint", "workload", "sources", "stages"),
    *("edge_bytes_per_item", "weights", "links"),
)
_LINK_KEYS = ("within_node_bytes_per_s", "across_nodes_bytes_per_s", "latency_s")
_WORKLOAD_KEYS = ("workflow", "num_items", "items_per_block", "chunk_steps", "expected_rounds", "max_rounds")


def interpolate(x: ArrayLike, xs: Floats, ys: Floats) -> Floats:
    """Returns y at x: piecewise linear, by the last slope beyond the last point (never falling), constant below.

    Args:
        x: any shape [...].
        xs: ascending [n].
        ys: [n], or [n, m] for m curves; the result is [...] or [..., m].
    """
    x = np.asarray(x, dtype=float)
    if len(xs) == 1:
        return np.broadcast_to(ys[0], (*x.shape, *ys.shape[1:])).astype(float)
    right = np.clip(np.searchsorted(xs, x, side="left"), 1, len(xs) - 1)
    low, high = xs[right - 1], xs[right]
    share = np.maximum((x - low) / (high - low), 0.0)
    share = share.reshape(share.shape + (1,) * (ys.ndim - 1))
    value = ys[right - 1] + share * (ys[right] - ys[right - 1])
    beyond = (x > xs[-1]).reshape(share.shape)
    return np.where(beyond, np.maximum(value, ys[-1]), value)


@dataclass(frozen=True, slots=True)
class StageProfile:
    """Measurements of one stage; tables are [items_per_device, devices]."""

    name: str
    items_per_device: Floats
    devices: Floats
    seconds: Floats  # per call of a leaf, per chunk-step of a loop's stage
    resident_bytes: Floats
    working_bytes: Floats
    in_loop: bool
    parked_bytes: float = 0.0
    park_s: float = 0.0
    unpark_s: float = 0.0
    cores_per_device: float = 0.0
    bootstrap_fraction: float = 0.0  # a loop's last call (values only), as a share of a chunk-step
    kind_factors: Mapping[str, float] = field(default_factory=dict)  # how much longer it takes on other device kinds
    finish_quantiles: tuple[tuple[float, float], ...] = ()  # (share of items done, share of the call's time), ascending

    def _at(self, table: Floats, items: ArrayLike, devices: ArrayLike) -> Floats:
        items, devices = np.broadcast_arrays(np.asarray(items, float), np.asarray(devices, float))
        flat_items, flat_devices = items.ravel(), devices.ravel()
        by_device = interpolate(flat_items, self.items_per_device, table)  # [n, number of device counts]
        if len(self.devices) == 1:
            return by_device[:, 0].reshape(items.shape)
        right = np.clip(np.searchsorted(self.devices, flat_devices), 1, len(self.devices) - 1)
        rows = np.arange(len(flat_items))
        low, high = by_device[rows, right - 1], by_device[rows, right]
        span = self.devices[right] - self.devices[right - 1]
        share = np.maximum((flat_devices - self.devices[right - 1]) / span, 0.0)
        value = low + share * (high - low)
        beyond = flat_devices > self.devices[-1]
        return np.where(beyond, np.maximum(value, 0.0), value).reshape(items.shape)

    def call_s(self, items: ArrayLike, devices: ArrayLike) -> Floats:
        """Returns the seconds of a call (or chunk-step) with `items` per device on `devices` devices."""
        return self._at(self.seconds, items, devices)

    def resident(self, items: ArrayLike, devices: ArrayLike) -> Floats:
        """Returns the bytes on each device while the stage stays there and owns `items` per device."""
        return self._at(self.resident_bytes, items, devices)

    def working(self, items: ArrayLike, devices: ArrayLike) -> Floats:
        """Returns the bytes on each device beside the resident ones while a call with `items` per device runs."""
        return self._at(self.working_bytes, items, devices)

    def finish_share(self, share_of_items: ArrayLike) -> Floats:
        """Returns after which share of a call's time that share of its items is done (1 without a distribution)."""
        if not self.finish_quantiles:
            return np.ones_like(np.asarray(share_of_items, float))
        xs, ys = np.array(self.finish_quantiles, dtype=float).T
        return np.interp(np.asarray(share_of_items, float), xs, ys)


@dataclass(frozen=True, slots=True)
class WeightProfile:
    """What sending weights along a weight edge costs beside the wire."""

    bytes: float
    export_s: float = 0.0
    install_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The job that was measured: what a workflow is made for when only the profile is at hand."""

    workflow: str
    num_items: int
    items_per_block: int = 1
    chunk_steps: int = 1
    expected_rounds: float = 1.0
    max_rounds: int = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """All stages of a workflow on one kind of device."""

    name: str
    device_kind: str
    stages: Mapping[str, StageProfile]
    edge_bytes_per_item: Mapping[tuple[str, str], float] = field(default_factory=dict)
    weights: Mapping[tuple[str, str], WeightProfile] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    workload: Workload | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    links: Links | None = None  # of the machine that was measured; None: as the cluster says

    def rows(self) -> list[dict[str, str]]:
        """Returns a table to print: a row per stage and point of its grid."""
        return [
            {
                "stage": stage.name if (i, j) == (0, 0) else "",
                "items per device": f"{items:g}",
                "devices": f"{devices:g}",
                "s per": "chunk-step" if stage.in_loop else "call",
                "seconds": f"{stage.seconds[i, j]:.4g}",
                "resident MB": f"{stage.resident_bytes[i, j] / 1e6:.1f}",
                "working MB": f"{stage.working_bytes[i, j] / 1e6:.1f}",
            }
            for stage in self.stages.values()
            for i, items in enumerate(stage.items_per_device)
            for j, devices in enumerate(stage.devices)
        ]

    def require(self, stages: Iterable[str], loop_stages: Iterable[str] = ()) -> None:
        """Checks that every stage of a workflow was measured, in the way it is used.

        Raises:
            ConfigError: a stage is missing, or a loop's stage was measured per call (or the other way round).
        """
        inside = set(loop_stages)
        for stage in stages:
            if stage not in self.stages:
                raise ConfigError(
                    f"profile {self.name}: the workflow has the stage {stage!r}, but the profile holds only "
                    f"{sorted(self.stages)}: profile this workflow again"
                )
            if self.stages[stage].in_loop != (stage in inside):
                has, needs = ("s_per_call", "s_per_chunk_step")[:: 1 if stage in inside else -1]
                raise ConfigError(
                    f"profile {self.name}: stage {stage!r} has {has}, but the workflow uses it "
                    f"{'inside' if stage in inside else 'outside'} a loop, which needs {needs}: profile it again"
                )

    def require_fingerprint(self, fingerprint: Mapping[str, str]) -> None:
        """Checks that the profile was measured under the same conditions.

        Raises:
            ConfigError: names the entry that differs.
        """
        for key, value in fingerprint.items():
            if self.fingerprint.get(key) != value:
                raise ConfigError(
                    f"profile {self.name}: fingerprint.{key} is {self.fingerprint.get(key)!r}, but here it is "
                    f"{value!r}: profile the stages again on this machine and config"
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
    except json.JSONDecodeError as error:
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
    weights = _mapping(body.get("weights", {}), f"{path}.weights")
    edges = _mapping(body.get("edge_bytes_per_item", {}), f"{path}.edge_bytes_per_item")
    return Profile(
        name=str(body.get("name", path)),
        device_kind=str(body.get("device_kind", "cpu")),
        stages={name: _stage(name, entry, f"{path}.stages.{name}") for name, entry in stages.items()},
        edge_bytes_per_item={_ends(k, path): _number(v, f"{path}.edge_bytes_per_item.{k}") for k, v in edges.items()},
        weights={_ends(key, path): _weights(value, f"{path}.weights.{key}") for key, value in weights.items()},
        fingerprint={key: str(value) for key, value in _mapping(body.get("fingerprint", {}), path).items()},
        workload=None if workload is None else _workload(workload, f"{path}.workload"),
        sources={key: str(value) for key, value in _mapping(body.get("sources", {}), path).items()},
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
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{path}.{key} is {value!r}, but it is a whole number from 1: mend it")
        whole[key] = value
    rounds = _number(body.get("expected_rounds", 1.0), f"{path}.expected_rounds")
    return Workload(str(body["workflow"]), expected_rounds=rounds, **whole)


def _weights(data: object, path: str) -> WeightProfile:
    body = _mapping(data, path, _WEIGHT_KEYS)
    return WeightProfile(**{key: _number(body.get(key, 0.0), f"{path}.{key}") for key in _WEIGHT_KEYS})


def _ends(text: str, path: str) -> tuple[str, str]:
    source, arrow, target = (part.strip() for part in text.partition("->"))
    if not (source and arrow and target):
        raise ConfigError(f"{path}: the edge {text!r} has not the form 'source->target': mend it")
    return source, target


def _stage(name: str, data: object, path: str) -> StageProfile:
    body = _mapping(data, path, _STAGE_KEYS)
    timed = [key for key in ("s_per_call", "s_per_chunk_step") if key in body]
    if len(timed) != 1:
        raise ConfigError(f"{path} has {timed or 'no times'}, but one of s_per_call, s_per_chunk_step is needed")
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
        kind_factors={key: _number(value, f"{path}.kind_factors.{key}") for key, value in factors.items()},
        finish_quantiles=_quantiles(body.get("finish_quantiles", ()), f"{path}.finish_quantiles"),
        **{key: _number(body[key], f"{path}.{key}") for key in _STAGE_NUMBERS if key in body and key != "spread_s"},
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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"{path} is {value!r}, but seconds, bytes and cores are finite and not negative: measure again"
        )
    return float(value)


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
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path} is {value!r}, but it is a list of [share of items, share of time]: mend the profile")
    pairs = tuple((_number(items, path), _number(time, path)) for items, time in value)
    if pairs and (sorted(pairs) != list(pairs) or pairs[-1] != (1.0, 1.0)):
        raise ConfigError(f"{path} is {value!r}, but its pairs ascend and end at [1, 1]: mend the profile")
    return pairs
