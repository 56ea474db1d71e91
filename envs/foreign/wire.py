"""The protocol between an env and the processes of a foreign simulator: plain values and arrays over a pipe.

The two sides have different versions of numpy, whose pickles are incompatible, so a message is a JSON header and raw
bytes.  Each question has one answer:

    open      adapter, task, options, cameras   -> opened: Facts
    reset     rows, starts (Start as a list)    -> state of these rows
    step      rows; actions [R, A]              -> state of these rows
    images    rows                              -> images [R, K, H, W, 3]
    images    rows, film (a size)               -> images [R, H, W, 3]
    expert    rows                              -> actions [R, A]
    any of them                                 -> error: text

State is arrays by name, each [R, ...]: those of `Scene.state`.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

_SIZES = struct.Struct("<II")  # bytes of the header, bytes of all arrays
_ONCE = 1 << 20  # bytes per read


@dataclass(frozen=True, slots=True)
class Message:
    """A question or an answer, as Message("step", {"rows": [0, 2]}, {"actions": zeros(2, 7)})."""

    kind: str
    values: Mapping[str, object] = field(default_factory=dict)  # JSON
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


def pack(message: Message) -> bytes:
    """Returns the bytes of a message."""
    arrays = {name: np.ascontiguousarray(array) for name, array in message.arrays.items()}
    forms = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"kind": message.kind, "values": dict(message.values), "arrays": forms}).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    return _SIZES.pack(len(header), len(body)) + header + body


def unpack(header: bytes, body: bytes) -> Message:
    """Returns the message of a header and the bytes of its arrays."""
    described = json.loads(header)
    arrays, start = {}, 0
    for name, kind, shape in described["arrays"]:
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, dtype=kind, count=count, offset=start).reshape(shape).copy()
        start += arrays[name].nbytes
    return Message(described["kind"], described["values"], arrays)


def send(pipe: int, message: Message) -> None:
    """Writes a message to a file descriptor; raises BrokenPipeError if the reader is gone."""
    left = memoryview(pack(message))
    while left:
        left = left[os.write(pipe, left) :]


def receive(pipe: int, timeout_s: float | None = None) -> Message:
    """Returns the next message from a file descriptor.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: there was no whole message within `timeout_s` seconds.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    header, body = _SIZES.unpack(_read(pipe, _SIZES.size, deadline))
    return unpack(_read(pipe, header, deadline), _read(pipe, body, deadline))


def _read(pipe: int, size: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while size:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], left_s)[0]:
            raise TimeoutError
        part = os.read(pipe, min(size, _ONCE))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
