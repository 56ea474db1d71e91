"""The progress of a run: one line per iteration and note, on standard output and in a log file."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.telemetry.metrics import idle_warning

_QUIET_S = 10.0  # seconds between progress lines


@dataclass(frozen=True, slots=True)
class Column:
    """A number printed for every iteration: Column("success", "rollout/success_once", ".1f", " %", 100.0)."""

    title: str
    metric: str
    form: str
    unit: str = ""
    factor: float = 1.0
    after: bool = False  # whether the title follows the number

    def words(self, metrics: Mapping[str, float]) -> str:
        """Returns number and title; "" if the metric is missing or not finite."""
        value = metrics.get(self.metric, math.nan) * self.factor
        if not math.isfinite(value):
            return ""
        number = f"{value:{self.form}}{self.unit}"
        return f"{number} {self.title}" if self.after else f"{self.title} {number}"


class LiveView:
    """Prints progress (at most a line per 10 s), iterations and notes."""

    def __init__(self, num_iterations: int, columns: Sequence[Column] = (), log: Path | None = None) -> None:
        """Takes the columns to print besides an iteration's number, the stages' seconds and the remaining time.

        Every line is also appended to the file `log`, with the time of day.
        """
        self._num_iterations, self._columns, self._log = num_iterations, tuple(columns), log
        self._last_line_s = -math.inf
        self._useful: list[float | None] = []  # number of useful groups of each iteration

    def note(self, text: str) -> None:
        print(text, flush=True)
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as stream:
                stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def progress(self, what: str, done: int, total: int, remark: str = "") -> None:
        """Prints the progress of a preparation, for example ("demonstrations", 40, 200, "")."""
        now = time.monotonic()
        if done >= total or now - self._last_line_s > _QUIET_S:
            self._last_line_s = now
            self.note(f"{what} {done}/{total} {remark}".rstrip())

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Prints a finished iteration (numbered from 1); metrics.py lists the names of metrics."""
        times = {name[5:-2]: s for name, s in metrics.items() if name.startswith("time/") and name.endswith("_s")}
        stages = "  ".join(f"{name} {s:.1f}" for name, s in times.items() if name not in ("iteration", "total"))
        words = [f"iteration {iteration}/{self._num_iterations}"]
        words += ["no episode ended"] if metrics.get("rollout/episodes") == 0 else []
        words += filter(None, (column.words(metrics) for column in self._columns))
        eta = "-"
        if "total" in times:
            left_s = round(max(0, self._num_iterations - iteration) * times["total"] / iteration)
            eta = str(datetime.timedelta(seconds=left_s))
        self.note("  ".join([*words, f"seconds: {stages or '-'}", f"ETA {eta}"]))
        self._useful.append(metrics.get("rollout/useful_groups"))
        if len(self._useful) % 10 == 0 and (warning := idle_warning(self._useful)):
            self.note(warning)
