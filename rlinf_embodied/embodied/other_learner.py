"""A learner that does not write checkpoints itself: what it gives to the one that does, so that they are one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rlinf_embodied.config import PolicyConfig

Files = Mapping[str, bytes]  # by name


@dataclass(frozen=True, slots=True)
class OtherLearner:
    """State of a learner, on the CPU, and its policy as the files of its folder."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # groups by name
    files: Files


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """How a checkpoint holds two policies: the writer's own in a folder below, the other's files beside it."""

    own: str  # name of the folder
    other: str  # folder of the other policy as it is while nobody trains it
    policy: PolicyConfig  # the other's section
    more: Mapping[str, object]  # what hierarchy.json says

    def read(self) -> Files:
        """Returns the files of the other policy."""
        paths = (path for path in sorted(Path(self.other).iterdir()) if path.is_file())
        return {path.name: path.read_bytes() for path in paths if path.name not in _CHECKPOINT}


_CHECKPOINT = ("state.json", "manifest.json", "COMPLETE")  # of a folder that is a whole checkpoint


def files_of(write: Callable[[Path], None]) -> Files:
    """Returns what `write` writes to a folder."""
    with tempfile.TemporaryDirectory(prefix="rlinf_embodied-") as folder:
        write(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def write_files(files: Files, folder: Path) -> None:
    """Writes files to a folder that exists."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
