"""Where a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning.checkpoint import find_latest, load_state, verify
from rlinf_embodied.training.job import JobConfig, Progress


def checkpoint_to_resume(config: JobConfig) -> Path | None:
    """Returns the checkpoint that a run goes on from, whole and undamaged; None for a new run.

    Raises:
        ConfigError: the run folder is in use and resume=never.
        CheckpointError: the checkpoint is missing or damaged.
    """
    path = _find(config)
    if path is not None:
        verify(path)
    return path


def _find(config: JobConfig) -> Path | None:
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
