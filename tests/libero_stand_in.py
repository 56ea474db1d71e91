"""A process that answers as LIBERO's does, without LIBERO: rows that add up what they are told, and fail on demand.

A row shows its task, its initial state and the sum of its actions; it is solved once that sum's first entry reaches 3.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from envs.foreign.rows import Rows
from envs.foreign.starts import Start
from envs.foreign.wire import Message
from envs.foreign.worker import serve
from envs.libero.starts import NUM_OBJECTS
from envs.libero.worker import mirrored, upside_down

DIES, HANGS, REFUSES = 1007, 1017, 1027  # reset seeds; an exit without a trace, an hour's sleep, an exception
EXIT_CODE = 13
NUM_TASKS = 10


@dataclass
class Adding:
    """A scene that adds up actions."""

    task: int
    builds: list[int]

    def __post_init__(self) -> None:
        """Tells that it was built."""
        self.builds.append(self.task)

    def begin(self, start: Start) -> None:
        """Forgets what was added, or fails."""
        if start.seed == DIES:
            print("the memory is full", file=sys.stderr)
            os._exit(EXIT_CODE)
        if start.seed == HANGS:
            time.sleep(3600)
        if start.seed == REFUSES:
            raise ValueError("no such drawer")
        self.start, self.sum = start, np.zeros(7, dtype=np.float32)

    def step(self, action: np.ndarray) -> None:
        print("libraries print what they like")
        self.sum = self.sum + action

    def state(self) -> dict[str, np.ndarray]:
        """Shows start and sum."""
        drawn = -1 if self.start.state is None else self.start.state
        proprio = np.array([self.start.task, drawn, *self.sum[:6]], dtype=np.float32)
        return {
            "success": np.bool_(self.sum[0] >= 3),
            "proprio": proprio,
            "objects": np.tile(self.sum[:3], (NUM_OBJECTS, 1)),
        }

    def open_eye(self) -> SimpleNamespace:
        """Returns nothing that is needed."""
        return SimpleNamespace(close=lambda: None)

    def image(self, eye: SimpleNamespace, camera: str, size: int) -> np.ndarray:
        """Draws a mark in the lower left pixel."""
        image = np.full((size, size, 3), self.start.task, dtype=np.uint8)
        image[-1, 0] = 255 if camera == "agentview" else 200
        return image

    def close(self) -> None:
        """Frees nothing."""


def open_stand_in(question: Message) -> tuple[Rows, Message]:
    """Returns rows of ten tasks."""
    values = question.values
    builds: list[int] = []
    turned = mirrored if values["rotate"] else upside_down
    cameras, size, num_spare = (values[name] for name in ("cameras", "size", "num_spare"))
    rows = Rows(lambda task: Adding(task, builds), cameras, size, num_spare, turned)  # type: ignore[arg-type]
    told = {
        "names": [f"{values['suite']}_{k}" for k in range(NUM_TASKS)],
        "instructions": [f"do {k}" for k in range(NUM_TASKS)],
    }
    return rows, Message("opened", told)


def make_env(config, num_envs: int, device: str = "cpu", render_final: bool = False):
    """Returns an env whose rows run here; imports torch, which the process itself does without."""
    from envs.episodes import EpisodeEnv
    from envs.libero.options import read_options
    from envs.libero.simulator import LiberoSimulator

    command = (sys.executable, "-P", __file__)
    simulator = LiberoSimulator(config, read_options(config), num_envs, command, device)
    return EpisodeEnv(config, simulator, lambda: simulator.tasks, render_final)


if __name__ == "__main__":
    serve(open_stand_in)
