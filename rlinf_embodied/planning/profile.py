"""What the stages cost on real devices, as values that are read between measured points; files: profile_file.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlinf_embodied.cluster.hardware import Links
from rlinf_embodied.errors import ConfigError

Floats = NDArray[np.float64]
DISTURBED = 0.1  # share of measured seconds in which work waited for a core that others had: a quiet machine has less


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
    stays: bool = False  # it cannot leave a device, so that no plan may switch it
    offloaded_bytes: float = 0.0  # in files: parked_bytes, park_s, unpark_s
    offload_s: float = 0.0
    onload_s: float = 0.0
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
    blocks_per_batch: int = 1  # of a stage with long tails; "together" in files


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
    disturbed: float = 0.0  # largest share of measured seconds in which work waited for a core that others had
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
