"""A training and the curve that it left."""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from experiments.bench.harness import REPOSITORY, Child
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class Curve:
    """What one training gave."""

    seed: int
    steps: list[int]  # env steps, or updates
    returns: list[float]  # of greedy held-out episodes, at these steps
    success: list[float]  # the share of them that is solved at any time; [] of a task without success
    steps_per_s: float  # once it learns
    plan: str = ""
    digest: str = ""
    before: dict[str, Any] = field(default_factory=dict)  # evaluations with their 95 % intervals
    after: dict[str, Any] = field(default_factory=dict)
    cpu_s: float = 0.0  # of the whole command, evaluations and imports included

    @property
    def last(self) -> float:
        """The return at the end."""
        return self.returns[-1]

    @property
    def scores(self) -> list[float]:
        """What the task is about: success in per cent, or else the return."""
        return [100 * share for share in self.success] or self.returns


def seeds_of(given: str) -> list[int]:
    """Returns the seeds of an argument, as "0,1,2".

    Raises:
        ConfigError: they are no numbers.
    """
    try:
        return [int(text) for text in given.split(",")]
    except ValueError:
        raise ConfigError(f"seeds is {given!r}, but seeds are whole numbers: use seeds=0,1,2") from None


def kept(place: Path, asked: dict[str, Any], train: Callable[[], Curve]) -> Curve:
    """Returns the curve in a folder, which is trained now unless it has been trained there as `asked`.

    Raises:
        ConfigError: it was trained with other settings.
    """
    file = place / "curve.json"
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["asked"] != asked:
            raise ConfigError(f"{place} holds a training with other settings: use another folder=, or remove it")
        return Curve(**found["curve"])
    shutil.rmtree(place, ignore_errors=True)  # one that was interrupted
    made = train()
    place.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"asked": asked, "curve": asdict(made)}), encoding="utf-8")
    return made


def trained(words: Sequence[str], seed: int, folder: Path, points: int) -> Curve:
    """Trains with one seed in a new folder, by experiments/train_vla.py, and returns its curve.

    Raises:
        ConfigError: the words make no training.
        WorkerError: the training failed; its log is named.
    """
    config = compose_train(words)
    folder.mkdir(parents=True)
    every = max(1, config.run.num_iterations // points)
    own = [f"run.seed={seed}", f"run.dir={folder / 'run'}", f"eval.every={every}", "eval.record_video=false"]
    whole = [sys.executable, str(REPOSITORY / "experiments/train_vla.py"), *words, *own]
    before = _children_s()
    Child(f"seed {seed}", whole, folder / "log.txt", {}, cwd=REPOSITORY).wait()
    return read_curve(folder / "run", seed, config, _children_s() - before)


def _children_s() -> float:
    """Returns the processor seconds of the processes that were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_curve(folder: Path, seed: int, config: TrainConfig, cpu_s: float = 0.0) -> Curve:
    """Returns the curve that a run left."""
    rows, summary = read_metrics(folder), json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    before, after = summary["before"], summary["after"]
    asked = [row for row in rows if "eval/return" in row]
    first = config.algorithm.typical_iteration(config.env)
    learning = [row["charts/SPS"] for row in rows[first + 1 :]]
    success = [before.get("success_once"), *(row.get("eval/success_once") for row in asked), after.get("success_once")]
    return Curve(
        seed=seed,
        steps=[0, *(int(row["global_step"]) for row in asked), int(rows[-1]["global_step"])],
        returns=[before["return"], *(row["eval/return"] for row in asked), after["return"]],
        success=[value for value in success if value is not None],
        steps_per_s=statistics.median(learning) if learning else 0.0,
        plan=summary["plan"],
        digest=summary["weights_sha256"],
        before=before,
        after=after,
        cpu_s=cpu_s,
    )


_COLOURS = ("#1f5f8b", "#b4552d", "#4b8b3b", "#8a5aa8", "#c9a227", "#6d6d6d")


def draw(panels: Mapping[str, Mapping[str, Sequence[Curve]]], units: Mapping[str, str], path: Path) -> None:
    """Draws a panel for each title, over its unit: every curve thinly, and the mean of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 if len(panels) == 1 else 4.2 * len(panels), 4.0))
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for colour, (name, several) in zip(cycle(_COLOURS), curves.items(), strict=False):
            for curve in several:
                axes.plot(curve.steps, curve.scores, color=colour, lw=0.8, alpha=0.4)
            length = min(len(curve.steps) for curve in several)
            mean = [statistics.mean(curve.scores[k] for curve in several) for k in range(length)]
            label = f"{name}, mean of {len(several)} seeds"
            axes.plot(several[0].steps[:length], mean, color=colour, lw=2, label=label)
        solves = any(curve.success for several in curves.values() for curve in several)
        axes.set(xlabel=units[title], ylabel="success, %" if solves else "return", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
