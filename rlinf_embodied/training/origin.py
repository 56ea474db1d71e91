"""The checkpoint that stages are built from, for as long as they may have to be built again."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

_NAME = "origin"


def outliving(checkpoint: Path, run: Path) -> Path:
    """Returns a folder with the files of a checkpoint that stays when the run's own old checkpoints are dropped.

    One of another run is not dropped by this one, and stays where it is.  Files are linked where that is possible.
    """
    folder = run / _NAME
    if not checkpoint.resolve().is_relative_to(run.resolve()) or checkpoint.resolve() == folder.resolve():
        return checkpoint
    fresh = run / f".{_NAME}.partial"
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
