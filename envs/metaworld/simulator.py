"""N rows of MetaWorld's tasks, in processes of MetaWorld's own environment (envs/foreign/simulator.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from envs.foreign.simulator import Workers
from envs.foreign.starts import Start
from envs.foreign.tasks import TasksSimulator
from envs.metaworld.options import MetaworldOptions
from envs.metaworld.tasks import INSTRUCTIONS, tasks_of
from envs.simulator import Measurement, RowTask
from rlinf_embodied.config import EnvConfig

NUM_STATE = 39  # what MetaWorld observes: hand, fingers and objects now and one step before, and the goal
FORMS = {"success": (bool, ()), "reward": (np.float32, ()), "state": (np.float32, (NUM_STATE,))}
BEST = 10.0  # MetaWorld's reward of a solved task


class MetaworldSimulator(TasksSimulator):
    """The rows; each reset may give a row another task of the suite."""

    action_dim = 4
    backend = "metaworld (mujoco)"

    def __init__(
        self, config: EnvConfig, options: MetaworldOptions, num_rows: int, command: Sequence[str], device: str = "cpu"
    ) -> None:
        """Starts the processes.

        Args:
            config: the section env.
            options: what env.options says.
            num_rows: rows N.
            command: starts a process that answers as envs/foreign/wire.py says.
            device: of the worker; images are rendered on a GPU where it is one.
        """
        names = tasks_of(config.task)
        question = {
            "tasks": list(names),
            "cameras": list(config.cameras),
            "size": config.obs_size,
            "num_spare": options.spare_scenes,
            "light": options.pictures.value == "light",
            "show_goal": config.show_goal,
        }
        workers = Workers("MetaWorld", command, options.timeout_s, options.processes, device)
        super().__init__(num_rows, workers, question)
        self.know([RowTask(name, config.instruction or INSTRUCTIONS[name]) for name in names])
        self.expect(FORMS)
        self._place = {name: k for k, name in enumerate(names)}
        self._goal_in_proprio = config.goal_in_proprio
        self._begun: set[int] = set()
        self.expert = self._expert

    def start_of(self, seed: int) -> Start:
        """Returns the task that a seed stands for; where its objects and goal are is drawn from the seed."""
        return Start(self.numbers[seed % len(self.numbers)], None, seed)

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts an episode in each of these rows."""
        super().reset(rows, seeds)
        self._begun.update(rows)

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all rows; the reward is MetaWorld's, divided by what a solved task gets (10).

        The proprioception is the hand's position (m) and how far its fingers are open (0 to 1), float32 [N, 4], and
        with env.goal_in_proprio the goal's position and the way from the hand to it.  Privileged are MetaWorld's own
        39 numbers, and of a suite which of its T tasks it is, float32 [N, 39 + T].
        """
        state = torch.from_numpy(self.told["state"].copy())
        hand, goal = state[:, :4], state[:, -3:]
        proprio = torch.cat([hand, goal, goal - hand[:, :3]], 1) if self._goal_in_proprio else hand.clone()
        return Measurement(
            reward=torch.from_numpy(self.told["reward"] / np.float32(BEST)),
            success=torch.from_numpy(self.told["success"].copy()),
            proprio=proprio,
            privileged=torch.cat([state, self._which()], 1) if len(self._place) > 1 else state,
        )

    def object_positions(self) -> Tensor:
        """Returns where the first object of each row's task is, float32 [N, 3]; of a reach, the goal."""
        state, told = self.told["state"], [task.name for task in self.tasks]
        reaches = np.array([name.startswith("reach") for name in told])
        return torch.from_numpy(np.where(reaches[:, None], state[:, -3:], state[:, 4:7]))

    def _which(self) -> Tensor:
        """Returns one-hot rows, float32 [N, T]."""
        numbers = torch.tensor([self._place[task.name] for task in self.tasks])
        return torch.nn.functional.one_hot(numbers, len(self._place)).float()

    def _expert(self) -> Tensor:
        """Returns what MetaWorld's scripted policies do next, float32 [N, 4]; zeros before a row's first reset."""
        return self.ask_expert(sorted(self._begun)).clamp(-1.0, 1.0)
