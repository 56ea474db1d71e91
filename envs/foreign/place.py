"""Where the environment of a foreign simulator lies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.errors import SimulatorError

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Place:
    """A virtual environment, as Place("LIBERO", ".venv-libero", "RLINF_EMBODIED_LIBERO", "experiments.setup.x")."""

    simulator: str  # its name in messages
    default: str  # folder, below the repository
    variable: str  # that names another folder
    command: str  # the module that installs it

    def folder(self) -> Path:
        """Returns the folder, whether it is there or not."""
        return Path(os.environ.get(self.variable) or REPOSITORY / self.default).absolute()

    def python(self) -> Path:
        """Returns the environment's Python.

        Raises:
            SimulatorError: there is none.
        """
        python = self.folder() / "bin" / "python"
        if not python.exists():
            raise SimulatorError(
                f"{self.simulator} runs in an environment of its own, and {self.folder()} is none: install it by "
                f"`python -m {self.command}`, or name its folder in the variable {self.variable}"
            )
        return python

    def missing(self) -> str:
        """Returns why its Python cannot be used, "" if it can."""
        try:
            self.python()
        except SimulatorError as error:
            return str(error)
        return ""
