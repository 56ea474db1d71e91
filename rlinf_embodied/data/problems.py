"""Problems, their split for training and tests, and the streams that a run draws them from.

A stream is an endless list (or a finite one, for held-out files): position i of a split's stream is always the same
problem, on every worker.  A batch is a range of positions, so only a counter has to be saved.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable


class Split(StrEnum):
    """The use of a problem; each question belongs to exactly one split."""

    train = "train"
    validation = "validation"
    test = "test"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question whose answer can be checked.

    For example question "7+8-9=", answer "6", solution "7+8=15;15-9=6;", family "sum".
    """

    id: int  # position in its split's stream, plus an offset by split, so that no two splits share an id
    question: str
    answer: str
    solution: str | None  # worked steps that lead to the answer; None if the data has none
    family: str  # "sum", "chain", or "text" for questions in words
    level: str  # for example "sum4-6-9"; a file's name for questions in words
    columns: Mapping[str, object] = field(default_factory=dict, hash=False)  # values of data.columns in its row
    history: tuple[tuple[str, str], ...] = ()  # messages of the chat before the question: (role, text)

    @property
    def key(self) -> str:
        """An id of the question that is the same in all epochs, for example "8a3c51f0e2b94d77"."""
        return hashlib.blake2b(f"{self.history}{self.question}".encode(), digest_size=8).hexdigest()


@runtime_checkable
class ProblemSource(Protocol):
    """Streams of problems, one per split; no question is in two of them."""

    def size(self, split: Split) -> int | None:
        """Returns the number of different problems of the split; None for an endless stream."""
        ...

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """Returns the problems at positions start .. start + count - 1 of the split's stream."""
        ...


def split_of(question: str) -> Split:
    """Returns the split that a question belongs to: a tenth are for tests, a twentieth for validation.

    It is determined by a hash of the question's text, so splits are disjoint for all seeds and positions.
    """
    bucket = zlib.crc32(question.encode()) % 20
    return Split.test if bucket < 2 else Split.validation if bucket < 3 else Split.train


def problem_id(split: Split, position: int) -> int:
    """Returns a unique id of a (split, position); positions are below 2^40."""
    assert 0 <= position < 1 << 40, position
    return list(Split).index(split) << 40 | position
