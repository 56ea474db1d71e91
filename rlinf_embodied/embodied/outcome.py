"""What an evaluation found: how often the task was solved, or where it cannot be solved, its return."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from rlinf_embodied.embodied.detectors import WatchedEpisode
from rlinf_embodied.errors import writing
from rlinf_embodied.interfaces.envs import EpisodeEnd
from rlinf_embodied.telemetry.metrics import Rate, mean_interval, percent
from rlinf_embodied.telemetry.paired import PairedRate, paired_mean
from rlinf_embodied.telemetry.trace import Span


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What evaluation found."""

    once: Rate | None  # solved at any time; None of a task without success, whose return is what counts
    at_end: Rate | None  # solved when the episode ends
    mean_return: float
    episode_len: float
    episodes: tuple[WatchedEpisode, ...]
    spans: tuple[Span, ...] = ()
    score: float | None = None  # the share of at_end, or without success the mean return; None: not all were run
    at_most: float = 1.0  # the highest share of at_end that was still possible, if not all were run
    warnings: tuple[str, ...] = ()  # of the detectors
    sampled: tuple[WatchedEpisode, ...] = ()  # eval.sampled_episodes

    def summary(self) -> dict[str, object]:
        """Returns the JSON form (eval_info.json adds what was evaluated)."""
        rates = {"success_once": self.once, "success_at_end": self.at_end}
        found: dict[str, object] = {}
        for name, rate in rates.items():
            found |= {} if rate is None else rate.summary(name)
        return {
            **found,
            "return": self.mean_return,
            "return_interval": list(self.return_interval),
            "episode_len": self.episode_len,
            "num_episodes": len(self.episodes),
            "warnings": list(self.warnings),
            **({"sampled": self.sampling()} if self.sampled else {}),
        }

    def sampling(self) -> dict[str, Any]:
        """Returns the outcome of the sampled episodes, and how it differs from the same greedy ones, as JSON."""
        pairs = list(zip(self.episodes, self.sampled, strict=False))  # of the first seeds
        found: dict[str, Any] = {"num_episodes": len(pairs)}
        for name in ("success_once", "success_at_end") if self.once is not None else ():
            greedy, sampled = ([pair[k].metrics[name] > 0 for pair in pairs] for k in (0, 1))
            compared = PairedRate.of(greedy, sampled)
            found |= Rate(sum(sampled), len(sampled)).summary(name)
            found |= {f"{name}_difference": compared.difference, f"{name}_difference_interval": list(compared.interval)}
        greedy, sampled = ([pair[k].metrics["return"] for pair in pairs] for k in (0, 1))
        found |= {"return": fmean(sampled), "return_interval": list(mean_interval(sampled))}
        return found | {f"return_{key}": value for key, value in paired_mean(greedy, sampled).items()}

    def write_table(self, path: Path, iteration: int) -> None:
        """Writes the episodes to a CSV file, in which those of other iterations stay."""
        rows: list[dict[str, Any]] = [
            {"iteration": iteration, "seed": e.seed, "task": e.task, "instruction": e.instruction}
            | {**e.metrics, "first_success": e.first_success, "video": e.video}
            for e in self.episodes
        ]
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                rows = [row for row in csv.DictReader(file) if row.get("iteration") != str(iteration)] + rows
        with writing(path), path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[-1])
            writer.writeheader()
            writer.writerows(rows)

    def metrics(self) -> dict[str, float]:
        """Returns what goes to the learning curve: if not all were run, the share that was still possible."""
        if self.score is None:
            return {"eval/success_at_end_at_most": self.at_most}
        names = ("success_once", "success_at_end", "return")
        return {f"eval/{n}": cast(float, value) for n, value in self.summary().items() if n in names}

    @property
    def return_interval(self) -> tuple[float, float]:
        """The mean return's 95 % interval, by the normal approximation; a single episode has none and gives itself."""
        return mean_interval([episode.metrics["return"] for episode in self.episodes])

    def by_task(self) -> dict[str, Rate]:
        """Returns how often each task was solved, by its name; {} where the env has one task only."""
        of: dict[str, list[bool]] = {}
        for episode in self.episodes if self.once is not None else ():
            if episode.task:
                of.setdefault(episode.task, []).append(episode.metrics["success_once"] > 0)
        return {name: Rate(sum(solved), len(solved)) for name, solved in of.items()}

    def __str__(self) -> str:
        """Returns, for example, "success_once 63.0 % [56.1, 69.4], at_end 61.0 % [54.1, 67.5] of 200 episodes"."""
        text = f"{shown(self.summary())} of {len(self.episodes)} episodes"
        more = self.sampling() if self.sampled else {}
        name = "return" if self.once is None else "success_once"
        low, high = more.get(f"{name}_difference_interval", (0.0, 0.0))
        differs = low > 0 or high < 0
        return text + (f"; sampled {shown(more)} of {more['num_episodes']} episodes" if differs else "")


def shown(summary: Mapping[str, object]) -> str:
    """Returns the outcome in a summary for people: "success_once 63.0 % [56.1, 69.4], at_end ...", or the return."""
    if "success_once" in summary:
        return f"success_once {percent(summary, 'success_once')}, at_end {percent(summary, 'success_at_end')}"
    low, high = cast("list[float]", summary["return_interval"])
    return f"return {summary['return']:.1f} [{low:.1f}, {high:.1f}]"


def filmed_seeds(table: Path) -> list[int]:
    """Returns the seeds whose episodes the first evaluation of a CSV table filmed; [] if there is no table."""
    if not table.exists():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [int(row["seed"]) for row in rows if row["video"] and row["iteration"] == rows[0]["iteration"]]


def unsolved(episodes: Sequence[EpisodeEnd]) -> list[int]:
    """Returns the seeds of episodes that were not solved."""
    return [episode.seed for episode in episodes if episode.metrics["success_once"] <= 0]


def mostly_unsolved(episodes: Sequence[EpisodeEnd], number: int) -> list[int]:
    """Returns the seeds of `number` episodes: two thirds unsolved and a third solved, or more if one kind is rarer."""
    failures = unsolved(episodes)
    successes = [episode.seed for episode in episodes if episode.seed not in failures]
    few = max(min(len(failures), number - number // 3), number - len(successes))
    return [*failures[:few], *successes[: number - few]]


def episode_means(episodes: Sequence[EpisodeEnd]) -> dict[str, float]:
    """Returns the mean of each metric over episodes; empty without episodes."""
    keys = episodes[0].metrics if episodes else ()
    return {key: sum(e.metrics[key] for e in episodes) / len(episodes) for key in keys}
