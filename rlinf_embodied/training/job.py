"""What a workflow brings to a training run; `Trainer` does the rest, and knows nothing of envs or tokens."""

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
    """What a run carries from iteration to iteration in addition to the stages' state; part of every checkpoint."""

    iteration: int = 0  # the next one
    global_step: int = 0  # env steps, or tokens
    rollout_s: float = 0.0  # seconds of RL so far
    counts: dict[str, int] = field(default_factory=dict)  # what else the job counts
    before: dict[str, object] | None = None  # the evaluation of the starting policy
    reached: float | None = None  # the goal that a check found reached
    best: dict[str, float] | None = None  # "score" and "iteration" of the best check, or of the best evaluation of a
    # run without checks; its weights are kept
    returned: bool = False  # whether the run, over without having reached its goal, went back to these weights
    checks_s: float = 0.0  # seconds of checks so far
    staleness: int | None = None  # of its plans; None: no iteration has run


class Evaluated(Protocol):
    """The result of an evaluation; its text is one line for people."""

    @property
    def spans(self) -> Sequence[Span]: ...

    @property
    def score(self) -> float | None:
        """Higher is better; None if it ended early, because it could only be worse than the best so far."""
        ...

    def summary(self) -> dict[str, object]:
        """Returns the JSON form."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns what goes to the learning curve, under `eval/`; if it ended early, bounds only."""
        ...


class Evaluating(Protocol):
    """The evaluation stages of a session."""

    stage: str  # the one that holds a copy of the weights
    executor: Executor  # of these stages

    def run(self, step: int, best: float | None = None) -> Evaluated:
        """Evaluates the weights as they are now; what checks a goal may end where `best`, a score, is out of reach."""
        ...


class Job(Protocol):
    """One training, as its workflow sees it."""

    @property
    def config(self) -> TrainingConfig: ...

    name: str  # short, for files: "PickCube-v1"
    columns: tuple[Column, ...]  # of the live view
    speed: str  # name of the metric that counts global steps per second
    learners: tuple[str, ...]  # stages that train weights, and export them; the first one writes checkpoints
    work: str  # what the run's time is spent on, for people: "RL"
    first_work: str  # the end of the name of the spans with which work begins, for example "env.step"
    eval_every: int  # iterations between evaluations; 0: before and after only
    cache_dir: str

    def planning_parts(self) -> dict[str, object]:
        """Returns the parts of the config that the stages' times depend on."""
        ...

    def standing(self, cluster: Cluster) -> Sequence[Standing]:
        """Returns the copies of the workflow's stages that evaluations and checks keep in memory during training."""
        ...

    def require_staleness(self, staleness: int) -> None:
        """Raises a ConfigError if nothing corrects for data from weights this number of versions behind."""
        ...

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """Raises a CheckpointError if a run cannot resume from a checkpoint, or a new run (None) from its policy."""
        ...

    def workflow(self, policy_folder: str) -> Workflow:
        """Returns the graph; every copy of the policy starts from that folder."""
        ...

    def starting_policy(self, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
        """Returns the folder that a new run starts from; what is made is cached."""
        ...

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """Has new stages do what they do once before their first iteration; mostly nothing."""
        ...

    def evaluation(self, session: Session, cluster: Cluster, policy_folder: str, folder: RunFolder) -> Evaluating:
        """Builds the evaluation's stages in addition to those of training."""
        ...

    check_every: int  # iterations between checks of the goal

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> Evaluating | None:
        """Builds the stages that check the run's goal, a score of run.until_success; None where there is none."""
        ...

    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """Runs one iteration, adds to `progress` what it counted, and returns what came back and its metrics."""
        ...

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Writes a checkpoint of all stages below a folder of them."""
        ...

    def load(self, executor: Executor, checkpoint: Path) -> None:
        """Brings all stages into the state of a checkpoint."""
        ...

    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        """Returns the entries of summary.json in addition to those of every run."""
        ...

    def finish(self, folder: RunFolder, before: Mapping[str, object], after: Evaluated) -> tuple[list[str], str]:
        """Draws the curve; returns lines to print, and the beginning of the last one."""
        ...
