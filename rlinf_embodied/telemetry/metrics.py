"""Metrics: intervals of rates, and the files and boards that metrics are written to.

Names: `rollout/{success_once,success_at_end,return,episode_len}` as in ManiSkill, the same under `eval/`;
`losses/{policy_loss,value_loss,entropy,approx_kl,clipfrac,explained_variance}`; `time/<stage>_s`; `charts/SPS` (env
steps per second).  The x axis is `global_step`: env steps, or tokens for language models.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import cast

from rlinf_embodied.errors import write_whole, writing
from rlinf_embodied.telemetry.boards import Board, Histogram

Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal
_MANY_IDLE = 10


def idle_warning(useful_groups: Sequence[float | None]) -> str:
    """Returns a warning if in each of the last ten or more iterations all groups had equal rewards; otherwise ""."""
    idle = len(list(takewhile(lambda number: number == 0, reversed(useful_groups))))
    text = f"none of the last {idle} iterations had a group with different rewards, so nothing was learned: "
    return f"{text}use easier problems or a larger algorithm.group_size" if idle >= _MANY_IDLE else ""


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of a mean, by the normal approximation; of a single value that value."""
    half = Z95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return fmean(values) - half, fmean(values) + half


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Returns the 95 % interval of a success rate; (0, 1) without episodes.

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    (Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927, eq. 5.)
    """
    assert 0 <= successes <= n, f"{successes} successes of {n} episodes"
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z95**2
    centre = p + z2 / (2 * n)
    margin = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # rounding would leave 1e-17 where the interval ends at 0 or 1 exactly
    low = 0.0 if successes == 0 else (centre - margin) / (1 + z2 / n)
    high = 1.0 if successes == n else (centre + margin) / (1 + z2 / n)
    return low, high


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of successes with its interval, as Rate(126, 200): 63.0 % [56.1, 69.4]."""

    successes: int
    number: int  # at least 1

    @property
    def value(self) -> float:
        """The share, 0..1."""
        return self.successes / self.number

    def summary(self, name: str) -> dict[str, object]:
        """Returns the JSON form: the share under `name`, and its 95 % interval."""
        return {name: self.value, f"{name}_interval": list(wilson(self.successes, self.number))}

    def __str__(self) -> str:
        return percent(self.summary("rate"), "rate")


def percent(summary: Mapping[str, object], name: str) -> str:
    """Returns a rate of a summary in per cent, for example "63.0 % [56.1, 69.4]"."""
    share, (low, high) = cast(float, summary[name]), cast("list[float]", summary[f"{name}_interval"])
    return f"{100 * share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def iqm(values: Sequence[float]) -> float:
    """Returns the interquartile mean: the mean without the lowest and the highest floor(n / 4) values."""
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])


def iqm_interval(values: Sequence[float], samples: int = 2000) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval of the interquartile mean over the seeds of one task.

    (Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021; with one task its
    stratified bootstrap resamples the seeds.)
    """
    draw = random.Random(0)  # fixed, so that reports are reproducible
    means = sorted(iqm(draw.choices(values, k=len(values))) for _ in range(samples))
    return means[round(0.025 * (samples - 1))], means[round(0.975 * (samples - 1))]


# --------------------------------------------------------------------------------------------------------------- files
class MetricsWriter:
    """Writes each iteration to metrics.jsonl and to the boards.

    The first write drops rows of an earlier run for this iteration or later ones, so a resumed run continues the file
    as if it had never stopped.
    """

    def __init__(self, folder: Path, boards: Sequence[Board] = ()) -> None:
        self._path = folder / "metrics.jsonl"
        self._boards = tuple(boards)
        self._begun = False

    def write(self, global_step: int, iteration: int, metrics: Mapping[str, float]) -> None:
        """Writes one iteration; a value that is not finite becomes null in the JSON and is left out of the boards.

        Histograms are written to the boards only.

        Raises:
            RunFileError: the file cannot be written.
        """
        if not self._begun:
            self._begin(iteration)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        row: dict[str, float | None] = {"iteration": iteration, "global_step": global_step}
        row |= {name: finite.get(name) for name, value in metrics.items() if not isinstance(value, Histogram)}
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for board in self._boards:
            board.log(finite, global_step)

    def show_videos(self, global_step: int, folder: Path) -> None:
        """Logs an evaluation's videos to the boards, each under its file name without the outcome."""
        named = {f"videos/{file.stem.rsplit('--', 1)[0]}": file for file in sorted(folder.glob("*.mp4"))}
        for board in self._boards if named else ():
            board.log({}, global_step, named)

    def _begin(self, iteration: int) -> None:
        self._begun = True
        if self._path.exists():
            earlier = self._path.read_text(encoding="utf-8").split("\n")
            kept = [line for line in earlier if (row := _row(line)) is not None and row["iteration"] < iteration]
            write_whole(self._path, "".join(line + "\n" for line in kept))

    def close(self) -> None:
        for board in self._boards:
            board.close()


def _row(line: str) -> dict[str, float] | None:
    """Returns the row of a line; None if the line is incomplete."""
    try:
        row = json.loads(line)
        return row | {"iteration": int(row["iteration"])}
    except (ValueError, KeyError, TypeError):
        return None


# ----------------------------------------------------------------------------------------------------------- read back
def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Returns the complete rows of metrics.jsonl; a running process may be writing the last one."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for line in lines if (row := _row(line)) is not None]


def moving_mean(values: list[float], width: int = 5) -> list[float]:
    """Returns means over the last `width` values: a single iteration's success swings by ten points."""
    windows = [values[max(0, i - width + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
