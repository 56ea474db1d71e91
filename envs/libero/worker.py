"""The process that runs LIBERO (envs/foreign/worker.py), started with the Python of LIBERO's own environment."""

from __future__ import annotations

from typing import cast

import numpy as np

from envs.foreign.rows import Rows
from envs.foreign.wire import Message
from envs.foreign.worker import cannot_import, serve


def open_libero(question: Message) -> tuple[Rows | None, Message]:
    """Returns the rows and the names of the suite's tasks, or why there are none."""
    try:
        import libero  # noqa: F401  # before MuJoCo, which looks for its renderer: what is missing is named in the answer
        import mujoco  # noqa: F401

        from envs.libero.scene import Scene, tasks_of
    except Exception as error:  # noqa: BLE001  a broken library may raise anything
        return None, cannot_import("LIBERO", error)
    values = question.values
    tasks = tasks_of(cast(str, values["suite"]))
    settle_steps = cast(int, values["settle_steps"])
    rows = Rows(
        lambda task: Scene(tasks[task], settle_steps),
        cast("list[str]", values["cameras"]),
        cast(int, values["size"]),
        cast(int, values["num_spare"]),
        mirrored if values["rotate"] else upside_down,
    )
    return rows, Message("opened", {"names": [t.name for t in tasks], "instructions": [t.instruction for t in tasks]})


def mirrored(image: np.ndarray) -> np.ndarray:
    """Returns an upright image [H, W, 3] as OpenVLA's data have it: MuJoCo's, which is upside down, turned by 180."""
    return image[:, ::-1]


def upside_down(image: np.ndarray) -> np.ndarray:
    """Returns an upright image [H, W, 3] as MuJoCo has it."""
    return image[::-1]


if __name__ == "__main__":
    serve(open_libero)
