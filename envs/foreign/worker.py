"""The loop of a process that runs a foreign simulator: answers what is asked on standard input until that ends.

What libraries print goes to standard error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from envs.foreign import wire
from envs.foreign.wire import Message


class Answers(Protocol):
    """What answers questions once the simulator is open; envs/foreign/rows.py."""

    def answer(self, question: Message) -> Message:
        """Returns the answer, of the kind "error" where something went wrong."""
        ...


def serve(open_rows: Callable[[Message], tuple[Answers | None, Message]]) -> None:
    """Answers until the other side closes the pipe; `open_rows` answers first, with rows that answer from then on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    rows: Answers | None = None
    while True:
        try:
            question = wire.receive(0)
        except EOFError:
            return
        if rows is not None:
            wire.send(answers, rows.answer(question))
            continue
        rows, told = open_rows(question)
        wire.send(answers, told)


def cannot_import(what: str, error: Exception) -> Message:
    """Returns the answer of a process whose simulator is not in its environment, or has no renderer there.

    MuJoCo says no word of a renderer that is missing, but of an attribute.
    """
    text = f"{what} cannot be imported: {type(error).__name__}: {error}"
    if "glGetError" in text:
        chosen = f"MUJOCO_GL={os.environ.get('MUJOCO_GL')} finds no library"
        text = f"{text}: {chosen}: apt-get install libosmesa6 libegl1, or set MUJOCO_GL to what is there"
    return Message("error", {"text": text})
