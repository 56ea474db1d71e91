"""One Gymnasium env as a row: observations, rewards and ends; imports neither torch nor Hydra."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from envs.foreign.adapter import REPOSITORY, Adapter, Facts, ForeignOptions, Start, installed_python
from envs.foreign.worker import offscreen_gl, why_not_imported
from envs.gym.spaces import ActionCode, ObservationCode
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import SimulatorError

RENDERED = "rgb_array"  # the render mode that returns an image
FILM_SIZE = 256  # pixels of MuJoCo's images where the policy sees none
PROBE_SEED = 0
SUCCESS = ("is_success", "success", "succeed")  # keys of `info`: Gymnasium-Robotics, MetaWorld, LeRobot's plug-ins
DEFAULT_STEPS = 1000  # of an episode without a time limit in Gymnasium
_HISTORY_FREE = ("gymnasium.envs.mujoco.", "gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")  # modules


@dataclass(kw_only=True, slots=True)
class GymnasiumOptions(ForeignOptions):
    """The options in env.options."""

    history_free: bool | None = None  # episodes are functions of seed and actions; None: true for Gymnasium's own envs
    success: bool | None = None  # whether `info` has is_success or success; None: decided by the first step
    physical_actions: bool = False  # actions are in the units of the action space, not [-1, 1] mapped to its bounds
    image_size: list[int] = field(default_factory=list)  # height and width of the image; []: env.obs_size, both
    python: str = ""  # of another virtual environment: <key> for .venv-<key>, or a path
    make: dict[str, Any] = field(default_factory=dict)  # arguments of gymnasium.make

    def __post_init__(self) -> None:
        ForeignOptions.__post_init__(self)
        reserved = sorted({"render_mode", "max_episode_steps", "num_envs"} & set(self.make))
        rule = "rendering follows env.cameras, the time limit is env.horizon, and the rows are env.num_envs"
        require(not reserved, "env.options.make", reserved, rule, "leave them out")
        fits = not self.image_size or (len(self.image_size) == 2 and min(self.image_size) > 0)
        require(fits, "env.options.image_size", self.image_size, "it is [<height>, <width>] in pixels", "give both")


class Gymnasium(Adapter):
    """A Gymnasium id."""

    key, packages = "gymnasium", ("gymnasium",)
    film_camera = "film"
    Options = GymnasiumOptions
    options: GymnasiumOptions

    def __init__(self, task: str, options: GymnasiumOptions) -> None:
        super().__init__(task, options)
        self.name = task

    def python(self) -> Path:
        """Returns the Python of env.options.python; raises SimulatorError if it does not exist."""
        path = self.options.python
        if "/" not in path:
            return installed_python(path, self.task)
        python = REPOSITORY / Path(path).expanduser()
        if not python.exists():
            raise SimulatorError(
                f"env.options.python is {path!r}, the Python that runs the env, but {python} does not exist: install "
                "it with `python -m venv`, with gymnasium and the package of the env"
            )
        return python

    def open(self, cameras: Sequence[str], size: int) -> Facts:
        """Makes the first row, and steps it once to learn whether `info` reports success."""
        self._size = self.image_size(size) if cameras else (FILM_SIZE, FILM_SIZE)
        first = self._first = Row(self.task, self.options, self._size)
        self._code = first.action
        if first.code.is_image and not first.code.dim and not cameras:
            raise SimulatorError(
                f"env.task is {self.task!r}, which observes only an image: set env.cameras=[{RENDERED}]"
            )
        if cameras and not first.code.is_image and not first.draws:
            raise SimulatorError(
                f"env.cameras is {list(cameras)}, but {self.task} has neither an image in its observation nor the "
                f"render mode {RENDERED}: set env.cameras=[], or give it that render mode"
            )
        options = self.options
        return Facts(
            tasks=[("", self.task)],
            action_dim=first.action.dim,
            state={"proprio": first.code.dim, "terminated": None, "truncated": None},
            backend=f"gymnasium {gymnasium.__version__}",
            has_success=first.reports_success() if options.success is None else options.success,
            history_free=first.history_free if options.history_free is None else options.history_free,
            categorical=first.action.categorical,
            films=first.draws,
            scripted=hasattr(first.env.unwrapped, "expert_action"),
        )

    def image_size(self, size: int) -> tuple[int, int]:
        height, width = self.options.image_size or (size, size)
        return height, width

    def actions(self, chosen: np.ndarray) -> Sequence[Any]:
        return self._code.decode(chosen)

    def scene(self, task: int) -> Row:
        row, self._first = self._first or Row(self.task, self.options, self._size), None
        return row


class Row:
    """A Gymnasium env without a time limit, after a reset."""

    def __init__(self, task: str, options: GymnasiumOptions, size: tuple[int, int]) -> None:
        """Makes the env of Gymnasium's id `task`; `size` is height and width of images that MuJoCo renders.

        Raises:
            SimulatorError: the id is unknown, its packages are missing, or its spaces cannot be used.
        """
        self._task = task
        self.env = _make(task, options.make, size)
        self.action = ActionCode.of(self.env.action_space, task, options.physical_actions)
        self.code = ObservationCode.of(self.env.observation_space, task)
        self.draws = RENDERED in self.env.metadata.get("render_modes", ())
        self.history_free = type(self.env.unwrapped).__module__.startswith(_HISTORY_FREE)
        self._reset(PROBE_SEED)

    def begin(self, start: Start) -> None:
        self._reset(start.seed)

    def step(self, action: np.ndarray | int) -> None:
        self._observation, reward, terminated, truncated, self._info = self.env.step(action)
        self._reward, self._terminated, self._truncated = float(reward), bool(terminated), bool(truncated)

    def state(self) -> dict[str, Any]:
        """Returns the current proprio [P], reward [], success [], terminated [] and truncated []."""
        return {
            "proprio": self.code.state(self._observation).astype(np.float32),
            "reward": self._reward,
            "success": any(self._info.get(name, False) for name in SUCCESS),
            "terminated": self._terminated,
            "truncated": self._truncated,
        }

    def reports_success(self) -> bool:
        """Takes one step, returns whether `info` has an entry for success, and resets the row."""
        self.step(self.action.decode(np.zeros((1, self.action.dim)))[0])
        info = self._info
        self._reset(PROBE_SEED)
        return any(name in info for name in SUCCESS)

    def expert(self) -> np.ndarray:
        """Returns the action of the env's `expert_action`, in [-1, 1] or in its units, float32 [A]."""
        return self.action.encode(self.env.unwrapped.expert_action())  # pyright: ignore[reportAttributeAccessIssue]

    def open_renderer(self) -> Row:
        return self

    def image(self, renderer: Row, camera: str, size: int) -> np.ndarray:
        """Returns the observation's image; if it has none, and for videos, the image of `render`.

        Raises:
            SimulatorError: packages or a GL context of the renderer are missing.
        """
        if camera != Gymnasium.film_camera and self.code.is_image:
            return self.code.image(self._observation)
        try:
            return np.asarray(self.env.render())
        except Exception as error:
            raise SimulatorError(
                f"env.task is {self._task!r}, whose render() raised {type(error).__name__}: {error}. Install its "
                "renderer (MuJoCo: apt-get install libegl1), or set env.cameras=[] and eval.record_video=false"
            ) from error

    def close(self) -> None:
        self.env.close()

    def _reset(self, seed: int) -> None:
        self._observation, self._info = self.env.reset(seed=seed)
        self._reward, self._terminated, self._truncated = 0.0, False, False


