"""The sections `plan` and `cluster`: where the stages run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rlinf_embodied.config.checks import require

MAX_STALENESS = 8  # iterations that rollouts may run ahead
_LEAST_STORE_BYTES = 75 << 20


class TransportMode(StrEnum):
    """How data gets from stage to stage."""

    adaptive = "adaptive"  # chosen per edge from the placement: what can stay in its process does
    object_store = "object_store"  # always through the object store, as if no two stages shared a process


def require_staleness(path: str, value: int) -> None:
    """Checks how many versions old the weights of rollouts may be.

    Raises:
        ConfigError: less than none, or more than are possible.
    """
    rule = f"rollouts run 0 to {MAX_STALENESS} iterations ahead"
    require(0 <= value <= MAX_STALENESS, path, value, rule, "use 0 for weights of the iteration before, or 1")


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """Which plan runs: `auto` (the best one for what is measured), a preset, or any file of the same form."""

    name: str = "auto"
    file: str | None = None
    variants: list[dict] = field(default_factory=list)  # by number of devices, see planning/notation.py
    max_staleness: int = (
        0  # auto: rollouts may run this many iterations ahead; another plan: they do, see planning/ahead.py
    )
    search_s: float = 10.0  # auto: limit of the search, in seconds
    replan: bool = True  # auto: plan again when the stages' times have drifted from the profile, see planning/drift.py
    profile: str | None = None  # auto: a profile file to plan with; None: the cached one, or measured now
    profile_budget_s: float = 6.0  # auto: seconds for the repeated measurements of a profile, besides set-up

    def __post_init__(self) -> None:
        require(
            self.profile_budget_s > 0,
            "plan.profile_budget_s",
            self.profile_budget_s,
            "it must be positive",
            "use 6",
        )
        require(
            self.is_auto or bool(self.variants) or self.file is not None,
            "plan",
            self.name,
            "a plan needs items",
            "use plan=auto, plan=collocated, plan=disaggregated, or plan=<file.yaml>",
        )
        require(self.search_s > 0, "plan.search_s", self.search_s, "it must be positive", "use 10")
        require_staleness("plan.max_staleness", self.max_staleness)

    @property
    def is_auto(self) -> bool:
        """Whether the plan is still to be found."""
        return self.name == "auto" and not self.variants and self.file is None


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 1 << 16


@dataclass(kw_only=True, slots=True)
class RecoveryConfig:
    """How often a run recovers when workers die, hang or fail: it restarts the iteration with new workers."""

    max_restarts: int = 5  # within the window; 0: the first fault ends the run, and no snapshots are kept
    window_s: float = 3600.0
    snapshot_share: float = 0.05  # of the time of training that snapshots may take; a restart begins at the newest one

    def __post_init__(self) -> None:
        number, window_s, share = self.max_restarts, self.window_s, self.snapshot_share
        require(number >= 0, "recovery.max_restarts", number, "it counts restarts", "use 0 to go without")
        require(window_s > 0, "recovery.window_s", window_s, "it must be positive", "use 3600")
        require(share > 0, "recovery.snapshot_share", share, "it must be positive", "use 0.05")


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """The machines at hand."""

    name: str = "local"
    num_devices: int | None = None  # None: all GPUs, or all cores of a machine without one
    speeds: list[float] = field(default_factory=list)  # of each device, 0.5: half as fast as others; []: all alike
    cpu_devices: int = 0  # CPU cores of each node as separate devices next to its accelerators, for simulators
    waiting_devices: int = 0  # additional workers that need no core: for stages that wait: env.control_hz, reward.waits
    torch_device: str = "auto"  # cuda where there are GPUs, otherwise cpu; or any kind of device that torch knows
    device_memory_bytes: int | None = None  # of each, that plans may fill; None: what its driver says, or its share
    device_module: str | None = None  # imported in every process first: makes that kind known to torch
    session: str = "ray"  # ray, or serial: one process, for debuggers
    address: str | None = None  # of a running Ray: auto (the one of this machine) or host:port; None: starts its own
    hang_after_s: float = 25.0  # a worker hangs without progress for this much longer than twice what it ever took
    first_progress_s: float = 600.0  # and where it has made no progress before: starts, set-ups, first calls
    object_store_bytes: int | None = None  # where this process starts Ray; None: a share of the machine's memory
    transport: TransportMode = TransportMode.adaptive
    emulated: bool = False  # described by the two below; for planning and for stages that only sleep
    nodes: list[dict] = field(default_factory=list)  # groups of alike nodes, see tools/described_cluster.py
    links: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(
            self.num_devices is None or self.num_devices >= 1,
            "cluster.num_devices",
            self.num_devices,
            "it must be at least 1",
            "leave it out to use all devices",
        )
        require(
            self.cpu_devices >= 0,
            "cluster.cpu_devices",
            self.cpu_devices,
            "it counts cores beside the accelerators of a node",
            "use 0: simulators share the accelerators' workers",
        )
        require(
            self.waiting_devices == 0 or (self.waiting_devices > 0 and self.address is None and self.session == "ray"),
            "cluster.waiting_devices",
            self.waiting_devices,
            "it is for workers on this machine (cluster=local), and not negative",
            "use 0",
        )
        require(
            all(0 < speed < float("inf") for speed in self.speeds),
            "cluster.speeds",
            self.speeds,
            "a device's speed is a positive share of the others'",
            "use for example [1.0, 0.5], or leave it out",
        )
        require(
            not self.speeds or self.address is None,
            "cluster.speeds",
            self.speeds,
            "it is for the devices of this machine (cluster=local)",
            "leave it out",
        )
        require(
            self.session in ("ray", "serial"),
            "cluster.session",
            self.session,
            "it is ray or serial",
            "use cluster.session=ray",
        )
        require(
            self.transport is TransportMode.adaptive or self.session == "ray",
            "cluster.transport",
            self.transport.value,
            "one process (cluster.session=serial) has no object store",
            "use cluster.session=ray or cluster.transport=adaptive",
        )
        require(
            self.address is None or self.address == "auto" or _is_address(self.address),
            "cluster.address",
            self.address,
            "it is auto or host:port",
            "use cluster=ray cluster.address=auto on a machine where `ray start` ran",
        )
        require(
            self.address is None or self.session == "ray",
            "cluster.address",
            self.address,
            "one process (cluster.session=serial) joins no Ray",
            "leave cluster.address out, or use cluster=ray",
        )
        require(
            self.device_memory_bytes is None or self.device_memory_bytes > 0,
            "cluster.device_memory_bytes",
            self.device_memory_bytes,
            "it is a positive number of bytes",
            "leave it out: the driver is asked",
        )
        store = self.object_store_bytes
        require(
            store is None or store >= _LEAST_STORE_BYTES,
            "cluster.object_store_bytes",
            store,
            f"Ray starts with {_LEAST_STORE_BYTES} bytes or more",
            "leave it out: a share of this machine's memory is taken",
        )
        for key, default in (("first_progress_s", 600), ("hang_after_s", 25)):
            limit = getattr(self, key)
            require(limit > 0, f"cluster.{key}", limit, "it must be positive", f"use {default}")


def require_no_cores(cluster: ClusterConfig) -> None:
    """Checks that no cores beside accelerators are asked for where nothing would run on them.

    Raises:
        ConfigError: they are.
    """
    rule = "only training and evaluation in simulators (train_vla.py, evaluate.py) use cores beside accelerators"
    require(cluster.cpu_devices == 0, "cluster.cpu_devices", cluster.cpu_devices, rule, "leave it out")
