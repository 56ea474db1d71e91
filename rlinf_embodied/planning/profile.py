"""Profiles: measured seconds, bytes and memory of a workflow's stages, their JSON form, and its checks.

One stage of a file (a loop's stage has s_per_chunk_step instead of s_per_call; a number stands for a constant table):

    "actor": {"items_per_device": [32, 64], "devices": [1, 8],
              "s_per_call": [[10.0, 10.8], [19.5, 20.4]],            by items (rows) and devices (columns)
              "resident_bytes": [[5e10, 2e10], [5e10, 2e10]],        on each device while the stage is loaded
              "shared_bytes": 1.4e10,                                the part it shares with a weight edge's other end
              "working_bytes": [[1e10, 1e10], [1.5e10, 1.5e10]],     on top, while a call runs
              "offloaded_bytes": 1e9, "offload_s": 2.0, "onload_s": 2.0, "cores_per_device": 2}
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config.checks import did_you_mean
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in
from rlinf_embodied.workflow.graph import Workflow

Floats = NDArray[np.float64]
Ends = tuple[str, str]  # of an edge
Value = TypeVar("Value")
FORMAT = "rlinf-profile/2"
_LARGEST = 1e30  # beyond any seconds and bytes; sums of such numbers stay finite
_TABLES = ("seconds", "resident_bytes", "working_bytes")


def interpolate(x: float, xs: Floats, ys: Floats) -> float:
    """Returns y at x, from ascending xs [n] and ys [n].

    It is piecewise linear, by the last slope beyond the last point (never falling), and constant below the first.
    """
    if len(xs) == 1:
        return float(ys[0])
    right = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    share = max((x - xs[right - 1]) / (xs[right] - xs[right - 1]), 0.0)
    value = ys[right - 1] + share * (ys[right] - ys[right - 1])
    return float(max(value, ys[-1]) if x > xs[-1] else value)


@dataclass(frozen=True, slots=True)
class StageProfile:
    """Measurements of one stage; tables are [items_per_device, devices], and a number stands for a constant one.

    Raises:
        ConfigError: a number is not finite or is negative, or an axis or table has the wrong shape.
    """

    name: str
    in_loop: bool
    seconds: Floats  # per call, or per chunk-step of a loop's stage
    items_per_device: Floats
    devices: Floats
    resident_bytes: Floats
    working_bytes: Floats
    stays: bool = False  # it cannot be offloaded
    shared_bytes: float = 0.0  # part of resident_bytes that a worker with both ends of a weight edge holds once
    offloaded_bytes: float = 0.0  # that stay on the device while it is offloaded
    offload_s: float = 0.0
    onload_s: float = 0.0
    cores_per_device: float = 0.0
    bootstrap_fraction: float = 0.0  # a loop's last call (values only), as a share of a chunk-step
    kind_factors: Mapping[str, float] = field(default_factory=dict)  # time on other kinds of devices, relative to this
    finish_quantiles: tuple[tuple[float, float], ...] = ()  # (share of items done, share of the call's time), ascending

    def __post_init__(self) -> None:
        path = f"stages.{self.name}"
        for entry in fields(self):
            _check(str(entry.type), getattr(self, entry.name), f"{path}.{entry.name}")
        for axis in ("items_per_device", "devices"):
            numbers = _numbers(getattr(self, axis), f"{path}.{axis}")
            if numbers.ndim != 1 or not numbers.size or numbers[0] <= 0 or (np.diff(numbers) <= 0).any():
                _refuse(f"{path}.{axis}", getattr(self, axis), "an ascending list of positive numbers")
            object.__setattr__(self, axis, numbers)
        shape = (len(self.items_per_device), len(self.devices))
        for name in _TABLES:
            key = f"{path}.{self.time_key if name == 'seconds' else name}"
            table = _numbers(getattr(self, name), key)
            if table.ndim and table.shape != shape:
                rule = f"a table of {shape[0]} rows (items_per_device) and {shape[1]} columns (devices)"
                _refuse(key, getattr(self, name), rule)
            object.__setattr__(self, name, np.broadcast_to(table, shape))
        if shape[0] == 1 and not self.in_loop and self.seconds.any():
            raise ConfigError(f"{path}.items_per_device is {self.items_per_device}, but a slope needs two points")
        for kind, factor in _mapping(self.kind_factors, f"{path}.kind_factors").items():
            _check("float", factor, f"{path}.kind_factors.{kind}")
        pairs = _numbers(self.finish_quantiles, f"{path}.finish_quantiles")
        if pairs.size and (pairs.shape[1:] != (2,) or (np.diff(pairs, axis=0) < 0).any() or (pairs[-1] != 1).any()):
            rule = "a list of ascending pairs [share of items, share of time] that end at [1, 1]"
            _refuse(f"{path}.finish_quantiles", self.finish_quantiles, rule)
        object.__setattr__(self, "finish_quantiles", tuple(map(tuple, pairs.tolist())))

    @property
    def time_key(self) -> str:
        return "s_per_chunk_step" if self.in_loop else "s_per_call"

    def _at(self, table: Floats, items: float, devices: float) -> float:
        if len(self.devices) == 1:
            return interpolate(items, self.items_per_device, table[:, 0])
        at = max(devices, float(self.devices[0]))
        right = min(max(bisect.bisect_left(self.devices, at), 1), len(self.devices) - 1)
        low, high = (interpolate(items, self.items_per_device, table[:, column]) for column in (right - 1, right))
        share = (at - self.devices[right - 1]) / (self.devices[right] - self.devices[right - 1])
        return float(max(low + share * (high - low), 0.0))

    def call_s(self, items: float, devices: float) -> float:
        """Returns the seconds of a call (or chunk-step) with `items` per device on `devices` devices."""
        return self._at(self.seconds, items, devices)

    def resident(self, items: float, devices: float) -> float:
        """Returns the bytes on each device while the stage is loaded and owns `items` per device."""
        return self._at(self.resident_bytes, items, devices)

    def working(self, items: float, devices: float) -> float:
        """Returns the bytes on each device on top of the resident ones while a call with `items` per device runs."""
        return self._at(self.working_bytes, items, devices)

    def finish_share(self, before: float, done: float) -> float:
        """Returns the share of a call's time from one share of its items to another one (0: from its beginning)."""
        xs, ys = zip(*self.finish_quantiles, strict=True)
        return float(np.interp(done, xs, ys)) - (float(np.interp(before, xs, ys)) if before else 0.0)

    def to_dict(self) -> dict[str, object]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}
        seconds, _, _ = plain.pop("seconds"), plain.pop("name"), plain.pop("in_loop")
        return {**plain, "kind_factors": dict(self.kind_factors), self.time_key: seconds}


