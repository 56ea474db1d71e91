"""N rows of a LIBERO suite, in processes of LIBERO's own environment (envs/foreign/simulator.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from envs.foreign.simulator import Workers
from envs.foreign.starts import Start
from envs.foreign.tasks import TasksSimulator
from envs.libero.options import Options
from envs.libero.starts import NUM_OBJECTS, start_of
from envs.simulator import Measurement, RowTask
from rlinf_embodied.config import EnvConfig

NUM_ACTIONS = 7
NUM_PROPRIO = 8  # tool position, rotation as axis times angle, two fingers


class LiberoSimulator(TasksSimulator):
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
            command: starts a process that answers as envs/foreign/wire.py says.
            device: of the worker; images are rendered on a GPU where it is one.
        """
        question = {
            "suite": config.task,
            "cameras": list(config.cameras),
            "size": config.obs_size,
            "rotate": options.rotate == 180,
            "settle_steps": options.settle_steps,
            "num_spare": options.spare_scenes,
        }
        super().__init__(num_rows, Workers("LIBERO", command, options.timeout_s, options.processes, device), question)
        names = cast("list[str]", self.opened["names"])
        told = [config.instruction or text for text in cast("list[str]", self.opened["instructions"])]
        self.know([RowTask(*pair) for pair in zip(names, told, strict=True)], options.task)
        self._train_on_benchmark = bool(options.train_on_benchmark)
        forms = {"success": (bool, ()), "proprio": (np.float32, (NUM_PROPRIO,))}
        self.expect({**forms, "objects": (np.float32, (NUM_OBJECTS, 3))})

    def start_of(self, seed: int) -> Start:
        """Returns the task and initial state that a seed stands for (envs/libero/starts.py)."""
        return start_of(seed, self.numbers, self._train_on_benchmark)

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all rows; the reward is 1 where the task is solved.

        Privileged are the proprioception and the places of the goal's objects, float32 [N, P + 3 M].
        """
        success, proprio, objects = (self.told[name] for name in ("success", "proprio", "objects"))
        known = np.concatenate([proprio, objects.reshape(self.num_rows, -1)], axis=1)
        return Measurement(
            reward=torch.from_numpy(success.astype(np.float32)),
            success=torch.from_numpy(success.copy()),
            proprio=torch.from_numpy(proprio.copy()),
            privileged=torch.from_numpy(known),
        )

    def object_positions(self) -> Tensor:
        """Returns where the first object of each row's goal is, float32 [N, 3]."""
        return torch.from_numpy(self.told["objects"][:, 0].copy())
