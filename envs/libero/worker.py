"""The process that runs LIBERO: answers what is asked on standard input until that ends.

It is started by envs/libero/simulator.py with the Python of LIBERO's own environment.  What libraries print goes to
standard error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

from envs.libero import wire
from envs.libero.rows import Rows
from envs.libero.wire import Message


def serve(open_rows: Callable[[Message], tuple[Rows | None, Message]]) -> None:
    """Answers until the other side closes the pipe; `open_rows` answers first, with rows that answer from then on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    rows: Rows | None = None
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


def open_libero(question: Message) -> tuple[Rows | None, Message]:
    """Returns the rows and the names of the suite's tasks, or why there are none."""
    try:
        import libero  # noqa: F401  # before MuJoCo, which looks for its renderer: what is missing is named in the answer
        import mujoco  # noqa: F401

        from envs.libero.scene import Scene, tasks_of
    except Exception as error:  # noqa: BLE001  a broken library may raise anything
        return None, Message("error", {"text": f"LIBERO cannot be imported: {_reason(error)}"})
    values = question.values
    tasks = tasks_of(cast(str, values["suite"]))
    settle_steps = cast(int, values["settle_steps"])
    rows = Rows(
        lambda task: Scene(tasks[task], settle_steps),
        cast("list[str]", values["cameras"]),
        cast(int, values["size"]),
        cast(bool, values["rotate"]),
        cast(int, values["num_spare"]),
    )
    return rows, Message("tasks", {"names": [t.name for t in tasks], "instructions": [t.instruction for t in tasks]})


def _reason(error: Exception) -> str:
    """Returns what an import failed for; MuJoCo says no word of a renderer that is not there, but of an attribute."""
    named = f"{type(error).__name__}: {error}"
    if "glGetError" not in named:
        return named
    chosen = f"MUJOCO_GL={os.environ.get('MUJOCO_GL')} finds no library"
    return f"{named}: {chosen}: apt-get install libosmesa6 libegl1, or set MUJOCO_GL to what is there"


if __name__ == "__main__":
    serve(open_libero)
