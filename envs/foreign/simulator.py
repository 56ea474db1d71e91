"""N rows of a foreign simulator, in processes of its own environment.

    simulator (this process)  --- questions: reset, step, images --->  process 0: rows 0 .. 3, one after the other
                              <-- state, images --------------------   process 1: rows 4 .. 7

A question goes to all processes before the first answer is awaited, so that they work at once.  A process that dies,
or does not answer in time, ends the run with its name (envs/foreign/process.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from envs.foreign.place import REPOSITORY
from envs.foreign.process import Process, environment_of
from envs.foreign.starts import Start
from envs.foreign.wire import Message
from envs.simulator import Simulator
from rlinf_embodied.errors import RlinfError

_ADVICE = "use fewer rows (env.num_envs, eval.num_envs) or env.options.processes if memory is short"
Forms = Mapping[str, tuple[np.typing.DTypeLike, tuple[int, ...]]]  # dtype and shape of what a row tells, by name


@dataclass(frozen=True, slots=True)
class Workers:
    """How the processes are started."""

    simulator: str  # its name in messages
    command: Sequence[str]  # starts a process that answers as envs/foreign/wire.py says
    timeout_s: float  # how long an answer may take
    processes: int = 0  # 0: one on a CPU, one per core of a GPU's share
    device: str = "cpu"  # of the worker; images are rendered on a GPU where it is one


class ForeignSimulator(Simulator):
    """The rows; a subclass says how an episode begins (`start`) and what the rows' state means (`measure`)."""

    def __init__(self, num_rows: int, workers: Workers, question: Mapping[str, object]) -> None:
        """Starts the processes and asks them to open the simulator; `opened` is what they tell then.

        Args:
            num_rows: rows N.
            workers: how the processes are started.
            question: what to open.

        Raises:
            SimulatorError: a process cannot.
        """
        self.num_rows = num_rows
        count = min(num_rows, workers.processes or default_processes(workers.device))
        bounds = [num_rows * k // count for k in range(count + 1)]
        self._rows = [range(low, high) for low, high in itertools.pairwise(bounds)]
        environment = environment_of(REPOSITORY, "egl" if workers.device.startswith("cuda") else "osmesa")
        self._processes: list[Process] = []
        for k, rows in enumerate(self._rows):
            name = f"{workers.simulator} process {k} (rows {rows.start}-{rows.stop - 1})"
            self._processes.append(Process(name, workers.command, environment, workers.timeout_s, _ADVICE))
        try:
            self.opened = self._open(question)
        except Exception:
            self.close()
            raise
        self.told: dict[str, np.ndarray] = {}

    def expect(self, forms: Forms) -> None:
        """Says what rows tell: zeros in `told`, until a row tells otherwise."""
        self.told = {name: np.zeros((self.num_rows, *shape), dtype=kind) for name, (kind, shape) in forms.items()}

    def start(self, row: int, seed: int) -> Start:
        """Returns how a row's episode begins."""
        raise NotImplementedError

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts an episode in each of these rows."""
        starts = {row: list(astuple(self.start(row, int(seed)))) for row, seed in zip(rows, seeds, strict=True)}
        self._take(self._ask("reset", list(starts), lambda mine: {"starts": [starts[row] for row in mine]}))

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one control step of these rows; actions as `rlinf_embodied.interfaces` has them."""
        chosen = actions.clamp(-1.0, 1.0).cpu().numpy()
        self._take(self._ask("step", list(rows), arrays=lambda mine: {"actions": chosen[mine]}))

    def images(self, rows: Sequence[int]) -> Tensor:
        """Returns what the policy's cameras see, uint8 [len(rows), K, S, S, 3]."""
        return torch.from_numpy(np.stack(self.shown("images", rows)))

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Returns an image of each of these rows, upright."""
        frames = self.shown("film", rows, {"size": size})
        return {row: torch.from_numpy(frame) for row, frame in zip(rows, frames, strict=True)}

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.close()

    # ------------------------------------------------------------------------------------------------------- questions
    def ask_expert(self, rows: Sequence[int]) -> Tensor:
        """Returns the scripted expert's action for each of these rows, float32 [N, A], zero for the others."""
        actions = np.zeros((self.num_rows, self.action_dim), dtype=np.float32)
        for mine, answer in self._ask("expert", list(rows)):
            actions[mine] = answer.arrays["actions"]
        return torch.from_numpy(actions)

    def shown(self, kind: str, rows: Sequence[int], values: Mapping[str, object] | None = None) -> list[np.ndarray]:
        """Returns the answer to a question about images for each of these rows, in their order."""
        images: dict[int, np.ndarray] = {}
        for mine, answer in self._ask(kind, list(rows), lambda _: values or {}):
            images.update(zip(mine, answer.arrays["images"], strict=True))
        return [images[row] for row in rows]

    def _open(self, values: Mapping[str, object]) -> Mapping[str, object]:
        for process in self._processes:
            process.ask(Message("open", values))
        answers = [process.answer() for process in self._processes]
        return answers[0].values

    def _ask(
        self,
        kind: str,
        rows: list[int],
        values: Callable[[list[int]], Mapping[str, object]] = lambda _: {},
        arrays: Callable[[list[int]], Mapping[str, np.ndarray]] = lambda _: {},
    ) -> list[tuple[list[int], Message]]:
        """Asks the processes that have some of these rows, all at once; returns their rows and answers."""
        shares = [[row for row in rows if row in own] for own in self._rows]
        asked = [(process, mine) for process, mine in zip(self._processes, shares, strict=True) if mine]
        for process, mine in asked:
            process.ask(Message(kind, {"rows": mine, **values(mine)}, arrays(mine)))
        answers, problems = [], []
        for process, mine in asked:  # to the last one: an answer left unread would be taken for the next
            try:
                answers.append((mine, process.answer()))
            except RlinfError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]
        return answers

    def _take(self, answers: Sequence[tuple[list[int], Message]]) -> None:
        for mine, answer in answers:
            for name, values in answer.arrays.items():
                self.told[name][mine] = values


def default_processes(device: str) -> int:
    """Returns how many processes a worker has: a worker on a CPU has one core, one on a GPU that GPU's share."""
    if not device.startswith("cuda"):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))
