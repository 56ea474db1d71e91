"""Where a run resumes, and whether it is the same run: the settings that define a run do not change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import cast

import yaml

from rlinf_embodied.compose import keys, to_yaml
from rlinf_embodied.config import FREE_ON_RESUME, KEPT_ON_RESUME
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.learning.checkpoint import Newest, load_state, newest_undamaged, verify
from rlinf_embodied.training.job import JobConfig, Progress

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
    note: str  # says which one, and why not a newer one


def require_unused(config: JobConfig) -> None:
    """Checks that resume=never meets a folder that no run has used.

    Raises:
        ConfigError: one has.
    """
    if config.resume == "never" and config.run.dir is not None and _used(Path(config.run.dir)):
        raise ConfigError(
            f"run.dir is {config.run.dir!r}, but it holds another run and resume=never: "
            "use another run.dir, or resume=auto to go on"
        )


def _used(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def checkpoint_to_resume(config: JobConfig) -> Resumption | None:
    """Returns where a run resumes; None for a new run.

    A damaged newest checkpoint of the run's own folder is passed over; one that resume=<path> names is refused.

    Raises:
        ConfigError: the checkpoint is of another run than the config describes.
        CheckpointError: the named checkpoint is missing or damaged, or there are some and none can be used.
    """
    found = _found(config)
    if found is None or found.path is None:
        return None
    state = load_state(found.path)
    _require_same(config, found.path, _config(found.path, state))
    return Resumption(found.path, _note(config, found, _progress(found.path, state)))


def saved_progress(path: Path) -> Progress:
    """Returns the progress of the run that wrote a checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another version.
    """
    return _progress(path, load_state(path))


def _progress(path: Path, state: Mapping[str, object]) -> Progress:
    try:
        return Progress(**cast(dict, state["progress"]))
    except (KeyError, TypeError) as error:
        raise _foreign(path, "progress", error) from error


def _config(path: Path, state: Mapping[str, object]) -> dict[str, object]:
    """Returns the config of the run that wrote a checkpoint, as plain data."""
    try:
        return dict(yaml.safe_load(str(state["config"])))
    except (KeyError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _foreign(path, "config", error) from error


def _foreign(path: Path, what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}/state.json has a {what} that cannot be read ({error}): go on with the version of this project that "
        "wrote it, or use another checkpoint"
    )


# ---------------------------------------------------------------------------------------------------------------- find
def _found(config: JobConfig) -> Newest | None:
    if config.resume in ("auto", "never"):
        return None if config.run.dir is None else _newest(Path(config.run.dir) / "checkpoints")
    path = Path(config.resume)
    found = _newest(path.parent) if path.name == "latest" else None
    if found is None or found.path is None:
        verify(path)
        return Newest(path, ())
    return found


def _newest(root: Path) -> Newest:
    found = newest_undamaged(root)
    if found.path is None and found.unusable:
        raise CheckpointError(
            f"{root} holds checkpoints, but none can be used: {'; '.join(found.unusable)}. Bring one back from a copy, "
            f"use another run.dir, or remove {root} to begin anew"
        )
    return found


def _note(config: JobConfig, found: Newest, progress: Progress) -> str:
    assert found.path is not None
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((found.path / "COMPLETE").stat().st_mtime))
    lines = [f"{text}: it is not used, the one before it is" for text in found.unusable]
    number, last = progress.iteration, config.run.num_iterations
    lines.append(f"going on from {found.path}: iteration {number} of {last} is done, written {written}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ the same
def _require_same(config: JobConfig, checkpoint: Path, theirs: Mapping[str, object]) -> None:
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


def _differences(config: JobConfig, theirs: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """Yields (key, value there, value here) of what must be the same; keys that the checkpoint does not know may be."""
    mine = cast(dict, yaml.safe_load(to_yaml(config)))
    for key in _entries(mine, keys(type(config))):
        if key.startswith(FREE_ON_RESUME) and key not in KEPT_ON_RESUME:
            continue
        before, here = _at(theirs, key), _at(mine, key)
        if before in (_ABSENT, here):
            continue
        if isinstance(before, dict) and isinstance(here, dict):
            for name in sorted({*before, *here}):
                old, new = before.get(name, _ABSENT), here.get(name, _ABSENT)
                if not _equal(key, old, new):
                    yield f"{key}.{name}", old, new
        elif not _equal(key, before, here):
            yield key, before, here


def _entries(tree: Mapping[str, object], known: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yields the key of every entry that is no section; the section `algorithm` has more than its base class says."""
    for name, value in tree.items():
        key = prefix + name
        if is_dataclass(known.get(key)) and isinstance(value, Mapping):
            yield from _entries(value, known, f"{key}.")
        else:
            yield key


def _at(tree: object, key: str) -> object:
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return _ABSENT
        tree = tree[name]
    return tree


def _equal(key: str, before: object, here: object) -> bool:
    """Whether two values are the same; two ways to write one place are."""
    if key in _PATH_KEYS and isinstance(before, str) and isinstance(here, str):
        return Path(before).expanduser().resolve() == Path(here).expanduser().resolve()
    return before == here