@dataclass(frozen=True, slots=True)
class WeightProfile:
    """The costs of sending one version along a weight edge; the transfer time follows from the bytes."""

    bytes: float
    export_s: float = 0.0
    install_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The job that was measured; a workflow can be rebuilt from it without the config."""

    workflow: str  # dotted path of the function that builds it
    num_items: int
    items_per_block: int = 1
    chunk_steps: int = 1
    expected_rounds: float = 1.0
    max_rounds: int = 1
    blocks_per_batch: int = 1
    devices_per_worker: int = 1  # of the stage with most


@dataclass(frozen=True, slots=True)
class Profile:
    """All stages of a workflow on one kind of device."""

    name: str
    device_kind: str
    stages: Mapping[str, StageProfile]
    edge_bytes_per_item: Mapping[Ends, float] = field(default_factory=dict)
    weights: Mapping[Ends, WeightProfile] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    workload: Workload | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def unmeasured_kinds(self, cluster: Cluster) -> list[str]:
        """Returns the kinds of devices of a cluster on which no stage was measured; no plan can use them."""
        known = {self.device_kind, *itertools.chain.from_iterable(s.kind_factors for s in self.stages.values())}
        return sorted({group.kind for group in cluster.node_groups()} - known)

    def require(self, stages: Iterable[str], loop_stages: Sequence[str] = ()) -> None:
        """Checks that every stage of a workflow was measured, inside or outside a loop as the workflow uses it.

        Raises:
            ConfigError: a stage is missing, or a loop's stage was measured per call (or the other way round).
        """
        for stage in stages:
            if stage not in self.stages:
                raise ConfigError(
                    f"profile {self.name}: the workflow has the stage {stage!r}, but the profile holds only "
                    f"{sorted(self.stages)}: profile this workflow again"
                )
            if self.stages[stage].in_loop != (stage in loop_stages):
                used = f"the workflow uses it {'inside' if stage in loop_stages else 'outside'} a loop"
                has = self.stages[stage].time_key
                raise ConfigError(f"profile {self.name}: stage {stage!r} has {has}, but {used}: profile it again")

    def to_dict(self) -> dict[str, object]:
        ends = lambda table, of: {f"{a}->{b}": of(value) for (a, b), value in table.items()}  # noqa: E731
        return {
            "format": FORMAT,
            **{key: getattr(self, key) for key in ("name", "device_kind")},
            **{key: dict(getattr(self, key)) for key in ("fingerprint", "sources")},
            "stages": {name: stage.to_dict() for name, stage in self.stages.items()},
            "edge_bytes_per_item": ends(self.edge_bytes_per_item, float),
            "weights": ends(self.weights, asdict),
            **({"workload": asdict(self.workload)} if self.workload else {}),
        }


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
        raise ConfigError(f"{path} is no valid JSON ({error}): measure it again") from error
    return parse_profile(data, str(path))


def parse_profile(data: object, path: str = "profile") -> Profile:
    """Returns the profile in plain data.

    Raises:
        ConfigError: names the key, its value and the rule.
    """
    try:
        body = _mapping(data, "it", ("format", *_keys(Profile)))
        if body.get("format") != FORMAT:
            raise ConfigError(f"format is {body.get('format')!r}, but this version reads {FORMAT!r}: measure it again")
        stages = _mapping(body.get("stages"), "stages")
        if not stages:
            _refuse("stages", stages, "at least one stage by its name")
        sizes, work = body.get("edge_bytes_per_item", {}), body.get("workload")
        for edge, size in _mapping(sizes, "edge_bytes_per_item").items():
            _check("float", size, f"edge_bytes_per_item.{edge}")
        return Profile(
            name=str(body.get("name", path)),
            device_kind=str(body.get("device_kind", "cpu")),
            stages={name: _stage(name, entry) for name, entry in stages.items()},
            edge_bytes_per_item={_ends(edge): float(size) for edge, size in sizes.items()},
            weights={
                _ends(edge): _record(WeightProfile, value, f"weights.{edge}")
                for edge, value in _mapping(body.get("weights", {}), "weights").items()
            },
            workload=None if work is None else _record(Workload, work, "workload"),
            **{
                key: {name: str(value) for name, value in _mapping(body.get(key, {}), key).items()}
                for key in ("fingerprint", "sources")
            },  # pyright: ignore[reportArgumentType]
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _stage(name: str, data: object) -> StageProfile:
    path, times = f"stages.{name}", ("s_per_call", "s_per_chunk_step")
    body = dict(_mapping(data, path, ("note", *times, *_keys(StageProfile)[3:])))
    body.pop("note", None)
    timed = [key for key in times if key in body]
    if len(timed) != 1:
        raise ConfigError(f"{path} has {timed or 'no times'}, but it needs one of {', '.join(times)}: measure it again")
    values = {"items_per_device": None, "devices": None, "resident_bytes": 0.0, "working_bytes": 0.0} | body
    return StageProfile(name=name, seconds=values.pop(timed[0]), in_loop=timed[0] == times[1], **values)  # type: ignore


def _ends(text: str) -> Ends:
    source, arrow, target = (part.strip() for part in str(text).partition("->"))
    if not (source and arrow and target):
        raise ConfigError(f"the edge {text!r} does not have the form 'source->target': correct it")
    return source, target


def _record(kind: type[Value], data: object, path: str) -> Value:
    body = _mapping(data, path, _keys(kind))
    for entry in fields(kind):  # type: ignore[arg-type]
        if entry.name in body:
            _check(str(entry.type), body[entry.name], f"{path}.{entry.name}")
        elif entry.default is MISSING:
            raise ConfigError(f"{path}.{entry.name} is missing: add it, or measure again")
    return kind(**body)


def _keys(kind: type) -> tuple[str, ...]:
    return tuple(entry.name for entry in fields(kind))


def _mapping(data: object, path: str, known: Sequence[str] = ()) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        _refuse(path, data, "keys with values")
    for key in data if known else ():
        if key not in known:
            raise ConfigError(
                f"{path}.{key} is unknown:{did_you_mean(str(key), known)} times are in seconds (_s, s_per_...) and "
                f"sizes in bytes (_bytes), and the keys are {', '.join(known)}"
            )
    return data


def _check(kind: str, value: Any, path: str) -> None:
    """Checks a value by its declared type if that is float, int, str or bool; others are checked elsewhere."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "float" and not (is_number and 0 <= value <= _LARGEST):
        _refuse(path, value, "a number that is finite and not negative")
    if kind == "int" and not (is_number and isinstance(value, int) and 1 <= value <= _LARGEST):
        _refuse(path, value, "a whole number from 1")
    if kind in ("str", "bool") and not isinstance(value, str if kind == "str" else bool):
        _refuse(path, value, "a text" if kind == "str" else "true or false")


