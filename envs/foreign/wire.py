"""The protocol between an env and the processes of a foreign simulator: plain values and arrays over a pipe.

The two sides have different versions of numpy, whose pickles are incompatible, so arrays travel as their bytes.  Each
question has one answer:

    open      adapter, task, options, cameras   -> opened: Facts
    reset     rows, starts (Start as a list)    -> state of these rows
    step      rows; actions [R, A]              -> state of these rows
    images    rows                              -> images [R, K, H, W, 3]
    images    rows, film (a size)               -> images [R, H, W, 3]
    expert    rows                              -> actions [R, A]
    any of them                                 -> error: text

State is arrays by name, each [R, ...]: those of `Scene.state`.  The same questions go to servers elsewhere, over a
websocket (envs/remote.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Message:
    """A question or an answer, as Message("step", {"rows": [0, 2]}, {"actions": zeros(2, 7)})."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)  # plain Python
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


class Link(Protocol):
    """Where questions go: rows in this process, another process, or a server."""

    def ask(self, question: Message) -> None: ...

    def answer(self) -> Message: ...

    def close(self) -> None: ...


def send(pipe: Connection, message: Message) -> None:
    """Writes a message; raises ConnectionError if the reader is gone."""
    arrays = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in message.arrays.items()}
    pipe.send((message.kind, dict(message.values), arrays))


def receive(pipe: Connection, timeout_s: float | None = None) -> Message:
    """Returns the next message.

    Raises:
        EOFError: the other side is gone; or ConnectionError, if it died.
        TimeoutError: there was none within `timeout_s` seconds.
    """
    if not pipe.poll(timeout_s):
        raise TimeoutError
    kind, values, packed = pipe.recv()
    arrays = {name: np.ndarray(shape, dtype, data).copy() for name, (dtype, shape, data) in packed.items()}
    return Message(kind, values, arrays)
