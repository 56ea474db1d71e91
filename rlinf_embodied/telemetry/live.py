"""The progress of a run: a live table in a terminal, one line per iteration anywhere else."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_HISTORY = 8  # iterations in the table
_QUIET_S = 10.0  # seconds between progress lines outside of a terminal
_SMOOTHING = 0.3  # weight of the newest iteration in the estimate of the time left


@dataclass(frozen=True, slots=True)
class Column:
    """A number printed for every iteration, as Column("success", "rollout/success_once", ".1f", " %", 100.0)."""

    title: str
    metric: str
    form: str
    unit: str = ""
    factor: float = 1.0
    after: bool = False  # in a line of text the title stands behind the number

    def cell(self, metrics: Mapping[str, float]) -> str:
        """Returns the number as text, "-" without a number."""
        value = metrics.get(self.metric, math.nan) * self.factor
        return f"{value:{self.form}}{self.unit}" if math.isfinite(value) else "-"

    def words(self, metrics: Mapping[str, float]) -> str:
        """Returns number and title."""
        return f"{self.cell(metrics)} {self.title}" if self.after else f"{self.title} {self.cell(metrics)}"


class LiveView:
    """Shows progress, iterations and notes; a context manager.

    Outside of a terminal (a log file, CI) everything is a plain line: one per iteration, one per note, and at most one
    per 10 s of progress.
    """

    def __init__(
        self,
        num_iterations: int,
        title: str,
        columns: Sequence[Column] = (),
        console: Console | None = None,
        log: Path | None = None,
    ) -> None:
        """Shows nothing yet.

        Args:
            num_iterations: of the run.
            title: for example "PickCube-v1 · ppo".
            columns: what is displayed of an iteration in addition to its number, the stages' seconds and the time left.
            console: where to write; None: standard output.
            log: a file that every line is appended to, besides.
        """
        self._num_iterations, self._title, self._columns = num_iterations, title, tuple(columns)
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._log = log
        self._live: Live | None = None
        self._rows: list[tuple[int, dict[str, float]]] = []
        self._bar: tuple[str, int, int, str] | None = None
        self._last_line_s = -math.inf
        self._last_update_s: float | None = None
        self._s_per_iteration: float | None = None
        self._final: str | None = None

    def __enter__(self) -> LiveView:
        """Takes the bottom of the terminal, if there is one."""
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the terminal back and prints the last line."""
        self._bar = None
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()
            self._live = None
        if self._final is not None:
            self._print(self._final)

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self._bar = None
        self._print(text)
        self._refresh()

    def last_line(self, text: str) -> None:
        """Prints a line when the view closes, below everything else."""
        self._final = text

    def progress(self, what: str, done: int, total: int, remark: str = "") -> None:
        """Shows how far a preparation is, for example ("demonstrations", 40, 200, "")."""
        self._bar = None if done >= total else (what, done, total, remark)
        now = time.monotonic()
        finished = done >= total
        if finished or (self._live is None and now - self._last_line_s > _QUIET_S):
            self._last_line_s = now
            self._print(f"{what} {done}/{total} {remark}".rstrip())
        self._refresh()

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished iteration (its number counts from 1); names of metrics as in metrics.py."""
        self._bar = None
        self._time(metrics)
        self._rows = [*self._rows, (iteration, dict(metrics))][-_HISTORY:]
        line = self._line(iteration, metrics)
        if self._live is None:
            self._print(line)
        else:
            self._append(line)
        self._refresh()

    def _print(self, text: str) -> None:
        self._console.print(Text(text))
        self._append(text)

    def _append(self, text: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as stream:
                stream.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def _time(self, metrics: Mapping[str, float]) -> None:
        """Updates the seconds per iteration: as measured here (evaluations included), or from the first metrics."""
        now = time.monotonic()
        seen = metrics.get("time/iteration_s", math.nan) if self._last_update_s is None else now - self._last_update_s
        self._last_update_s = now
        if math.isfinite(seen):
            before = seen if self._s_per_iteration is None else self._s_per_iteration
            self._s_per_iteration = before + _SMOOTHING * (seen - before)

    # ----------------------------------------------------------------------------------------------------- display
    def _cells(self, iteration: int, metrics: Mapping[str, float]) -> list[str]:
        stages = "  ".join(f"{name} {seconds:.1f}" for name, seconds in _stage_seconds(metrics).items())
        shown = [column.cell(metrics) for column in self._columns]
        return [f"{iteration}/{self._num_iterations}", *shown, stages, self._time_left(iteration)]

    def _line(self, iteration: int, metrics: Mapping[str, float]) -> str:
        number, *_, stages, left = self._cells(iteration, metrics)
        words = [f"iteration {number}", *(column.words(metrics) for column in self._columns)]
        return "  ".join([*words, f"seconds: {stages or '-'}", f"ETA {left}"])

    def _time_left(self, iteration: int) -> str:
        if self._s_per_iteration is None:
            return "-"
        seconds = max(0, self._num_iterations - iteration) * self._s_per_iteration
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"

    def _render(self) -> Group:
        parts: list[Table | ProgressBar | Text] = []
        if self._rows:
            table = Table(title=self._title, title_justify="left", expand=False)
            for name in ("iteration", *(column.title for column in self._columns), "seconds per stage", "ETA"):
                table.add_column(name, justify="right" if name != "seconds per stage" else "left")
            for iteration, metrics in self._rows[:-1]:
                table.add_row(*self._cells(iteration, metrics)[:-1], "", style="dim")
            table.add_row(*self._cells(*self._rows[-1]))
            parts.append(table)
            parts.append(ProgressBar(total=self._num_iterations, completed=self._rows[-1][0], width=60))
        if self._bar is not None:
            what, done, total, remark = self._bar
            parts.append(Text(f"{what} {done}/{total} {remark}".rstrip()))
            parts.append(ProgressBar(total=total, completed=done, width=60))
        return Group(*parts)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)


def _stage_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns seconds by stage from the metrics `time/<stage>_s`, without the totals."""
    times = {name[5:-2]: value for name, value in metrics.items() if name.startswith("time/") and name.endswith("_s")}
    return {stage: seconds for stage, seconds in times.items() if stage not in ("iteration", "total")}
