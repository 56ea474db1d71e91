"""Where a run goes on: which checkpoint it starts from, and what is written into one and read back.

A checkpoint holds weights and optimizers (written by the actor's workers), the episodes that go on across iterations
(gathered from the env's workers), and the run's progress.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.policy_folder import require_conditions, require_policy_folder
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.checkpoint import find_latest, load_state, verify
from rlinf_embodied.runtime.host import Tick
from rlinf_embodied.runtime.session import of_type


@dataclass(slots=True)
class Progress:
    """What a run carries from iteration to iteration beside weights and optimizer; part of every checkpoint."""

    iteration: int = 0  # the next one
    env_steps: int = 0
    rollout_s: float = 0.0  # seconds of RL so far
    success_before: dict[str, object] | None = None


def checkpoint_to_resume(config: TrainConfig) -> Path | None:
    """Returns the checkpoint that a run goes on from, None for a new run, whose starting policy is checked instead.

    Raises:
        ConfigError: the run folder is in use and resume=never.
        CheckpointError: the checkpoint to resume from, or to start from, is missing, damaged or foreign.
    """
    path = _find_resume(config)
    if path is not None:
        verify(path)
        require_conditions("resume", path, config.env, config.policy, free=())
    elif config.warm_start.checkpoint is not None:
        require_policy_folder("warm_start.checkpoint", config.warm_start.checkpoint)
        start = Path(config.warm_start.checkpoint)
        require_conditions("warm_start.checkpoint", start, config.env, config.policy, free=("task", "camera_fov"))
    return path


def _find_resume(config: TrainConfig) -> Path | None:
    if config.resume not in ("auto", "never"):
        path = Path(config.resume)
        return (find_latest(path.parent) if path.name == "latest" else None) or path
    if config.run.dir is None:
        return None
    folder = Path(config.run.dir)
    used = any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    if config.resume == "never" and used:
        raise ConfigError(
            f"run.dir is {config.run.dir!r}, but it holds another run and resume=never: "
            "use another run.dir, or resume=auto to go on"
        )
    return find_latest(folder / "checkpoints") if (folder / "checkpoints").exists() else None


def saved_progress(path: Path) -> Progress:
    """Returns the progress of the run that wrote a checkpoint."""
    return Progress(**cast(dict, load_state(path)["progress"]))


def save(executor: Executor, folder: Path, progress: Progress, config: TrainConfig) -> None:
    """Writes a checkpoint of all stages into a folder of them, and drops those beyond `checkpoint.keep`."""
    tick = Tick(progress.iteration)
    carry_over: dict[int, object] = {}
    for part in of_type(executor.call("env", "export_state", tick), dict):
        carry_over |= part
    state = {"progress": asdict(progress), "config": to_yaml(config)}
    executor.call("actor", "save", tick, (str(folder), progress.iteration, config.checkpoint.keep, state, carry_over))


def load(executor: Executor, path: Path) -> Progress:
    """Brings all stages into the state of a checkpoint and returns its progress."""
    progress = saved_progress(path)
    tick = Tick(progress.iteration)
    executor.call("actor", "load", tick, str(path))
    for edge in executor.workflow.weight_edges:  # copies elsewhere hold the weights, but not their version
        executor.sync_weights(edge.source, edge.target)
    carry_over = executor.call("actor", "load_carry_over", tick, str(path))[0]
    if carry_over:
        executor.call("env", "import_state", tick, carry_over)
    return progress
