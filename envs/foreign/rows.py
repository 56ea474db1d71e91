"""The rows of one process: which scene each of them has, and what the process answers.

A row's scene stays with it while its episodes are of one task, and waits for another row when they are not, since
building a scene takes a while.  Scenes of a task share one renderer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from envs.foreign.starts import Start
from envs.foreign.wire import Message

_LAST_LINES = 6


class Eye(Protocol):
    """What renders the scenes of one task."""

    def close(self) -> None: ...


class Scene(Protocol):
    """A simulator of one row and one task."""

    def begin(self, start: Start) -> None:
        """Brings it to the initial state of an episode."""
        ...

    def step(self, action: np.ndarray) -> None:
        """Runs one control step."""
        ...

    def state(self) -> Mapping[str, np.ndarray]:
        """Returns what it tells now, by name."""
        ...

    def open_eye(self) -> Eye:
        """Returns a renderer for scenes of this task."""
        ...

    def image(self, eye: Eye, camera: str, size: int) -> np.ndarray:
        """Returns uint8 [H, W, 3], upright; [size, size, 3] where the simulator can choose."""
        ...

    def close(self) -> None: ...


class HasExpert(Protocol):
    """A scene whose simulator comes with a scripted expert."""

    def expert(self) -> np.ndarray:
        """Returns its next action, float32 [A]."""
        ...


class Rows:
    """Rows by their number in the env; some of them, in one process."""

    def __init__(
        self,
        make_scene: Callable[[int], Scene],
        cameras: Sequence[str],
        size: int,
        num_spare: int = 0,
        turned: Callable[[np.ndarray], np.ndarray] = lambda image: image,
        film_camera: str = "",
    ) -> None:
        """Takes what they need.

        Args:
            make_scene: builds a scene of a task.
            cameras: what the policy sees, in its order.
            size: of its images, pixels.
            num_spare: scenes without a row that are kept, over all tasks.
            turned: how the policy sees an image, where not upright.
            film_camera: what videos show; "": the first of the policy's.
        """
        self._make, self._cameras, self._size = make_scene, tuple(cameras), size
        self._num_spare, self._turned = num_spare, turned
        self._film_camera = film_camera or next(iter(self._cameras), "")
        self._scenes: dict[int, tuple[int, Scene]] = {}  # task and scene by row
        self._spare: list[tuple[int, Scene]] = []  # the one that has waited longest first
        self._eyes: dict[int, Eye] = {}
        self._answers: Mapping[str, Callable[[Message], Message]] = {
            "reset": self._reset,
            "step": self._step,
            "images": self._images,
            "film": self._film,
            "expert": self._expert,
        }

    def answer(self, question: Message) -> Message:
        """Returns the answer; what goes wrong becomes an answer of the kind "error"."""
        try:
            return self._answers[question.kind](question)
        except Exception as error:  # noqa: BLE001  a process boundary: the other side raises it again
            where = "".join(traceback.format_exception(error)).strip().splitlines()[-_LAST_LINES:]
            return Message("error", {"text": f"{type(error).__name__}: {error}\n  " + "\n  ".join(where)})

    def _reset(self, question: Message) -> Message:
        starts = cast("list[tuple[int, int | None, int]]", question.values["starts"])
        for row, start in zip(_rows(question), starts, strict=True):
            self._scene_for(row, start[0]).begin(Start(*start))
        return self._state(question)

    def _step(self, question: Message) -> Message:
        for row, action in zip(_rows(question), question.arrays["actions"], strict=True):
            self._scenes[row][1].step(action)
        return self._state(question)

    def _state(self, question: Message) -> Message:
        states = [self._scenes[row][1].state() for row in _rows(question)]
        return Message("state", {}, {name: np.stack([state[name] for state in states]) for name in states[0]})

    def _images(self, question: Message) -> Message:
        seen = [[self._turned(self._look(row, name, self._size)) for name in self._cameras] for row in _rows(question)]
        return Message("images", {}, {"images": np.array(seen, dtype=np.uint8)})

    def _film(self, question: Message) -> Message:
        size = cast(int, question.values["size"])
        shown = [self._look(row, self._film_camera, size) for row in _rows(question)]
        return Message("images", {}, {"images": np.array(shown, dtype=np.uint8)})

    def _expert(self, question: Message) -> Message:
        scenes = [cast(HasExpert, self._scenes[row][1]) for row in _rows(question)]
        return Message("actions", {}, {"actions": np.stack([scene.expert() for scene in scenes])})

    def _look(self, row: int, camera: str, size: int) -> np.ndarray:
        task, scene = self._scenes[row]
        if task not in self._eyes:
            self._eyes[task] = scene.open_eye()
        return scene.image(self._eyes[task], camera, size)

    def _scene_for(self, row: int, task: int) -> Scene:
        """Returns the row's scene: the one it has, one that waits, or a new one."""
        held = self._scenes.pop(row, None)
        if held is not None and held[0] != task:
            self._spare.append(held)
            held = None
        if held is None:
            held = next((spare for spare in self._spare if spare[0] == task), None)
            if held is not None:
                self._spare.remove(held)
        if held is None:
            self._drop(len(self._spare) - self._num_spare)
            held = (task, self._make(task))
        self._scenes[row] = held
        return held[1]

    def _drop(self, number: int) -> None:
        """Closes the scenes that have waited longest, and renderers that no scene needs any more."""
        for _ in range(number):
            self._spare.pop(0)[1].close()
        needed = {task for task, _ in (*self._scenes.values(), *self._spare)}
        for task in [task for task in self._eyes if task not in needed]:
            self._eyes.pop(task).close()


def _rows(question: Message) -> list[int]:
    return cast("list[int]", question.values["rows"])
