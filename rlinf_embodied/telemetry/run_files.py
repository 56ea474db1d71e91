"""Small files of a run, which a full disk of the driver leaves unwritten: one error for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf_embodied.errors import RunFileError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names a file that cannot be written in the block, and what to do.

    Raises:
        RunFileError: an OSError was raised.
    """
    try:
        yield
    except OSError as error:
        raise RunFileError(
            f"{path} cannot be written ({error.strerror or error}): free space on the disk of run.dir, for example of "
            "older runs, or see that it may be written, then give the same command again: a training goes on from its "
            "newest checkpoint"
        ) from error
