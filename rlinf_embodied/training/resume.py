"""Finds the checkpoint that a run resumes from, and checks that the settings which define the run are unchanged."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

import yaml

from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import FREE_ON_RESUME, KEPT_ON_RESUME
from rlinf_embodied.config.checks import by_dotted_key
from rlinf_embodied.config.commands import TrainingConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.snapshots import states_of
from rlinf_embodied.learning.checkpoint import MANIFEST, find_latest, link_or_copy, load_state, verify
from rlinf_embodied.learning.learner_stage import StagePart
from rlinf_embodied.learning.weights import VERSIONS
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.training.job import Progress

_ABSENT = "not given"
_MAX_LISTED = 4  # differences in an error
_ORIGIN = "origin"  # subfolder of a run: a copy of the checkpoint that its stages were built from
_Value = TypeVar("_Value")


def checkpoint_to_resume(config: TrainingConfig) -> tuple[Path | None, str]:
    """Returns the checkpoint that a run resumes from, and a note about it; (None, "") for a new run.

    Raises:
        ConfigError: the checkpoint's run had other settings.
        CheckpointError: the checkpoint that `resume` names, or the newest of the run, is missing or damaged.
    """
    path = _find(config)
    if path is None:
        return None, ""
    verify(path)
    _require_same(config, path)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / MANIFEST).stat().st_mtime))
    number, last = saved_progress(path).iteration, config.run.num_iterations
    return path, f"resuming from {path}: iteration {number} of {last} is done, written {written}"


def _find(config: TrainingConfig) -> Path | None:
    """Returns the newest complete checkpoint of a run; an incomplete one only if there is no other."""
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
    """Writes a checkpoint below `root` in the first worker of the first learner.

    It has the state of all learners, of the stages `others`, whose snapshots are StageParts, and plain values `state`
    of the job.  Stages that the workflow lacks are ignored.
    """
    step_context, ahead, present = StepContext(progress.iteration), executor.ahead, executor.workflow.stages
    states, _ = states_of(executor, [stage for stage in others if stage in present], progress.iteration)
    parts = [ref for refs in states.values() for ref in refs]
    for learner in (name for name in learners[1:] if name in present):
        parts += executor.publish(learner, "state_part", step_context)
    parts += [] if ahead is None else ahead.messages(learners[0])
    driver_part = StagePart(state={"progress": asdict(progress), "config": to_yaml(config), **state})
    argument = (str(root), progress.iteration, config.checkpoint.keep, driver_part)
    executor.call(learners[0], "save", step_context, argument, parts)


def load_checkpoint(executor: Executor, checkpoint: Path, stages: Sequence[str]) -> None:
    """Restores stages and copies of their weights from a checkpoint; the first stage is the one that wrote it.

    Stages that the workflow lacks are ignored.
    """
    step_context = StepContext(saved_progress(checkpoint).iteration)
    for stage in stages:
        if stage in executor.workflow.stages:
            executor.call(stage, "load", step_context, str(checkpoint))
    executor.sync_weights()  # other copies have the weights, but not their version
    if executor.ahead is not None:
        earlier = [int(version) for version in cast("list[int]", load_state(checkpoint).get(VERSIONS, []))]
        executor.ahead.begin_again_from(stages[0], checkpoint, earlier, step_context)


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
    saved = _read(checkpoint, "config", lambda text: dict(yaml.safe_load(str(text))))
    different = list(_differences(by_dotted_key(saved), by_dotted_key(yaml.safe_load(to_yaml(config)))))
    if not different:
        return
    listed = "; ".join(f"{key} is {ours!r} here and {before!r} there" for key, before, ours in different[:_MAX_LISTED])
    more = f"; {len(different) - _MAX_LISTED} more differ" if len(different) > _MAX_LISTED else ""
    raise ConfigError(
        f"{listed}{more} (in {checkpoint}), but a run keeps the settings that it began with: use the values there, or "
        f"begin a new run in another run.dir (warm_start.checkpoint={checkpoint} begins with this checkpoint's weights)"
    )


def _differences(before: dict[str, object], now: dict[str, object]) -> Iterator[tuple[str, object, object]]:
    """Yields (key, value before, value now) of settings that must not change; different notations of a path are equal.

    A key that was missing may be new in this version, except among options.
    """
    for key in dict.fromkeys((*now, *before)):
        if key.startswith(FREE_ON_RESUME) and key not in KEPT_ON_RESUME:
            continue
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        same = old == new or (isinstance(old, str) and isinstance(new, str) and _resolved(old) == _resolved(new))
        if not same and (old not in (_ABSENT, {}) or ".options." in key):
            yield key, old, new


def _resolved(text: str) -> str:
    return os.path.realpath(os.path.expanduser(text))


def outliving(checkpoint: Path, run: Path) -> Path:
    """Returns a copy of a checkpoint, which stays when the run deletes old checkpoints.

    A checkpoint of another run is returned unchanged.  Files are hard links where possible.
    """
    folder = run / _ORIGIN
    if not checkpoint.resolve().is_relative_to(run.resolve()) or checkpoint.resolve() == folder.resolve():
        return checkpoint
    fresh = run / f".{_ORIGIN}.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(checkpoint.resolve(), fresh, copy_function=link_or_copy)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder
