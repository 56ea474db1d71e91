"""The sections `plan` and `cluster`: where the stages run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rlinf_embodied.config.checks import require, require_numbers, require_one_of

MAX_STALENESS = 8  # iterations that rollouts may run ahead
_LINKS = {"within_node_bytes_per_s", "across_nodes_bytes_per_s", "latency_s", "submit_s"}
_MIN_STORE_BYTES = 75 << 20  # Ray does not start with less


def require_staleness(path: str, value: int) -> None:
    """Checks the number of iterations that rollouts may run ahead."""
    rule = f"rollouts run 0 to {MAX_STALENESS} iterations ahead"
    require(0 <= value <= MAX_STALENESS, path, value, rule, "use 0 for weights of the previous iteration, or 1")


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """Which plan runs: `auto` (the best one for the measured profile), a preset, or a plan file."""

    name: str = "auto"
    file: str | None = None
    variants: list[dict] = field(default_factory=list)  # by number of devices, see planning/notation.py
    max_staleness: int = 0  # auto: largest number of iterations that rollouts run ahead; other plans: the exact number
    search_s: float = 10.0  # auto: limit of the search, in seconds
    replan: bool = True  # auto: plan again if measured times differ from the profile, see planning/drift.py
    profile: str | None = None  # auto: a profile file to plan with; None: the cached one, or measured now
    profile_budget_s: float = 6.0  # auto: seconds for repeated measurements of a profile, without set-up

    def __post_init__(self) -> None:
        require_numbers(self, "plan", "profile_budget_s", "search_s", low=0, above=True)
        known = self.is_auto or bool(self.variants) or self.file is not None
        action = "use plan=auto, plan=collocated, plan=disaggregated, or plan=<file.yaml>"
        require(known, "plan", self.name, "a plan needs items", action)
        require_staleness("plan.max_staleness", self.max_staleness)

    @property
    def is_auto(self) -> bool:
        """Whether the plan has to be searched."""
        return self.name == "auto" and not self.variants and self.file is None


@dataclass(kw_only=True, slots=True)
class RecoveryConfig:
    """How often a run recovers from workers that die, hang or fail, by repeating iterations with new workers."""

    max_restarts: int = 5  # within the window; 0: the first fault ends the run, and no snapshots are kept
    window_s: float = 3600.0
    snapshot_share: float = 0.05  # largest fraction of the training time for snapshots; a restart uses the newest one
    # larger snapshots are not kept: a restart uses the newest checkpoint; None: an eighth of the driver node's memory
    snapshot_max_gb: float | None = None

    def __post_init__(self) -> None:
        require_numbers(self, "recovery", "max_restarts", low=0)
        require_numbers(self, "recovery", "window_s", "snapshot_share", low=0, above=True)
        if self.snapshot_max_gb is not None:
            require_numbers(self, "recovery", "snapshot_max_gb", low=0)


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """The devices and machines that a run uses."""

    name: str = "local"
    num_devices: int | None = None  # None: all GPUs, or all cores of a machine without one
    cpu_devices: int = 0  # CPU cores of each node as separate devices next to its accelerators, for simulators
    waiting_devices: int = 0  # additional workers without a core, for stages that wait (env.control_hz, reward.waits)
    torch_device: str = "auto"  # cuda if there are GPUs, otherwise cpu; or any device type of torch
    device_memory_bytes: int | None = None  # limit of each device for plans; None: as its driver reports, or its share
    device_module: str | None = None  # imported first in every process; registers a device type with torch
    session: str = "ray"  # ray, or serial: one process, for debuggers
    address: str | None = None  # of a running Ray: auto (the one of this machine) or host:port; None: starts its own
    hang_after_s: float = 25.0  # limit without progress, in addition to twice a method's longest such time so far
    first_progress_s: float = 600.0  # limit before a method's first progress: starts, set-ups, first calls
    object_store_bytes: int | None = None  # if this process starts Ray; None: a share of the machine's memory
    links: dict[str, float] = field(default_factory=dict)  # differences from Links of cluster/hardware.py

    def __post_init__(self) -> None:
        require_numbers(self, "cluster", "num_devices", low=1)
        rule = f"its keys are {', '.join(sorted(_LINKS))}, its values positive numbers"
        valid = _LINKS.issuperset(self.links) and all(value > 0 for value in self.links.values())
        require(valid, "cluster.links", self.links, rule, "correct it")
        require_numbers(self, "cluster", "cpu_devices", low=0)
        require_numbers(self, "cluster", "device_memory_bytes", "first_progress_s", "hang_after_s", low=0, above=True)
        require_numbers(self, "cluster", "object_store_bytes", low=_MIN_STORE_BYTES)
        require_one_of(self, "cluster", "session", "ray", "serial")
        is_local = self.address is None
        rule = "it is for workers on this machine (cluster=local), and not negative"
        fits = self.waiting_devices == 0 or (self.waiting_devices > 0 and is_local and self.session == "ray")
        require(fits, "cluster.waiting_devices", self.waiting_devices, rule, "use 0")
        valid = self.address in (None, "auto") or re.fullmatch(r".+:\d+", self.address) is not None
        rule = "it is auto, or host:port of a running Ray (cluster.session=ray)"
        action = "use cluster=ray cluster.address=auto on a machine where `ray start` ran"
        require(valid and (is_local or self.session == "ray"), "cluster.address", self.address, rule, action)


def require_no_cores(cluster: ClusterConfig) -> None:
    """Checks that no cores are requested in addition to accelerators if nothing would run on them."""
    rule = "only training and evaluation in simulators use cores in addition to accelerators"
    require(cluster.cpu_devices == 0, "cluster.cpu_devices", cluster.cpu_devices, rule, "leave it out")
