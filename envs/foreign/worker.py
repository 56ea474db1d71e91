"""The simulator's process: rows with a scene each, and the loop that answers questions from a pipe.

    python -P -m envs.foreign.worker <file descriptor of the pipe>

A row keeps its scene while its episodes are of one task.  A scene without a row is kept as a spare, since building one
takes seconds.  The scenes of a task share one renderer, which holds the task's meshes and textures once.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import os
import sys
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from envs.foreign import wire
from envs.foreign.adapter import Adapter, Scene, Start
from envs.foreign.wire import Message

_LAST_LINES = 6


class Rows:
    """Some rows of an env, by row number."""

    def __init__(self, adapter: Adapter, cameras: list[str], size: int) -> None:
        self.adapter, self._cameras, self._size = adapter, cameras, size
        self._film_camera = adapter.film_camera or next(iter(cameras), "")
        self._scenes: dict[int, tuple[int, Scene]] = {}  # task and scene by row
        self._spare: list[tuple[int, Scene]] = []  # the oldest first
        self._renderers: dict[int, Any] = {}

    def run(self, question: Message) -> Message:
        rows = question["rows"]
        if question["kind"] == "images":
            return {"kind": "images", "images": self._images(rows, question.get("film", 0))}
        if question["kind"] == "expert":
            scenes: list[Any] = [self._scenes[row][1] for row in rows]
            return {"kind": "actions", "actions": np.stack([scene.expert() for scene in scenes])}
        if question["kind"] == "reset":
            starts = {row: Start(*start) for row, start in zip(rows, question["starts"], strict=True)}
            self._find_scenes({row: start.task for row, start in starts.items()})
            for row, start in starts.items():
                self._scenes[row][1].begin(start)
        else:
            for row, action in zip(rows, self.adapter.actions(question["actions"]), strict=True):
                self._scenes[row][1].step(action)
        states = [self._scenes[row][1].state() for row in rows]
        return {"kind": "state"} | {name: np.array([state[name] for state in states]) for name in states[0]}

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        for _, scene in (*self._scenes.values(), *self._spare):
            scene.close()
        self._renderers, self._scenes, self._spare = {}, {}, []

    def _images(self, rows: list[int], film: int) -> np.ndarray:
        """Renders the policy's images, or with a `film` size one upright image of each row."""
        if film:
            return np.array([self._render(row, self._film_camera, film) for row in rows])
        oriented = self.adapter.oriented
        return np.array([[oriented(self._render(row, name, self._size)) for name in self._cameras] for row in rows])

    def _render(self, row: int, camera: str, size: int) -> np.ndarray:
        task, scene = self._scenes[row]
        if task not in self._renderers:
            self._renderers[task] = scene.open_renderer()
        return scene.image(self._renderers[task], camera, size)

    def _find_scenes(self, tasks: dict[int, int]) -> None:
        """Gives each row a scene of its task: the one it has, a spare one or another row's, or a new one."""
        others = [row for row, task in tasks.items() if row not in self._scenes or self._scenes[row][0] != task]
        self._spare += [self._scenes.pop(row) for row in others if row in self._scenes]
        for row in others:
            spare = next((spare for spare in self._spare if spare[0] == tasks[row]), None)
            if spare is not None:
                self._spare.remove(spare)
                self._scenes[row] = spare
        self._drop(len(self._spare) - self.adapter.options.spare_scenes)
        for row in others:
            if row not in self._scenes:
                self._scenes[row] = (tasks[row], self.adapter.scene(tasks[row]))

    def _drop(self, number: int) -> None:
        """Closes the oldest spare scenes, and renderers that no scene needs."""
        for _ in range(number):
            self._spare.pop(0)[1].close()
        needed = {task for task, _ in (*self._scenes.values(), *self._spare)}
        for task in [task for task in self._renderers if task not in needed]:
            self._renderers.pop(task).close()


def open_rows(values: Message) -> tuple[Rows, Message]:
    """Returns the rows and the answer with their facts."""
    module, _, name = values["adapter"].rpartition(".")
    try:
        cls: type[Adapter] = getattr(importlib.import_module(module), name)
        for package in cls.packages:
            importlib.import_module(package)
    except Exception as error:
        raise ImportError(why_not_imported(values["name"], error)) from error
    adapter = cls(values["task"], cls.Options(**values["options"]))
    facts = adapter.open(values["cameras"], values["size"])
    return Rows(adapter, values["cameras"], values["size"]), {"kind": "opened", **asdict(facts)}


def offscreen_gl() -> str:
    """Returns MuJoCo's rendering backend: MUJOCO_GL, or else EGL or OSMesa, whichever is installed."""
    if chosen := os.environ.get("MUJOCO_GL"):
        return chosen
    return "osmesa" if not ctypes.util.find_library("EGL") and ctypes.util.find_library("OSMesa") else "egl"


def why_not_imported(what: str, error: Exception) -> str:
    """Returns why a simulator's packages cannot be imported; MuJoCo does not name a missing renderer itself."""
    text = f"{what} cannot be imported: {type(error).__name__}: {error}"
    if "glGetError" in text or "OpenGL" in text:
        chosen = f"MUJOCO_GL={os.environ.get('MUJOCO_GL')} finds no library"
        text = f"{text}: {chosen}: apt-get install libosmesa6 libegl1, or set MUJOCO_GL to one that is installed"
    return text


def serve(pipe: Connection) -> None:
    """Answers until the other side closes the pipe; an exception becomes an answer of the kind "error"."""
    rows: Rows | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            question = wire.receive(pipe)
            try:
                if rows is None:
                    rows, answer = open_rows(question)
                else:
                    answer = rows.run(question)
            except Exception as error:  # noqa: BLE001  a process boundary: the other side raises it again
                trace = "".join(traceback.format_exception(error)).strip().splitlines()[-_LAST_LINES:]
                answer = {"kind": "error", "text": f"{type(error).__name__}: {error}\n  " + "\n  ".join(trace)}
            wire.send(pipe, answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
