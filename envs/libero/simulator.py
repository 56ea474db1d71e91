"""N rows of a LIBERO suite, in processes of LIBERO's own environment.

    simulator (this process)  --- questions: reset, step, images --->  process 0: rows 0 .. 3, one after the other
                              <-- success, proprioception, images ---  process 1: rows 4 .. 7

A question goes to all processes before the first answer is awaited, so that they work at once.  A process that dies,
or does not answer in time, ends the run with its name (envs/libero/process.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from envs.libero.options import REPOSITORY, Options
from envs.libero.process import Process, environment_of
from envs.libero.rows import NUM_ACTIONS
from envs.libero.starts import NUM_OBJECTS, start_of
from envs.libero.wire import Message
from envs.simulator import Measurement, RowTask, Simulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import RlinfError

NUM_PROPRIO = 8  # tool position, rotation as axis times angle, two fingers
_ADVICE = "use fewer rows (env.num_envs, eval.num_envs) or env.options.processes if memory is short"


class LiberoSimulator(Simulator):
    """The rows; each reset may give a row another task of the suite."""

    action_dim = NUM_ACTIONS
    backend = "libero (mujoco)"

    def __init__(
        self, config: EnvConfig, options: Options, num_rows: int, command: Sequence[str], device: str = "cpu"
    ) -> None:
        """Starts the processes.

        Args:
            config: the section env.
            options: what env.options says.
            num_rows: rows N.
            command: starts a process that answers as envs/libero/wire.py says.
            device: of the worker; images are rendered on a GPU where it is one.
        """
        self.num_rows, self._options = num_rows, options
        count = min(num_rows, options.processes or _default_processes(device))
        bounds = [num_rows * k // count for k in range(count + 1)]
        self._rows = [range(low, high) for low, high in itertools.pairwise(bounds)]
        environment = environment_of(REPOSITORY, "egl" if device.startswith("cuda") else "osmesa")
        self._processes: list[Process] = []
        self._size, self._num_cameras = config.obs_size, len(config.cameras)
        for k, rows in enumerate(self._rows):
            name = f"LIBERO process {k} (rows {rows.start}-{rows.stop - 1})"
            self._processes.append(Process(name, command, environment, options.timeout_s, _ADVICE))
        try:
            known = self._open(config)
        except Exception:
            self.close()
            raise
        names, instructions = known.values["names"], known.values["instructions"]
        assert isinstance(names, list)
        assert isinstance(instructions, list)
        told = [config.instruction or text for text in instructions]
        self._known = [RowTask(*pair) for pair in zip(names, told, strict=True)]
        self._tasks = [options.task] if options.task >= 0 else list(range(len(self._known)))
        self.tasks = [self._known[self._tasks[0]]] * num_rows
        self._success = np.zeros(num_rows, dtype=bool)
        self._proprio = np.zeros((num_rows, NUM_PROPRIO), dtype=np.float32)
        self._objects = np.zeros((num_rows, NUM_OBJECTS, 3), dtype=np.float32)

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts in each row the task and initial state that its seed stands for (envs/libero/starts.py)."""
        again = bool(self._options.train_on_benchmark)
        starts = {row: start_of(int(seed), self._tasks, again) for row, seed in zip(rows, seeds, strict=True)}
        for row, start in starts.items():
            self.tasks[row] = self._known[start.task]
        told = {row: list(asdict(start).values()) for row, start in starts.items()}
        self._take(self._ask("reset", list(starts), lambda mine: {"starts": [told[row] for row in mine]}))

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one control step of these rows, 50 ms; actions as `rlinf_embodied.interfaces` has them."""
        chosen = actions.clamp(-1.0, 1.0).cpu().numpy()
        self._take(self._ask("step", list(rows), arrays=lambda mine: {"actions": chosen[mine]}))

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all rows; the reward is 1 where the task is solved.

        Privileged are the proprioception and the places of the goal's objects, float32 [N, P + 3 M].
        """
        known = np.concatenate([self._proprio, self._objects.reshape(self.num_rows, -1)], axis=1)
        return Measurement(
            reward=torch.from_numpy(self._success.astype(np.float32)),
            success=torch.from_numpy(self._success.copy()),
            proprio=torch.from_numpy(self._proprio.copy()),
            privileged=torch.from_numpy(known),
        )

    def images(self, rows: Sequence[int]) -> Tensor:
        """Returns what the policy's cameras see, uint8 [len(rows), K, S, S, 3]."""
        seen = np.zeros((self.num_rows, self._num_cameras, self._size, self._size, 3), dtype=np.uint8)
        for mine, answer in self._ask("images", list(rows)):
            seen[mine] = answer.arrays["images"]
        return torch.from_numpy(seen[list(rows)])

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Returns the first camera's image of each of these rows, upright."""
        frames = self._ask("film", list(rows), lambda _: {"size": size})
        return {
            row: torch.from_numpy(image)
            for mine, answer in frames
            for row, image in zip(mine, answer.arrays["images"], strict=True)
        }

    def object_positions(self) -> Tensor:
        """Returns where the first object of each row's goal is, float32 [N, 3]."""
        return torch.from_numpy(self._objects[:, 0].copy())

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.close()

    def _open(self, config: EnvConfig) -> Message:
        """Tells every process what to run; returns the suite's tasks."""
        values = {
            "suite": config.task,
            "cameras": list(config.cameras),
            "size": config.obs_size,
            "rotate": self._options.rotate == 180,
            "settle_steps": self._options.settle_steps,
            "num_spare": self._options.spare_scenes,
        }
        for process in self._processes:
            process.ask(Message("open", values))
        answers = [process.answer() for process in self._processes]
        return answers[0]

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
            self._success[mine] = answer.arrays["success"]
            self._proprio[mine] = answer.arrays["proprio"]
            self._objects[mine] = answer.arrays["objects"]


def _default_processes(device: str) -> int:
    """Returns how many processes a worker has: a worker on a CPU has one core, one on a GPU that GPU's share."""
    if not device.startswith("cuda"):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))
