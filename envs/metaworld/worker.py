"""The process that runs MetaWorld (envs/foreign/worker.py), started with the Python of MetaWorld's own environment."""

from __future__ import annotations

from typing import cast

from envs.foreign.rows import Rows
from envs.foreign.wire import Message
from envs.foreign.worker import cannot_import, serve

FILM_CAMERA = "corner"


def open_metaworld(question: Message) -> tuple[Rows | None, Message]:
    """Returns the rows, or why there are none."""
    try:
        import metaworld  # noqa: F401  # before MuJoCo, which looks for its renderer: what is missing is named

        from envs.metaworld.rendering import Look
        from envs.metaworld.scene import Scene
    except Exception as error:  # noqa: BLE001  a broken library may raise anything
        return None, cannot_import("MetaWorld", error)
    values = question.values
    tasks, cameras = cast("list[str]", values["tasks"]), cast("list[str]", values["cameras"])
    look = Look(light=bool(values["light"]), show_sites=bool(values["show_goal"]))
    rows = Rows(
        lambda task: Scene(tasks[task], look),
        cameras,
        cast(int, values["size"]),
        cast(int, values["num_spare"]),
        film_camera=cameras[0] if cameras else FILM_CAMERA,
    )
    return rows, Message("opened")


if __name__ == "__main__":
    serve(open_metaworld)
