"""What an evaluation found: how often the task was solved, or where it cannot be solved, its return; and videos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import cast

import av
import numpy as np

from rlinf_embodied.algorithms.batch import Episode
from rlinf_embodied.telemetry.metrics import Rate, percent
from rlinf_embodied.telemetry.trace import Span


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What evaluation found."""

    once: Rate | None  # solved at any time; None of a task without success, whose return is what counts
    at_end: Rate | None  # solved when the episode ends
    mean_return: float
    episode_len: float
    episodes: tuple[Episode, ...]
    spans: tuple[Span, ...] = ()
    score: float | None = None  # the share of at_end where all episodes were run

    def summary(self) -> dict[str, object]:
        """Returns the JSON form (eval_info.json adds what was evaluated)."""
        rates = {} if self.once is None else self.once.summary("success_once")
        rates |= {} if self.at_end is None else self.at_end.summary("success_at_end")
        return {
            **rates,
            "return": self.mean_return,
            "return_interval": list(self.return_interval),
            "episode_len": self.episode_len,
            "num_episodes": len(self.episodes),
        }

    def metrics(self) -> dict[str, float]:
        """Returns what goes to the learning curve."""
        rates = {"eval/success_once": self.once, "eval/success_at_end": self.at_end}
        known = {name: rate.value for name, rate in rates.items() if rate is not None}
        return known | {"eval/return": self.mean_return}

    @property
    def return_interval(self) -> tuple[float, float]:
        """The mean return's 95 % interval, by the normal approximation; a single episode has none and gives itself."""
        returns = [episode.metrics["return"] for episode in self.episodes]
        half = 1.96 * stdev(returns) / math.sqrt(len(returns)) if len(returns) > 1 else 0.0
        return self.mean_return - half, self.mean_return + half

    def by_task(self) -> dict[str, Rate]:
        """Returns how often each task was solved, by its name; {} where the env has one task only."""
        names = dict.fromkeys(episode.task for episode in self.episodes if episode.task)
        if self.once is None:
            return {}
        of = {name: [e.metrics["success_once"] > 0 for e in self.episodes if e.task == name] for name in names}
        return {name: Rate(sum(solved), len(solved)) for name, solved in of.items()}

    def __str__(self) -> str:
        """Returns, for example, "success_once 63.0 % [56.1, 69.4], at_end 61.0 % [54.1, 67.5] of 200 episodes".

        Of a task without success "return 812.4 [790.1, 834.7] of 200 episodes".
        """
        if self.once is None:
            low, high = self.return_interval
            return f"return {self.mean_return:.1f} [{low:.1f}, {high:.1f}] of {len(self.episodes)} episodes"
        return f"success_once {self.once}, at_end {self.at_end} of {len(self.episodes)} episodes"


def before_and_after(before: Mapping[str, object], after: EvaluationResult) -> dict[str, object]:
    """Returns what summary.json tells of the outcome: success where the task has one, the return in any case.

    Args:
        before: the summary of the starting policy's evaluation.
        after: the evaluation of the trained one.
    """
    returns = {
        "return_before": before.get("return"),
        "return_before_interval": before.get("return_interval"),
        "return_after": after.mean_return,
        "return_after_interval": list(after.return_interval),
    }
    if after.once is None or after.at_end is None:
        return returns
    return {
        "success_rate_before": before["success_once"],
        "success_rate_before_interval": before["success_once_interval"],
        **after.once.summary("success_rate_after"),
        "success_at_end_before": before["success_at_end"],
        "success_at_end_after": after.at_end.value,
        **returns,
    }


def shown(summary: Mapping[str, object]) -> str:
    """Returns the outcome in a summary for people: "success_once 63.0 % [56.1, 69.4], at_end ...", or the return."""
    if "success_once" in summary:
        return f"success_once {percent(summary, 'success_once')}, at_end {percent(summary, 'success_at_end')}"
    low, high = cast("list[float]", summary["return_interval"])
    return f"return {summary['return']:.1f} [{low:.1f}, {high:.1f}]"


# ----------------------------------------------------------------------------------------------------------- videos
def write_mp4(path: Path, frames: Sequence[np.ndarray], fps: int = 20) -> None:
    """Writes frames, uint8 [S, S, 3] with S even, as H.264."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "20", "preset": "veryfast"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


def tile(episodes: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Returns frames that show all episodes in a grid; an episode that is over stands still."""
    columns = math.ceil(math.sqrt(len(episodes)))
    rows = math.ceil(len(episodes) / columns)
    blank = np.zeros_like(episodes[0][0])
    frames = []
    for k in range(max(len(frames) for frames in episodes)):
        cells = [frames[min(k, len(frames) - 1)] for frames in episodes]
        cells += [blank] * (rows * columns - len(cells))
        lines = [np.concatenate(cells[r * columns : (r + 1) * columns], 1) for r in range(rows)]
        frames.append(np.concatenate(lines, 0))
    return frames
