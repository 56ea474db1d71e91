"""The process that runs a Gymnasium env (envs/foreign/worker.py), started with the Python that has its versions."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from envs.foreign.rows import Rows
from envs.foreign.starts import Start
from envs.foreign.wire import Message
from envs.foreign.worker import cannot_import, serve

POLICY, FILM = "policy", "film"  # what is asked of `image`


class _Eye:
    def close(self) -> None: ...


class _Scene:
    """A row as envs/foreign/rows.py asks for it."""

    def __init__(self, row: Any) -> None:
        self._row = row

    def begin(self, start: Start) -> None:
        self._row.reset(start.seed)

    def step(self, action: np.ndarray) -> None:
        self._row.step(action)

    def state(self) -> dict[str, np.ndarray]:
        return self._row.told()

    def open_eye(self) -> _Eye:
        return _Eye()

    def image(self, eye: _Eye, camera: str, size: int) -> np.ndarray:
        return self._row.image() if camera == POLICY else self._row.rendered()

    def close(self) -> None:
        self._row.env.close()


def open_gymnasium(question: Message) -> tuple[Rows | None, Message]:
    """Returns the rows and what their spaces are, or why there are none."""
    try:
        import gymnasium  # what is missing is named in the answer

        from envs.gym.row import Row
    except Exception as error:  # noqa: BLE001  a broken library may raise anything
        return None, cannot_import("Gymnasium", error)
    values = question.values
    cameras, make = cast("list[str]", values["cameras"]), cast("dict[str, Any]", values["make"])
    task, size = cast(str, values["task"]), cast(int, values["size"])
    try:
        first = Row(task, make, size)
        first.require_images(cameras)
        success = first.tells_success()
    except Exception as error:  # noqa: BLE001  a process boundary: the other side raises it again
        return None, Message("error", {"text": f"{type(error).__name__}: {error}"})
    made = [first]
    rows = Rows(
        lambda _: _Scene(made.pop() if made else Row(task, make, size)),
        [POLICY for _ in cameras],
        size,
        film_camera=FILM,
    )
    told = {
        "version": gymnasium.__version__,
        "action_dim": first.action.dim,
        "categorical": first.action.categorical,
        "state_dim": first.code.dim,
        "draws": first.draws,
        "success": success,
        "history_free": first.history_free,
    }
    return rows, Message("opened", told)


if __name__ == "__main__":
    serve(open_gymnasium)
