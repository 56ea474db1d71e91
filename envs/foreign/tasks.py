"""Rows of a foreign simulator that have several tasks, which take turns by the reset seed."""

from __future__ import annotations

from collections.abc import Sequence

from envs.foreign.simulator import ForeignSimulator
from envs.foreign.starts import Start
from envs.simulator import RowTask


class TasksSimulator(ForeignSimulator):
    """Rows each reset of which may give them another task; a subclass says which (`start_of`)."""

    def know(self, tasks: Sequence[RowTask], only: int = -1) -> None:
        """Says what the tasks are, and which of them alone is to run (-1: all in turn)."""
        self._known = list(tasks)
        self.numbers = [only] if only >= 0 else list(range(len(tasks)))
        self.tasks = [self._known[self.numbers[0]]] * self.num_rows  # of each row, now

    def start_of(self, seed: int) -> Start:
        """Returns the start that a reset seed stands for; its task is one of `numbers`."""
        raise NotImplementedError

    def start(self, row: int, seed: int) -> Start:
        """Returns how a row's episode begins, and notes its task."""
        start = self.start_of(seed)
        self.tasks[row] = self._known[start.task]
        return start
