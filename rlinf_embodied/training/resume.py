"""Where a run resumes, and whether it is the same run: the settings that define a run do not change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml

from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import FREE_ON_RESUME, KEPT_ON_RESUME
from rlinf_embodied.config.commands import TrainingConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.learning.checkpoint import MANIFEST, find_latest, load_state, verify
from rlinf_embodied.training.job import Progress

# keys whose values are places of files
_PATH_KEYS = (
    *("run.dir", "resume", "plan.file", "plan.profile", "policy.folder", "data", "data.files"),
    *("hierarchy.checkpoint", "warm_start.checkpoint", "warm_start.demonstrations"),
    *("warm_start.cache_dir"),
)
_ABSENT = "not given"
_SHOWN = 4  # differences in an error
_START = "warm_start.checkpoint"  # the key that begins a run with another one's policy


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint that a run resumes from, complete and undamaged."""

    path: Path
    note: str  # says which one


def require_unused(config: TrainingConfig) -> None:
    """Checks that resume=never meets a folder that no run has used.

    Raises:
        ConfigError: one has.
    """
    names = ("metrics.jsonl", "checkpoints") if config.resume == "never" and config.run.dir is not None else ()
    if any((Path(config.run.dir or "") / name).exists() for name in names):
        raise ConfigError(
            f"run.dir is {config.run.dir!r}, but it holds another run and resume=never: "
            "use another run.dir, or resume=auto to go on"
        )


def checkpoint_to_resume(config: TrainingConfig) -> Resumption | None:
    """Returns where a run resumes; None for a new run.

    Raises:
        ConfigError: the checkpoint is of another run than the config describes.
        CheckpointError: the checkpoint that resume names, or the newest of the run, is missing or damaged.
    """
    path = _found(config)
    if path is None:
        return None
    verify(path)
    state = load_state(path)
    _require_same(config, path, _config(path, state))
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / MANIFEST).stat().st_mtime))
    number, last = _progress(path, state).iteration, config.run.num_iterations
    return Resumption(path, f"going on from {path}: iteration {number} of {last} is done, written {written}")


def saved_progress(path: Path) -> Progress:
    """Returns the progress of the run that wrote a checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another version.
    """
    return _progress(path, load_state(path))


def _progress(path: Path, state: Mapping[str, object]) -> Progress:
    with _readable(path, "progress"):
        return Progress(**cast(dict, state["progress"]))


def _config(path: Path, state: Mapping[str, object]) -> dict[str, object]:
    """Returns the config of the run that wrote a checkpoint, as plain data."""
    with _readable(path, "config"):
        return dict(yaml.safe_load(str(state["config"])))


@contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{path}/state.json has a {what} that cannot be read ({error}): resume with the version of this project "
            "that wrote it, or use another checkpoint"
        ) from error


# ---------------------------------------------------------------------------------------------------------------- find
def _found(config: TrainingConfig) -> Path | None:
    """Returns the newest checkpoint of a run; one that is no whole checkpoint where there are only such."""
    if config.resume in ("auto", "never"):
        root = None if config.run.dir is None else Path(config.run.dir) / "checkpoints"
        return None if root is None else find_latest(root) or max(root.glob("step_*"), default=None)
    named = Path(config.resume)
    return (find_latest(named.parent) or named) if named.name == "latest" else named


# ------------------------------------------------------------------------------------------------------------ the same
def _require_same(config: TrainingConfig, checkpoint: Path, theirs: Mapping[str, object]) -> None:
    different = list(_differences(config, theirs))
    if not different:
        return
    listed = "; ".join(f"{key} is {ours!r} here and {before!r} there" for key, before, ours in different[:_SHOWN])
    more = f"; {len(different) - _SHOWN} more differ" if len(different) > _SHOWN else ""
    raise ConfigError(
        f"{listed}{more}, but {checkpoint} is of the run that began as it is there, and a run stays what it is: "
        "go on with its own values, or begin a new run in another run.dir (resume=never sees to it that it is a new "
        f"one; {_START}={checkpoint} begins with what this one has learned)"
    )


def _differences(config: TrainingConfig, theirs: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """Yields (key, value there, value here) of what must be the same.

    A key that is missing there belongs to a later version and may be new, unless it is one of free options.
    """
    before, here = _flat(theirs), _flat(yaml.safe_load(to_yaml(config)))
    for key in dict.fromkeys((*here, *before)):
        if key.startswith(FREE_ON_RESUME) and key not in KEPT_ON_RESUME:
            continue
        old, new = before.get(key, _ABSENT), here.get(key, _ABSENT)
        if not _equal(key, old, new) and (old != _ABSENT or ".options." in key):
            yield key, old, new


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns the values of nested sections by their whole keys."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found


def _equal(key: str, before: object, here: object) -> bool:
    """Returns whether two values are the same; two ways to write one path are."""
    if key in _PATH_KEYS and isinstance(before, str) and isinstance(here, str):
        return Path(before).expanduser().resolve() == Path(here).expanduser().resolve()
    return before == here