def _make(task: str, make: Mapping[str, Any], size: tuple[int, int]) -> gymnasium.Env:
    """Returns one Gymnasium env without a time limit; raises SimulatorError if its id or a package is unknown."""
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", offscreen_gl())  # MuJoCo reads it when it is imported
    try:
        entry, kwargs = _spec_of(task).entry_point, dict(make)
        if isinstance(entry, str) and entry.startswith("gymnasium.envs.mujoco."):
            kwargs = {"width": size[1], "height": size[0]} | kwargs
        creator = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        draws = RENDERED in getattr(creator, "metadata", {}).get("render_modes", ())
        mode = {"render_mode": RENDERED} if draws else {}  # an env without that mode need not take the argument
        return gymnasium.make(task, max_episode_steps=-1, disable_env_checker=True, **mode, **kwargs)
    except AttributeError as error:
        if "glGetError" not in str(error):
            raise
        raise SimulatorError(f"env.task is {task!r}: {why_not_imported('MuJoCo', error)}") from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise SimulatorError(
            f"env.task is {task!r}, which gymnasium.make refuses ({type(error).__name__}: {error}): check the "
            "id, install its package, and name the module that registers it before the id, as in my_envs:MyEnv-v0; "
            "the module's folder has to be on PYTHONPATH"
        ) from error


def time_limit(task: str) -> int:
    """Returns Gymnasium's time limit for an id, in steps, or 1000."""
    try:
        return _spec_of(task).max_episode_steps or DEFAULT_STEPS
    except (gymnasium.error.Error, ImportError):  # reported when the env is made
        return DEFAULT_STEPS


def _spec_of(task: str) -> gymnasium.envs.registration.EnvSpec:
    """Returns the spec registered under an id; imports the module before its colon, if any, which registers it."""
    module, _, name = task.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)
