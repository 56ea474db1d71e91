"""The progress of a run: one line per iteration and note, on standard output and in a log file."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_QUIET_S = 10.0  # seconds between progress lines
_SMOOTHING = 0.3  # weight of the newest iteration in the estimate of the time left


@dataclass(frozen=True, slots=True)
class Column:
    """A number printed for every iteration, as Column("success", "rollout/success_once", ".1f", " %", 100.0)."""

    title: str
    metric: str
    form: str
    unit: str = ""
    factor: float = 1.0
    after: bool = False  # whether the title follows the number

    def words(self, metrics: Mapping[str, float]) -> str:
        """Returns number and title; "-" without a number."""
        value = metrics.get(self.metric, math.nan) * self.factor
        number = f"{value:{self.form}}{self.unit}" if math.isfinite(value) else "-"
        return f"{number} {self.title}" if self.after else f"{self.title} {number}"


class LiveView:
    """Prints progress (at most a line per 10 s), iterations and notes; a context manager."""

    def __init__(self, num_iterations: int, columns: Sequence[Column] = (), log: Path | None = None) -> None:
        """Prints nothing yet.

        Args:
            num_iterations: of the run.
            columns: what is printed of an iteration in addition to its number, the stages' seconds and the time left.
            log: a file that every line is appended to, with the time of day.
        """
        self._num_iterations, self._columns, self._log = num_iterations, tuple(columns), log
        self._last_line_s = -math.inf
        self._last_update_s: float | None = None
        self._s_per_iteration: float | None = None
        self._final: str | None = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Prints the last line."""
        if self._final is not None:
            self.note(self._final)

    def note(self, text: str) -> None:
        """Prints a line."""
        print(text, flush=True)
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as stream:
                stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def last_line(self, text: str) -> None:
        """Prints a line when the view closes, below everything else."""
        self._final = text

    def progress(self, what: str, done: int, total: int, remark: str = "") -> None:
        """Prints how far a preparation is, for example ("demonstrations", 40, 200, "")."""
        now = time.monotonic()
        if done >= total or now - self._last_line_s > _QUIET_S:
            self._last_line_s = now
            self.note(f"{what} {done}/{total} {remark}".rstrip())

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Prints a finished iteration (its number counts from 1); names of metrics as in metrics.py."""
        self._time(metrics)
        stages = "  ".join(f"{name} {seconds:.1f}" for name, seconds in _stage_seconds(metrics).items())
        words = [f"iteration {iteration}/{self._num_iterations}", *(column.words(metrics) for column in self._columns)]
        self.note("  ".join([*words, f"seconds: {stages or '-'}", f"ETA {self._time_left(iteration)}"]))

    def _time(self, metrics: Mapping[str, float]) -> None:
        """Updates the seconds per iteration: as measured here (evaluations included), or from the first metrics."""
        now = time.monotonic()
        last = metrics.get("time/iteration_s", math.nan) if self._last_update_s is None else now - self._last_update_s
        self._last_update_s = now
        if math.isfinite(last):
            before = last if self._s_per_iteration is None else self._s_per_iteration
            self._s_per_iteration = before + _SMOOTHING * (last - before)

    def _time_left(self, iteration: int) -> str:
        if self._s_per_iteration is None:
            return "-"
        seconds = max(0, self._num_iterations - iteration) * self._s_per_iteration
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns seconds by stage from the metrics `time/<stage>_s`, without the totals."""
    times = {name[5:-2]: value for name, value in metrics.items() if name.startswith("time/") and name.endswith("_s")}
    return {stage: seconds for stage, seconds in times.items() if stage not in ("iteration", "total")}