def _numbers(value: object, path: str) -> Floats:
    """Returns a number, or nested lists of them, as an array."""
    try:
        numbers = np.array(value, dtype=float)
    except (TypeError, ValueError, OverflowError):
        _refuse(path, value, "a finite number, or a table of such whose rows are equally long")
    wrong = numbers[~((numbers >= 0) & (numbers <= _LARGEST))]
    if wrong.size:
        _refuse(path, float(wrong[0]), "finite and not negative")
    return numbers


def _refuse(path: str, value: object, rule: str) -> NoReturn:
    raise ConfigError(f"{path} is {value!r}, but it is {rule}: correct the profile or measure it again")


def workflow_for(profile: Profile) -> Workflow:
    """Returns the measured workflow: the result of `workload.workflow`, called with the workload and the stage names.

    Raises:
        ConfigError: the profile names no workload, or `workload.workflow` names no such function.
    """
    work, where = profile.workload, f"profile {profile.name}: workload"
    if work is None:
        raise ConfigError(f"{where} is missing, but a plan needs one: use a profile that holds a workload")
    workflow = load_plug_in(work.workflow, f"{where}.workflow", "work", "stages")(work, tuple(profile.stages))
    assert isinstance(workflow, Workflow), f"{work.workflow} makes a {type(workflow).__name__}"
    return workflow


def as_measured(workflow: Workflow, profile: Profile) -> Workflow:
    """Returns the workflow with the rounds that its repeats took when it was measured."""
    return workflow if profile.workload is None else workflow.with_rounds(profile.workload.expected_rounds)
