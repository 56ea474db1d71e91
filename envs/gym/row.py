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

from envs.foreign.adapter import REPOSITORY, Adapter, Facts, ForeignOptions, Start, folder_of
from envs.foreign.worker import offscreen_gl, why_not_imported
from envs.gym.spaces import ActionCode, ObservationCode, is_history_free, success_in
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import SimulatorError

CAMERA = "rgb_array"  # the only camera of a Gymnasium env: the image of `render`
FILM_SIZE = 256  # pixels of MuJoCo's images where the policy sees none
PROBE_SEED = 0
DEFAULT_STEPS = 1000  # of an episode without a time limit in Gymnasium
_STEP = ("observation", "reward", "terminated", "truncated", "info")


@dataclass(kw_only=True, slots=True)
class GymnasiumOptions(ForeignOptions):
    """The options in env.options."""

    history_free: bool | None = (
        None  # whether an episode is a function of seed and actions; None: true for Gymnasium's own envs
    )
    success: bool | None = None  # whether `info` has is_success or success; None: decided by the first step
    python: str = ""  # Python of the env's virtual environment, relative to the repository
    make: dict[str, Any] = field(default_factory=dict)  # arguments of gymnasium.make

    def __post_init__(self) -> None:
        ForeignOptions.__post_init__(self)
        taken = sorted({"render_mode", "max_episode_steps", "num_envs"} & set(self.make))
        rule = "rendering follows env.cameras, the time limit is env.horizon, and the rows are env.num_envs"
        require(not taken, "env.options.make", taken, rule, "leave them out")


class Gymnasium(Adapter):
    """A Gymnasium id."""

    key, name, packages = "gymnasium", "Gymnasium", ("gymnasium",)
    film_camera = "film"
    Options = GymnasiumOptions
    options: GymnasiumOptions

    def title(self) -> str:
        return self.task

    def python(self) -> Path:
        """Returns env.options.python, or raises SimulatorError if it does not exist."""
        path = self.options.python
        python = REPOSITORY / Path(path).expanduser()
        key = python.parent.parent.name.removeprefix(".venv-")
        if python.parent.parent == REPOSITORY / f".venv-{key}":
            python = folder_of(key) / "bin" / python.name
        if python.exists():
            return python
        known = (REPOSITORY / "experiments" / "setup" / f"{key}.txt").exists()
        command = f"`python -m experiments.setup.foreign {key}`" if known else "`python -m venv`, with gymnasium and"
        raise SimulatorError(
            f"env.options.python is {path!r}, the Python that runs the env, but {python} does not exist: install it "
            f"with {command if known else command + ' the package of the env'}"
        )

    def open(self, cameras: Sequence[str], size: int) -> Facts:
        """Makes the first row, and steps it once to learn whether `info` reports success."""
        self._size = size if cameras else FILM_SIZE
        first = self._made = Row(self.task, self.options.make, self._size)
        first.require_images(cameras)
        own = self.options
        success = first.reports_success() if own.success is None else own.success
        self._refuses_success = own.success is None and not success
        return Facts(
            tasks=[("", self.task)],
            action_dim=first.action.dim,
            proprio_dim=first.code.dim,
            backend=f"gymnasium {gymnasium.__version__}",
            has_success=success,
            history_free=first.history_free if own.history_free is None else own.history_free,
            categorical=first.action.categorical,
            films=first.draws,
            ends=True,
        )

    def scene(self, task: int) -> Row:
        row, self._made = self._made or Row(self.task, self.options.make, self._size), None
        row.refuses_success = self._refuses_success
        return row


