"""The files of a second policy in a checkpoint, which one of two learners writes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.config import PolicyConfig

Files = Mapping[str, bytes]  # by name


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
