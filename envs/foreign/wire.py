"""The protocol between an env and the processes of a foreign simulator: plain values and arrays over a pipe.

The two sides have different versions of numpy, whose pickles are incompatible, so arrays are sent as bytes.  Each
question has one answer:

    open      adapter, task, options, cameras   -> opened: Facts
    reset     rows, starts (Start as a list)    -> state of these rows
    step      rows; actions [R, A]              -> state of these rows
    images    rows                              -> images [R, K, H, W, 3]
    images    rows, film (a size)               -> images [R, H, W, 3]
    expert    rows                              -> actions [R, A]
    any of them                                 -> error: text

Each is a dict with its `kind`, plain values and arrays.  A state is the arrays of `Scene.state` by name, each [R, ...].
The same questions go to servers on other machines, over a websocket (envs/remote.py).
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

Message = dict[str, Any]  # as {"kind": "step", "rows": [0, 2], "actions": zeros(2, 7)}


class Link(Protocol):
    """Answers questions: rows in this process, another process, or a server."""

    def ask(self, question: Message) -> None: ...

    def answer(self) -> Message: ...

    def close(self) -> None: ...


def send(pipe: Connection, message: Message) -> None:
    """Writes a message; raises ConnectionError if the reader is gone."""
    arrays = {name: value for name, value in message.items() if isinstance(value, np.ndarray)}
    plain = {name: value for name, value in message.items() if name not in arrays}
    pipe.send((plain, {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}))


def receive(pipe: Connection, timeout_s: float | None = None) -> Message:
    """Returns the next message.

    Raises:
        EOFError, ConnectionError: the other side closed the pipe or died.
        TimeoutError: no message came within `timeout_s` seconds.
    """
    if not pipe.poll(timeout_s):
        raise TimeoutError
    plain, arrays = pipe.recv()
    return plain | {name: np.ndarray(shape, dtype, data).copy() for name, (dtype, shape, data) in arrays.items()}
