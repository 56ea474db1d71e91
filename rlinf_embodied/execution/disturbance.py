"""Whether other processes took the cores while stages were measured, and what the stages would have taken without them.

The kernel counts how long the threads of a process could run but had no core (Linux: /proc/<pid>/task/*/schedstat).
Workers that wait so are disturbed where processes that are none of ours were busy meanwhile (/proc/stat); otherwise
they wait for each other or for the driver, as they will in every iteration.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlinf_embodied.planning.profile import DISTURBED
from rlinf_embodied.telemetry.trace import Span

_TASKS, _MACHINE = Path("/proc/self/task"), Path("/proc/stat")
_OTHERS = 0.4  # cores' worth of other processes, Ray's own and the system's among them, that disturb nobody
_MOST = 0.9  # of a call, that is taken for waiting


def waited_s() -> float:
    """Returns for how many seconds threads of this process were ready but had no core; 0 where no one counts them."""
    total_ns = 0
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        try:
            total_ns += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):  # the thread has ended, or the kernel does not count
            continue
    return total_ns / 1e9


def busy_s() -> float:
    """Returns for how many seconds the cores of this machine have been busy since it started; 0 where no one counts."""
    if not _MACHINE.exists():
        return 0.0
    # user, nice, system, idle, iowait, irq, softirq; old kernels and sandboxes have fewer
    ticks = [int(text) for text in _MACHINE.read_text().split("\n", 1)[0].split()[1:8]]
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds since the start: those in which a machine's cores were busy, and what our processes used and waited."""

    clock_s: float
    busy_s: float
    used_s: Mapping[int, float]  # by process
    waited_s: Mapping[int, float]  # by worker

    def others_since(self, before: Moment) -> float:
        """Returns how many cores' worth processes that are none of ours used."""
        ours = sum(seconds - before.used_s.get(process, 0.0) for process, seconds in self.used_s.items())
        return (self.busy_s - before.busy_s - ours) / max(self.clock_s - before.clock_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Repetition:
    """One iteration of a probe: its spans, and by worker the share of its calls in which it waited for a core."""

    spans: tuple[Span, ...]
    rounds: Mapping[str, int]  # of each stage that is repeated
    waited: Mapping[int, float]
    finishes: Mapping[str, list[Mapping[int, float]]] = field(default_factory=dict)  # of calls with long tails

    @property
    def disturbed(self) -> float:
        """The largest share of a worker."""
        return max(self.waited.values(), default=0.0)

    @property
    def is_quiet(self) -> bool:
        """Whether it counts as it is."""
        return self.disturbed <= DISTURBED

    def without_waiting(self, collective: Collection[str] = ()) -> Repetition:
        """Returns what it had been if no worker had waited: each of its calls shrinks by the same share.

        The workers of a collective stage wait for the one that waits for a core, so that its share is that of all.
        """
        most = {stage: max((self.waited.get(s.worker, 0.0) for s in self.spans if s.stage == stage), default=0.0)
                for stage in collective}  # fmt: skip
        spans = []
        for span in self.spans:
            share = most.get(span.stage, self.waited.get(span.worker, 0.0))
            spans.append(replace(span, end_s=span.start_s + span.duration_s * (1.0 - share)))
        return replace(self, spans=tuple(spans), waited={})


def shares(before: Moment, after: Moment, spans: Sequence[Span]) -> dict[int, float]:
    """Returns by worker the share of its calls in which it waited for a core; nothing where no others were busy.

    Args:
        before: the moment before the calls.
        after: that after them.
        spans: the calls; workers without any are left out.
    """
    if after.others_since(before) <= _OTHERS:
        return {}
    busy: dict[int, float] = {}
    for span in spans:
        busy[span.worker] = busy.get(span.worker, 0.0) + span.duration_s
    return {
        worker: min(_MOST, (after.waited_s[worker] - before.waited_s[worker]) / seconds)
        for worker, seconds in busy.items()
        if seconds > 0 and worker in before.waited_s and worker in after.waited_s
    }


def chosen(found: Sequence[Repetition], least: int, collective: Collection[str] = ()) -> tuple[list[Repetition], float]:
    """Returns the repetitions that count, and how much those were disturbed.

    The quiet ones count as they are.  Where there are fewer than `least`, as many of the least disturbed ones count, of
    which the waiting is taken off; `collective` are the stages whose workers wait for each other.
    """
    quiet = [one for one in found if one.is_quiet]
    if len(quiet) >= least:
        return quiet, max(one.disturbed for one in quiet)
    best = sorted(found, key=lambda one: one.disturbed)[:least]
    return [one if one.is_quiet else one.without_waiting(collective) for one in best], max(
        one.disturbed for one in best
    )
