"""Where the time goes between the command and the first piece of work, such as the first step of an env."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rlinf_embodied.telemetry.trace import Span


class StartupClock:
    """Divides the start of a run into phases, one after the other; once work has begun it changes no more."""

    def __init__(self, started: float, first_work: str) -> None:
        """Takes the moment of the command, seconds since the epoch, and how names of the spans of work end."""
        self._first_work = first_work
        self._started = self._last = started
        self.phases: dict[str, float] = {}  # seconds by name, in order
        self.total_s: float | None = None  # until the first piece of work

    def mark(self, phase: str, parts: Mapping[str, float] | None = None) -> None:
        """Ends a phase: it took the time since the last one ended.

        `parts`, seconds by name, stand for themselves ("phase part"); the phase keeps what is left.
        """
        if self.total_s is None:
            now = time.time()
            seconds = {f"{phase} {name}": value for name, value in (parts or {}).items()}
            self.phases |= seconds | {phase: now - self._last - sum(seconds.values())}
            self._last = now

    def first(self, spans: Sequence[Span]) -> bool:
        """Ends the start-up at the first work among `spans`; returns whether that was it.

        What passed since the last mark is the phase "before work": of an env, episodes are reset and images rendered.
        """
        steps = [span.start_s for span in spans if span.name.endswith(self._first_work)]
        if self.total_s is not None or not steps:
            return False
        self.total_s = min(steps) - self._started
        self.phases["before work"] = min(steps) - self._last
        return True

    def __str__(self) -> str:
        """Returns, for example, "first env.step after 12.1 s: ray 5.0, stages 7.1"."""
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items())
        return f"first {self._first_work} after {self.total_s or 0.0:.1f} s: {parts}"
