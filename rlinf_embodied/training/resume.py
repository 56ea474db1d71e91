"""Where a run resumes, and whether it is the same run: the settings that define a run do not change."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

import yaml

from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import FREE_ON_RESUME, KEPT_ON_RESUME
from rlinf_embodied.config.commands import TrainingConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.snapshots import states_of
from rlinf_embodied.learning.checkpoint import MANIFEST, find_latest, load_state, verify
from rlinf_embodied.learning.learner_stage import StagePart
from rlinf_embodied.learning.weights import earlier_versions
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.training.job import Progress

_ABSENT = "not given"
_SHOWN = 4  # differences in an error
_ORIGIN = "origin"  # of a run folder: the checkpoint that its stages were built from
_Value = TypeVar("_Value")


def checkpoint_to_resume(config: TrainingConfig) -> tuple[Path | None, str]:
    """Returns the checkpoint that a run resumes from, and a note that says so; (None, "") for a new run.

    Raises:
        ConfigError: the checkpoint is of another run than the config describes.
        CheckpointError: the checkpoint that resume names, or the newest of the run, is missing or damaged.
    """
    path = _found(config)
    if path is None:
        return None, ""
    verify(path)
    _require_same(config, path)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / MANIFEST).stat().st_mtime))
    number, last = saved_progress(path).iteration, config.run.num_iterations
    return path, f"resuming from {path}: iteration {number} of {last} is done, written {written}"


def _found(config: TrainingConfig) -> Path | None:
    """Returns the newest checkpoint of a run; one that is no whole checkpoint where there are only such."""
    if config.resume == "auto":
        root = None if config.run.dir is None else Path(config.run.dir) / "checkpoints"
        return None if root is None else find_latest(root) or max(root.glob("step_*"), default=None)
    named = Path(config.resume)
    return (find_latest(named.parent) or named) if named.name == "latest" else named


def saved_progress(path: Path) -> Progress:
    """Returns the progress of the run that wrote a checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another version.
    """
    return _read(path, "progress", lambda value: Progress(**cast(dict, value)))


def save_checkpoint(
    executor: Executor,
    root: Path,
    progress: Progress,
    config: TrainingConfig,
    learners: Sequence[str],
    others: Sequence[str] = (),
    state: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Has the first of the learners write a checkpoint below `root`, with the state of all and plain values of the job.

    `others` are further stages, whose snapshots are StageParts; stages that the workflow lacks are left out.
    """
    step_context, ahead, present = StepContext(progress.iteration), executor.ahead, executor.workflow.stages
    states = states_of(executor, [stage for stage in others if stage in present], progress.iteration)
    parts = [ref for refs in states.values() for ref in refs]
    for learner in (name for name in learners[1:] if name in present):
        parts += executor.publish(learner, "state_part", step_context)
    parts += [] if ahead is None else ahead.messages(learners[0])
    own = StagePart(state={"progress": asdict(progress), "config": to_yaml(config), **state})
    argument = (str(root), progress.iteration, config.checkpoint.keep, own)
    executor.call(learners[0], "save", step_context, argument, parts)


def load_checkpoint(executor: Executor, checkpoint: Path, stages: Sequence[str]) -> None:
    """Brings stages, the one that writes checkpoints first, and copies of their weights into a checkpoint's state.

    Those that the workflow lacks are left out.
    """
    step_context = StepContext(saved_progress(checkpoint).iteration)
    for stage in stages:
        if stage in executor.workflow.stages:
            executor.call(stage, "load", step_context, str(checkpoint))
    executor.sync_weights()  # copies elsewhere hold the weights, but not their version
    if executor.ahead is not None:
        executor.ahead.begin_again_from(stages[0], checkpoint, earlier_versions(checkpoint), step_context)


def _read(path: Path, what: str, read: Callable[[object], _Value]) -> _Value:
    state = load_state(path)
    try:
        return read(state[what])
    except (KeyError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{path}/state.json has a {what} that cannot be read ({error}): resume with the version of this project "
            "that wrote it, or use another checkpoint"
        ) from error


def _require_same(config: TrainingConfig, checkpoint: Path) -> None:
    theirs = _read(checkpoint, "config", lambda text: dict(yaml.safe_load(str(text))))
    different = list(_differences(_flat(theirs), _flat(yaml.safe_load(to_yaml(config)))))
    if not different:
        return
    listed = "; ".join(f"{key} is {ours!r} here and {before!r} there" for key, before, ours in different[:_SHOWN])
    more = f"; {len(different) - _SHOWN} more differ" if len(different) > _SHOWN else ""
    raise ConfigError(
        f"{listed}{more}, but {checkpoint} is of the run that began as it is there, and a run stays what it is: "
        f"keep its values, or begin a new run in another run.dir (warm_start.checkpoint={checkpoint} begins "
        "with what this one has learned)"
    )


def _differences(before: dict[str, object], here: dict[str, object]) -> Iterator[tuple[str, object, object]]:
    """Yields (key, value there, value here) of what must be the same; two ways to write one path are.

    A key that is missing there belongs to a later version and may be new, unless it is one of free options.
    """
    for key in dict.fromkeys((*here, *before)):
        if key.startswith(FREE_ON_RESUME) and key not in KEPT_ON_RESUME:
            continue
        old, new = before.get(key, _ABSENT), here.get(key, _ABSENT)
        same = old == new or (isinstance(old, str) and isinstance(new, str) and _resolved(old) == _resolved(new))
        if not same and (old != _ABSENT or ".options." in key):
            yield key, old, new


def _resolved(text: str) -> str:
    return os.path.realpath(os.path.expanduser(text))


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns the values of nested sections by their whole keys."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found


def outliving(checkpoint: Path, run: Path) -> Path:
    """Returns a folder with the files of a checkpoint that stays when the run's own old checkpoints are dropped.

    One of another run is not dropped by this one, and stays where it is.  Files are linked where that is possible.
    """
    folder = run / _ORIGIN
    if not checkpoint.resolve().is_relative_to(run.resolve()) or checkpoint.resolve() == folder.resolve():
        return checkpoint
    fresh = run / f".{_ORIGIN}.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(checkpoint.resolve(), fresh, copy_function=_link)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
