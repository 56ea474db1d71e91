"""One Gymnasium env as a row: what it shows, pays and ends; needs gymnasium and numpy alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from envs.gym.spaces import ActionCode, ObservationCode, is_history_free, told_success
from rlinf_embodied.errors import SimulatorError

CAMERA = "rgb_array"  # the one camera that Gymnasium knows: what `render` returns
FILM_SIZE = 256  # pixels of MuJoCo's images where the policy sees none
PROBE_SEED = 0
_STEP = ("observation", "reward", "terminated", "truncated", "info")


class Row:
    """A Gymnasium env without a time limit, after a reset."""

    def __init__(self, task: str, make: Mapping[str, Any], size: int) -> None:
        """Makes it.

        Args:
            task: Gymnasium's id.
            make: arguments of gymnasium.make.
            size: of MuJoCo's images, pixels.

        Raises:
            SimulatorError: the id is unknown, its packages are missing, or its spaces cannot be used.
        """
        self._task = task
        self.env = _made(task, make, size)
        self.action = ActionCode.of(self.env.action_space, task)
        self.code = ObservationCode.of(self.env.observation_space, task)
        self.draws = CAMERA in self.env.metadata.get("render_modes", ())
        self.history_free = is_history_free(self.env)
        self.minds_success = False  # whether it is a fault that `info` tells success, since nobody counts it
        self.reset(PROBE_SEED)

    def reset(self, seed: int) -> None:
        """Starts an episode.

        Raises:
            SimulatorError: the env does not return what Gymnasium's do.
        """
        observation, info = self._parts("reset", self.env.reset(seed=seed), ("observation", "info"))
        self._keep(observation, info)
        self.reward, self.terminated, self.truncated = 0.0, False, False

    def step(self, action: np.ndarray) -> None:
        """Runs one step; action [A] in [-1, 1].

        Raises:
            SimulatorError: the env does not return what Gymnasium's do.
        """
        found = self._parts("step", self.env.step(self.action.decode(action)), _STEP)
        observation, reward, terminated, truncated, info = found
        self._keep(observation, info)
        self.reward, self.terminated, self.truncated = float(reward), bool(terminated), bool(truncated)

    def told(self) -> dict[str, np.ndarray]:
        """Returns state [P], reward [], success [], terminated [] and truncated [] of now."""
        return {
            "state": self.state,
            "reward": np.float32(self.reward),
            "success": np.bool_(self.success),
            "terminated": np.bool_(self.terminated),
            "truncated": np.bool_(self.truncated),
        }

    def tells_success(self) -> bool:
        """Whether `info` of a first step has an entry for success; the row is reset again."""
        *_, info = self._parts("step", self.env.step(self.action.decode(np.zeros(self.action.dim))), _STEP)
        self.reset(PROBE_SEED)
        return told_success(info) is not None

    def image(self) -> np.ndarray:
        """Returns the observation's image, or where it has none what the env draws."""
        return self.code.image(self._seen) if self.code.is_image else self.rendered()

    def rendered(self) -> np.ndarray:
        """Returns what the env draws.

        Raises:
            SimulatorError: its packages or a GL context are missing.
        """
        try:
            return np.asarray(self.env.render())
        except Exception as error:
            raise SimulatorError(
                f"env.task is {self._task!r}, whose render() raised {type(error).__name__}: {error}. Install "
                "what it draws with (MuJoCo on a machine without a display: EGL or OSMesa, MUJOCO_GL=egl or osmesa), "
                "or set env.cameras=[] and eval.record_video=false"
            ) from error

    def require_images(self, cameras: Sequence[str]) -> None:
        """Checks that a policy that sees these cameras sees something, and all that there is.

        Raises:
            SimulatorError: it does not.
        """
        if self.code.is_image and not self.code.dim and not cameras:
            raise SimulatorError(
                f"env.task is {self._task!r}, which shows nothing but an image: set env.cameras=[{CAMERA}]"
            )
        if cameras and not self.code.is_image and not self.draws:
            raise SimulatorError(
                f"env.cameras is [{CAMERA}], but {self._task} shows no image and has no render mode {CAMERA}: set "
                "env.cameras=[], or give it that render mode"
            )

    def _parts(self, method: str, found: Any, names: Sequence[str]) -> Sequence[Any]:
        if isinstance(found, tuple) and len(found) == len(names):
            return found
        number = len(found) if isinstance(found, tuple) else 1
        raise SimulatorError(
            f"env.task is {self._task!r}, whose {method}() returned {number} value{'' if number == 1 else 's'}, but "
            f"Gymnasium's returns {len(names)}: {', '.join(names)}. Mend it there"
        )

    def _keep(self, observation: object, info: dict[str, Any]) -> None:
        if self.code.is_image and (kind := np.asarray(self.code.image(observation)).dtype) != np.uint8:
            raise SimulatorError(
                f"env.task is {self._task!r}, whose observation space says that its image is uint8, from 0 to 255, but "
                f"the env shows {kind}: return what the space says"
            )
        if self.minds_success and told_success(info) is not None:
            raise SimulatorError(
                f"env.task is {self._task!r}, whose info tells success now, but did not after a first step: set "
                "env.options.success=true to have it counted, or false to go by the return"
            )
        self._seen = observation
        self.state = self.code.state(observation).astype(np.float32)
        self.success = bool(told_success(info))


def _made(task: str, make: Mapping[str, Any], size: int) -> gymnasium.Env:
    """Returns one Gymnasium env without a time limit, which draws what `render` is asked for.

    Raises:
        SimulatorError: there is no such id, or the package that it needs is missing.
    """
    try:
        entry, given = _entry_point(task), dict(make)
        if isinstance(entry, str) and entry.startswith("gymnasium.envs.mujoco."):
            given = {"width": size, "height": size} | given
        made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        draws = CAMERA in getattr(made, "metadata", {}).get("render_modes", ())
        mode = {"render_mode": CAMERA} if draws else {}  # an env that draws nothing need not take the argument
        return gymnasium.make(task, max_episode_steps=-1, disable_env_checker=True, **mode, **given)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise SimulatorError(
            f"env.task is {task!r}, which gymnasium.make refuses ({type(error).__name__}: {error}): check the "
            "id, install its package, and name the module that registers it before the id, as in my_envs:MyEnv-v0; "
            "the folder of a module of your own has to be on PYTHONPATH"
        ) from error


def _entry_point(task: str) -> object:
    """Returns what makes an id; the module before its colon is imported first, which registers it."""
    module, _, name = task.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name).entry_point
