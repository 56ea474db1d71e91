"""A simulator that answers as LIBERO's does, without LIBERO: rows that add up their actions, and fail on demand.

A row shows its task, its initial state and the sum of its actions; it is solved once that sum's first entry reaches 3.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from envs.foreign.adapter import Facts, Start
from envs.libero import NUM_ACTIONS, Libero

DIES, HANGS, REFUSES = 1007, 1017, 1027  # reset seeds; an exit without a trace, an hour's sleep, an exception
EXIT_CODE = 13
NUM_TASKS = 10


class Adding:
    """A scene that adds up actions."""

    def begin(self, start: Start) -> None:
        if start.seed == DIES:
            print("the memory is full", file=sys.stderr)
            os._exit(EXIT_CODE)
        if start.seed == HANGS:
            time.sleep(3600)
        if start.seed == REFUSES:
            raise ValueError("no such drawer")
        self.start, self.sum = start, np.zeros(NUM_ACTIONS, dtype=np.float32)

    def step(self, action: np.ndarray) -> None:
        print("libraries print what they like")
        self.sum = self.sum + action.clip(-1.0, 1.0)

    def state(self) -> dict[str, np.ndarray]:
        drawn = -1 if self.start.state is None else self.start.state
        proprio = np.array([self.start.task, drawn, *self.sum[:6]], dtype=np.float32)
        solved = self.sum[0] >= 3
        return {"success": solved, "reward": np.float32(solved), "proprio": proprio, "object": self.sum[:3]}

    def open_renderer(self) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: None)

    def image(self, renderer: SimpleNamespace, camera: str, size: int) -> np.ndarray:
        """Draws a mark in the lower left pixel."""
        image = np.full((size, size, 3), self.start.task, dtype=np.uint8)
        image[-1, 0] = 255 if camera == "agentview" else 200
        return image

    def close(self) -> None: ...


class StandIn(Libero):
    """Ten tasks of a suite."""

    packages = ()

    def python(self) -> Path:
        return Path(sys.executable)

    def open(self, cameras: Sequence[str], size: int) -> Facts:
        return Facts(
            [(f"{self.task}_{k}", f"do {k}") for k in range(NUM_TASKS)], NUM_ACTIONS, {"proprio": 8, "object": 3}
        )

    def scene(self, task: int) -> Adding:
        return Adding()


class TwoAlike(StandIn):
    """Tasks 0 and 1 have one instruction, as two of the suite of 90 have."""

    def open(self, cameras: Sequence[str], size: int) -> Facts:
        facts = super().open(cameras, size)
        (first, words), (second, _), *others = facts.tasks
        return replace(facts, tasks=[(first, words), (second, words), *others])
