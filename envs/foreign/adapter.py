"""The interface of a simulator in a separate virtual environment: one module defines an `Adapter` and its `Scene`.

Two processes import that module: the run, which checks the options, and the simulator's process, which builds scenes.
So the module imports the simulator's packages inside functions, and neither torch nor Hydra.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from rlinf_embodied.config import EnvConfig, EnvOptions
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.errors import SimulatorError

REPOSITORY = Path(__file__).resolve().parents[2]
FIRST_TRAINING_SEED = 1 << 30  # of reset seeds; those of evaluation are smaller


@dataclass(frozen=True, slots=True)
class Start:
    """How an episode begins, for example Start(task=3, state=17, seed=9173)."""

    task: int  # index in Facts.tasks
    state: int | None  # index of the benchmark's initial state; None: drawn from `seed`
    seed: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the simulator's process reports after importing its packages; plain Python only."""

    tasks: Sequence[tuple[str, str]]  # name and instruction
    action_dim: int
    state: Mapping[str, int | None]  # lengths of the columns of `Scene.state` besides success and reward; None: scalar
    backend: str = ""
    has_success: bool = True
    history_free: bool = True
    categorical: bool = False
    films: bool = True  # whether it can render videos
    vectors: Mapping[str, int] = field(default_factory=dict)  # Simulator.state_vectors
    control_hz: float = 0.0  # Simulator.control_hz
    scripted: bool = False  # whether its scenes have an expert

    @classmethod
    def of(cls, opened: Mapping[str, Any]) -> Facts:
        """Returns the facts in an answer; raises TypeError if some are missing."""
        return cls(**{part.name: opened[part.name] for part in fields(cls) if part.name in opened})


@dataclass(kw_only=True, slots=True)
class ForeignOptions(EnvOptions):
    """The options in env.options that all of these simulators have."""

    adapter: str = ""  # import path of the Adapter
    processes: int = 0  # per worker, each with a share of its rows; 0: one, or one per core if the worker has a GPU
    spare_scenes: int = 2  # per process, kept for later episodes of their tasks
    timeout_s: int = 600  # for a process's answer; building a scene takes seconds

    def __post_init__(self) -> None:
        require_numbers(self, "env.options", "processes", "spare_scenes")
        require_numbers(self, "env.options", "timeout_s", above=True)


class Scene(Protocol):
    """A simulator of one row and one task; a scene whose simulator has a scripted expert also has `expert()`."""

    def begin(self, start: Start) -> None:
        """Brings it to the initial state of an episode, independently of earlier ones."""
        ...

    def step(self, action: np.ndarray) -> None:
        """Runs one control step; the action is an item of the adapter's `actions`, float32 [A] by default."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Returns success, reward and the columns of Facts.state.

        proprio [P] and, if available: privileged [Q], object [3] (m), terminated, truncated
        """
        ...

    def open_renderer(self) -> Any:
        """Returns a renderer for all scenes of this task; it has a method `close`."""
        ...

    def image(self, renderer: Any, camera: str, size: int) -> np.ndarray:
        """Returns uint8 [H, W, 3], upright; [size, size, 3] if the size can be chosen."""
        ...

    def close(self) -> None: ...


class Adapter:
    """A simulator, such as those in envs/libero.py and envs/metaworld.py."""

    key: ClassVar[str]  # .venv-<key>, experiments/setup/<key>.txt, configs/env/<key>.yaml
    name: ClassVar[str]  # in messages
    packages: ClassVar[tuple[str, ...]] = ()  # imported in this order
    Options: ClassVar[type] = ForeignOptions
    cameras: ClassVar[tuple[str, ...]] = ()  # of its scenes; (): any name
    film_camera = ""  # shown in videos; "": the first of env.cameras

    def __init__(self, task: str, options: Any) -> None:
        self.task, self.options = task, options

    # ------------------------------------------------------------------------------------------------- in the run
    def check(self, config: EnvConfig) -> None:
        """Raises ConfigError if the simulator does not support this section."""
        for camera in config.cameras if self.cameras else ():
            rule = f"{self.name}'s scenes have other cameras"
            require(camera in self.cameras, "env.cameras", camera, rule, f"use {', '.join(self.cameras)}")

    def chosen(self, names: Sequence[str]) -> Sequence[int]:
        """Returns the indices of the suite's tasks to use; `names` are the names of all its tasks."""
        return range(len(names))

    def start(self, seed: int, tasks: Sequence[int]) -> Start:
        """Returns the start of a reset seed; its task is one of `tasks`."""
        return Start(tasks[seed % len(tasks)], None, seed)

    def python(self) -> Path:
        """Returns the Python that runs the simulator, or raises SimulatorError if it is not installed."""
        return installed_python(self.key, self.name)

    # --------------------------------------------------------------------------------- in the simulator's process
    def open(self, cameras: Sequence[str], size: int) -> Facts:
        """Returns the facts; `packages` are imported."""
        raise NotImplementedError

    def scene(self, task: int) -> Scene:
        raise NotImplementedError

    def actions(self, chosen: np.ndarray) -> Sequence[Any]:
        """Returns the action of `Scene.step` for each of N rows; `chosen` is the policy's, float32 [N, A]."""
        return chosen

    def image_size(self, size: int) -> tuple[int, int]:
        """Returns height and width of the images that a policy sees with env.obs_size."""
        return size, size

    def oriented(self, image: np.ndarray) -> np.ndarray:
        """Returns an upright image as the policy sees it."""
        return image


def folder_of(key: str) -> Path:
    """Returns the folder of a simulator's virtual environment, which may not exist."""
    return Path(os.environ.get(f"RLINF_EMBODIED_{key.upper()}") or REPOSITORY / f".venv-{key}").absolute()


def installed_python(key: str, name: str) -> Path:
    """Returns the Python of a simulator's virtual environment; raises SimulatorError if there is none."""
    python = folder_of(key) / "bin" / "python"
    if not python.exists():
        raise SimulatorError(
            f"{name} runs in a separate virtual environment, and {folder_of(key)} does not exist: install it with "
            f"`python -m experiments.setup.foreign env={key}`, or set RLINF_EMBODIED_{key.upper()} to its folder"
        )
    return python
