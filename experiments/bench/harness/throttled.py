"""A session in which a quota gives some workers only a part of a core: unlike devices on one machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime.host import StageContext
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.workflow.graph import StageSpec

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000  # the kernel hands a quota out in slices of 5 ms: shorter periods lose much of it


class ThrottledSession(RaySession):
    """A Ray session; `shares` says what part of a core a worker gets, all that there is where it says nothing."""

    def __init__(self, config: ClusterConfig, shares: Mapping[int, float]) -> None:
        """Makes the control groups.

        Raises:
            ConfigError: this user may make none, or the kernel has none for cores.
        """
        self._groups = {worker: _group(f"rlinf_embodied_{os.getpid()}_{id(self)}_{worker}", share)
                        for worker, share in shares.items()}  # fmt: skip
        super().__init__(config.object_store_bytes, config.hang_after_s, config.first_progress_s)

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """The workers are throttled from their first stage on."""
        found = super().add_stage(spec, contexts)
        processes = self.processes()
        for worker, group in self._groups.items():
            if worker in processes:
                (group / "cgroup.procs").write_text(str(processes[worker]), encoding="ascii")
        return found

    def close(self) -> None:
        super().close()
        for group in self._groups.values():
            with suppress(OSError):  # its process has not quite ended: an empty group costs nothing
                group.rmdir()


def _group(name: str, share: float) -> Path:
    """Returns a new control group of so much of a core."""
    old = (_ROOT / "cpu/cpu.cfs_quota_us").exists()
    group = _ROOT / "cpu" / name if old else _ROOT / name
    try:
        if not old:
            (_ROOT / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
        group.mkdir()
        quota = round(share * _PERIOD_US)
        if old:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
            (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}", encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"cases asks for a core of which a worker gets {share:g}, but no control group can be made ({error}): run "
            "as root on Linux, or leave the case out"
        ) from error
    return group
