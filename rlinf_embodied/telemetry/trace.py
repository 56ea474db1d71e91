"""Spans: the only event type of real runs, simulations and emulations.

This module imports neither torch nor ray.  Times are seconds since the epoch (`time.time`), so that spans of several
processes on one machine share an axis.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.errors import writing


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, for example Span("env.step", "env", 0, "cpu:0", 12.0, 12.5, {"iteration": 3})."""

    name: str
    stage: str
    worker: int
    device: str
    start_s: float
    end_s: float
    args: Mapping[str, object] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def busy_seconds(spans: Iterable[Span]) -> dict[tuple[int, str], float]:
    """Returns the seconds of each (worker, stage); nested spans are counted twice."""
    total: dict[tuple[int, str], float] = {}
    for span in spans:
        key = (span.worker, span.stage)
        total[key] = total.get(key, 0.0) + span.duration_s
    return total


def stage_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Returns time/<stage>_s: seconds that the busiest worker spent in each stage."""
    busiest: dict[str, float] = {}
    for (_, stage), seconds in busy_seconds(spans).items():
        key = f"time/{stage}_s"
        busiest[key] = max(busiest.get(key, 0.0), seconds)
    return busiest


def trace_events(spans: Sequence[Span]) -> dict[str, object]:
    """Returns the spans in Chrome's trace format, which Perfetto opens: workers are processes, stages their threads."""
    origin = min((span.start_s for span in spans), default=0.0)
    stages = {stage: number for number, stage in enumerate(dict.fromkeys(span.stage for span in spans))}
    events: list[dict[str, object]] = []
    for worker, device in sorted({(span.worker, span.device) for span in spans}):
        events.append(_name("process_name", worker, 0, f"worker {worker} ({device})"))
        events.extend(
            _name("thread_name", worker, stages[stage], stage)
            for stage in dict.fromkeys(span.stage for span in spans if span.worker == worker)
        )
    events.extend(
        {
            "ph": "X",
            "name": span.name,
            "cat": span.stage,
            "pid": span.worker,
            "tid": stages[span.stage],
            "ts": round(1e6 * (span.start_s - origin), 1),
            "dur": round(1e6 * span.duration_s, 1),
            "args": dict(span.args),
        }
        for span in spans
    )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(kind: str, worker: int, thread: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": worker, "tid": thread, "args": {"name": text}}


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Writes the spans as a trace.json for Perfetto; an empty run gives an empty, valid trace."""
    text = json.dumps(trace_events(spans), default=str)
    with writing(path):
        path.write_text(text, encoding="utf-8")


class StartupClock:
    """Divides the time between the command and the first piece of work, such as an env's step, into phases."""

    def __init__(self, started: float, first_work: str) -> None:
        """Takes the time of the command, in seconds since the epoch, and the suffix of the names of spans of work."""
        self._first_work, self._started, self._last = first_work, started, started
        self.phases: dict[str, float] = {}  # seconds by name, in order
        self.total_s: float | None = None  # until the first piece of work

    def mark(self, phase: str, now: float | None = None) -> None:
        """Ends a phase, which took the time since the last one ended."""
        if self.total_s is None:
            now = now or time.time()
            self.phases[phase], self._last = now - self._last, now

    def first(self, spans: Sequence[Span]) -> bool:
        """Ends the start-up at the first work among `spans`; returns whether it did."""
        steps = [span.start_s for span in spans if span.name.endswith(self._first_work)]
        if self.total_s is not None or not steps:
            return False
        self.mark("before work", min(steps))  # of an env: episodes are reset and images rendered
        self.total_s = min(steps) - self._started
        return True

    def __str__(self) -> str:
        """Returns, for example, "first env.step after 12.1 s: ray 5.0, stages 7.1"."""
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items())
        return f"first {self._first_work} after {self.total_s or 0.0:.1f} s: {parts}"
