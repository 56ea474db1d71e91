"""N rows of a Gymnasium env whose versions do not go with those of runs, behind a pipe (envs/foreign/simulator.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from envs.foreign.place import REPOSITORY
from envs.foreign.simulator import ForeignSimulator, Workers
from envs.foreign.starts import Start
from envs.gym.options import GymnasiumOptions
from envs.gym.row import FILM_SIZE
from envs.gym.rows import GymnasiumRows
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import SimulatorError

WORKER = ("-P", "-m", "envs.gym.worker")


class ForeignGymnasium(GymnasiumRows, ForeignSimulator):
    """Rows of one Gymnasium id, in processes of another Python."""

    def __init__(self, config: EnvConfig, options: GymnasiumOptions, num_rows: int, device: str) -> None:
        """Starts the processes.

        Raises:
            SimulatorError: there is no such Python, or what GymnasiumSimulator raises.
        """
        command = (str(find_python(options.python)), *WORKER)
        workers = Workers(config.task, command, options.timeout_s, options.processes, device)
        question = {
            "task": config.task,
            "make": options.make,
            "cameras": list(config.cameras),
            "size": config.obs_size if config.cameras else FILM_SIZE,
        }
        ForeignSimulator.__init__(self, num_rows, workers, question)
        opened = self.opened
        GymnasiumRows.__init__(self, config, bool(opened["draws"]))
        self.action_dim, self.categorical = cast(int, opened["action_dim"]), bool(opened["categorical"])
        self.backend = f"gymnasium {opened['version']}"
        free, success = options.history_free, options.success
        self.history_free = bool(opened["history_free"]) if free is None else free
        self.has_success = bool(opened["success"]) if success is None else success
        self.expect(
            {
                "state": (np.float32, (cast(int, opened["state_dim"]),)),
                "reward": (np.float32, ()),
                **dict.fromkeys(("success", "terminated", "truncated"), (bool, ())),
            }
        )

    def start(self, row: int, seed: int) -> Start:
        """Returns the start of a seed: there is one task."""
        return Start(0, None, seed)

    def tell(self) -> dict[str, np.ndarray]:
        """Returns what all rows tell."""
        return self.told

    def look(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Returns what the policy sees of each of these rows."""
        return [images[0] for images in self.shown("images", rows)]

    def render(self, rows: Sequence[int], size: int) -> list[np.ndarray]:
        """Returns what each of these rows draws."""
        return self.shown("film", rows, {"size": size})


def find_python(path: str) -> Path:
    """Returns env.options.python; a relative path begins at the repository.

    Raises:
        SimulatorError: there is none.
    """
    python = REPOSITORY / Path(path).expanduser()
    if python.exists():
        return python
    name = python.parent.parent.name.removeprefix(".venv-")
    known = (REPOSITORY / "experiments" / "setup" / f"{name}.py").exists()
    how = f"`python -m experiments.setup.{name}`" if known else "`python -m venv`, with gymnasium and the env's package"
    raise SimulatorError(
        f"env.options.python is {path!r}, the Python that is to run the env, but {python} is not there: install it by "
        f"{how}"
    )
