"""The protocol of jobs: the part of a training run that depends on its workflow.  `Trainer` has the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config.commands import TrainingConfig
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.planning.pricing import Standing
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import Workflow


@dataclass(slots=True)
class Progress:
    """State of a run in addition to that of its stages; part of every checkpoint."""

    iteration: int = 0  # the next one
    global_step: int = 0  # env steps, or tokens
    rollout_s: float = 0.0  # seconds of RL so far
    counts: dict[str, int] = field(default_factory=dict)  # further counts of the job
    before: dict[str, object] | None = None  # the evaluation of the starting policy
    reached: float | None = None  # the goal, once a check has reached it
    # "score" and "iteration" of the best check, or in a run without checks of the best evaluation; its weights are kept
    best: dict[str, float] | None = None
    returned: bool = False  # whether the run ended without reaching its goal, and restored these weights
    checks_s: float = 0.0  # seconds of checks so far
    staleness: int | None = None  # of the run's plans; None: no iteration has run


class Evaluated(Protocol):
    """The result of an evaluation; str() gives one line for people."""

    @property
    def spans(self) -> Sequence[Span]: ...

    @property
    def score(self) -> float | None:
        """Higher is better; None if the evaluation ended early, because it could no longer equal the best score."""
        ...

    def summary(self) -> dict[str, object]:
        """Returns JSON-ready data."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns metrics for the learning curve, under `eval/`; only bounds if the evaluation ended early."""
        ...


class Evaluating(Protocol):
    """The evaluation stages of a session."""

    stage: str  # that holds a copy of the weights
    shares_with: str | None  # the training stage whose copy it uses in the same worker; None: the learners
    executor: Executor  # of these stages

    def run(self, step: int, best: float | None = None, last: bool = False) -> Evaluated:
        """Evaluates the current weights; `last`: it is the run's last evaluation.

        A check of a goal may end early if it can no longer reach the score `best`.
        """
        ...


class Job(Protocol):
    """One training of a workflow."""

    @property
    def config(self) -> TrainingConfig: ...

    name: str  # short, for files: "PickCube-v1"
    columns: tuple[Column, ...]  # of the live view
    speed: str  # name of the metric of global steps per second
    learners: tuple[str, ...]  # stages that train and export weights; the first one writes checkpoints
    work: str  # kind of work, for people: "RL"
    first_work: str  # end of the name of the first span that is work, for example "env.step"
    eval_every: int  # iterations between evaluations; 0: before and after only
    cache_dir: str

    def planning_parts(self) -> dict[str, object]:
        """Returns the parts of the config that determine the stages' times."""
        ...

    def standing(self, cluster: Cluster) -> Sequence[Standing]:
        """Returns the stages of evaluations and checks that stay in memory during training."""
        ...

    def require_staleness(self, staleness: int) -> None:
        """Raises a ConfigError if the algorithm does not correct for weights this number of versions behind."""
        ...

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """Raises a CheckpointError if a run cannot resume from a checkpoint, or start from its policy (None)."""
        ...

    def workflow(self, policy_folder: str, profiled: bool = False) -> Workflow:
        """Returns the graph, or the one that a profile measures; all stages load the policy from that folder."""
        ...

    def starting_policy(self, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
        """Returns the policy folder that a new run starts from, which may be created in the cache."""
        ...

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """Prepares new stages before their first iteration."""
        ...

    def evaluation(self, session: Session, cluster: Cluster, policy_folder: str, folder: RunFolder) -> Evaluating:
        """Builds the evaluation's stages in addition to those of training."""
        ...

    check_every: int  # iterations between checks of the goal

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> Evaluating | None:
        """Builds the stages that check the run's goal, a score of run.until_success; returns None without a goal."""
        ...

    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """Runs one iteration and adds its counts to `progress`; returns its result and metrics."""
        ...

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Writes a checkpoint of all stages below a root folder."""
        ...

    def load(self, executor: Executor, checkpoint: Path) -> None:
        """Restores all stages from a checkpoint."""
        ...

    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        """Returns the entries of summary.json in addition to those of every run."""
        ...

    def finish(self, folder: RunFolder, before: Mapping[str, object], after: Evaluated) -> tuple[list[str], str]:
        """Draws the curve; returns lines to print, and the beginning of the last line."""
        ...