class Row:
    """A Gymnasium env without a time limit, after a reset."""

    def __init__(self, task: str, make: Mapping[str, Any], size: int) -> None:
        """Makes the env of Gymnasium's id `task` with arguments `make`; `size` is that of MuJoCo's images.

        Raises:
            SimulatorError: the id is unknown, its packages are missing, or its spaces cannot be used.
        """
        self._task = task
        self.env = _made(task, make, size)
        self.action = ActionCode.of(self.env.action_space, task)
        self.code = ObservationCode.of(self.env.observation_space, task)
        self.draws = CAMERA in self.env.metadata.get("render_modes", ())
        self.history_free = is_history_free(self.env)
        self.refuses_success = False  # whether success in `info` is an error, as nothing would count it
        self.reset(PROBE_SEED)

    def reset(self, seed: int) -> None:
        observation, info = self._parts("reset", self.env.reset(seed=seed), ("observation", "info"))
        self._keep(observation, info)
        self.reward, self.terminated, self.truncated = 0.0, False, False

    def begin(self, start: Start) -> None:
        self.reset(start.seed)

    def step(self, action: np.ndarray) -> None:
        returned = self._parts("step", self.env.step(self.action.decode(action)), _STEP)
        observation, reward, terminated, truncated, info = returned
        self._keep(observation, info)
        self.reward, self.terminated, self.truncated = float(reward), bool(terminated), bool(truncated)

    def state(self) -> dict[str, Any]:
        """Returns proprio [P], reward [], success [], terminated [] and truncated [] of now."""
        return {
            "proprio": self._proprio,
            "reward": self.reward,
            "success": self.success,
            "terminated": self.terminated,
            "truncated": self.truncated,
        }

    def reports_success(self) -> bool:
        """Returns whether `info` of a first step has an entry for success; the row is reset again."""
        *_, info = self._parts("step", self.env.step(self.action.decode(np.zeros(self.action.dim))), _STEP)
        self.reset(PROBE_SEED)
        return success_in(info) is not None

    def open_renderer(self) -> Row:
        return self

    def image(self, renderer: Row, camera: str, size: int) -> np.ndarray:
        """Returns the observation's image, or if it has none, and for videos, that of `render`."""
        return self.code.image(self._seen) if camera == CAMERA and self.code.is_image else self.rendered()

    def close(self) -> None:
        self.env.close()

    def rendered(self) -> np.ndarray:
        """Returns the image of `render`, or raises SimulatorError if packages or a GL context are missing."""
        try:
            return np.asarray(self.env.render())
        except Exception as error:
            raise SimulatorError(
                f"env.task is {self._task!r}, whose render() raised {type(error).__name__}: {error}. Install its "
                "renderer (MuJoCo: apt-get install libegl1), or set env.cameras=[] and eval.record_video=false"
            ) from error

    def require_images(self, cameras: Sequence[str]) -> None:
        """Raises SimulatorError if these cameras leave a policy without observation, or do not exist."""
        if self.code.is_image and not self.code.dim and not cameras:
            raise SimulatorError(
                f"env.task is {self._task!r}, which observes only an image: set env.cameras=[{CAMERA}]"
            )
        if cameras and not self.code.is_image and not self.draws:
            raise SimulatorError(
                f"env.cameras is [{CAMERA}], but {self._task} has neither an image in its observation nor the render "
                f"mode {CAMERA}: set env.cameras=[], or give it that render mode"
            )

    def _parts(self, method: str, returned: Any, names: Sequence[str]) -> Sequence[Any]:
        if isinstance(returned, tuple) and len(returned) == len(names):
            return returned
        number = len(returned) if isinstance(returned, tuple) else 1
        raise SimulatorError(
            f"env.task is {self._task!r}, whose {method}() returned {number} value{'' if number == 1 else 's'}, but "
            f"Gymnasium's returns {len(names)}: {', '.join(names)}. Correct the env"
        )

    def _keep(self, observation: object, info: dict[str, Any]) -> None:
        if self.code.is_image and (kind := np.asarray(self.code.image(observation)).dtype) != np.uint8:
            raise SimulatorError(
                f"env.task is {self._task!r}, whose observation space declares a uint8 image, but the env "
                f"returns {kind}: return what the space declares"
            )
        if self.refuses_success and success_in(info) is not None:
            raise SimulatorError(
                f"env.task is {self._task!r}, whose info reports success now, but did not after a first step: set "
                "env.options.success=true to count it, or false to use the return"
            )
        self._seen = observation
        self._proprio = self.code.state(observation).astype(np.float32)
        self.success = bool(success_in(info))


def _made(task: str, make: Mapping[str, Any], size: int) -> gymnasium.Env:
    """Returns one Gymnasium env without a time limit; raises SimulatorError if its id or a package is unknown."""
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", offscreen_gl())  # MuJoCo reads it when it is imported
    try:
        entry, given = _entry_point(task), dict(make)
        if isinstance(entry, str) and entry.startswith("gymnasium.envs.mujoco."):
            given = {"width": size, "height": size} | given
        made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        draws = CAMERA in getattr(made, "metadata", {}).get("render_modes", ())
        mode = {"render_mode": CAMERA} if draws else {}  # an env without that mode need not take the argument
        return gymnasium.make(task, max_episode_steps=-1, disable_env_checker=True, **mode, **given)
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
        module, _, name = task.rpartition(":")
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name).max_episode_steps or DEFAULT_STEPS
    except (gymnasium.error.Error, ImportError):  # reported when the env is made
        return DEFAULT_STEPS


def _entry_point(task: str) -> object:
    """Returns the entry point of an id; the module before its colon is imported first, which registers it."""
    module, _, name = task.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name).entry_point
