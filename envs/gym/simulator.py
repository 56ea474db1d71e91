"""N rows, each a Gymnasium env, stepped one after the other or by several threads.

Rows over processes are a plan's affair: every worker has rows of its own.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from torch import Tensor

from envs.batched.checks import short
from envs.gym.options import CAMERA, GymnasiumOptions
from envs.gym.spaces import ActionCode, ObservationCode, is_history_free, told_success
from envs.simulator import Measurement, Simulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import SimulatorError

_LOG = logging.getLogger(__name__)
_FILM_SIZE = 256  # pixels of MuJoCo's images where the policy sees none
_PROBE_SEED = 0


class GymnasiumSimulator(Simulator):
    """Rows of one Gymnasium id."""

    def __init__(self, config: EnvConfig, options: GymnasiumOptions, num_rows: int) -> None:
        """Makes the rows, resets each once, and steps one of them to see what `info` tells.

        Raises:
            SimulatorError: the id is unknown, its packages are missing, or its spaces cannot be used.
        """
        self.num_rows, self._config = num_rows, config
        self._rows = [make_row(config, options) for _ in range(num_rows)]
        first = self._rows[0]
        self._action = ActionCode.of(first.action_space, config.task)
        self._code = ObservationCode.of(first.observation_space, config.task)
        self._require_images()
        self.action_dim, self.categorical = self._action.dim, self._action.categorical
        self.backend = f"gymnasium {gymnasium.__version__}"
        own = is_history_free(first)
        self.history_free = own if options.history_free is None else options.history_free
        self._pool = ThreadPoolExecutor(options.threads) if options.threads > 1 else None
        self._shares = [range(part, num_rows, options.threads) for part in range(min(options.threads, num_rows))]
        self._seen: list[object] = [None] * num_rows
        self._state = np.zeros((num_rows, self._code.dim), np.float32)
        self._reward = np.zeros(num_rows, np.float32)
        self._success, self._terminated, self._truncated = (np.zeros(num_rows, bool) for _ in range(3))
        self._filmable = CAMERA in first.metadata.get("render_modes", ())
        self.reset(range(num_rows), [_PROBE_SEED] * num_rows)
        self.has_success = self._tells_success() if options.success is None else options.success

    # -------------------------------------------------------------------------------------------------------- protocol
    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts an episode in each of these rows."""
        seed_of = dict(zip(rows, seeds, strict=True))
        self._each(list(rows), lambda row: self._reset_row(row, int(seed_of[row])))

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one step of these rows; a Discrete action is the largest of its entries."""
        values = actions.numpy()
        self._each(rows, lambda row: self._step_row(row, self._action.decode(values[row])))

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all rows.

        Raises:
            SimulatorError: an observation or reward is NaN or infinite.
        """
        for name, value in (("observation", self._state), ("reward", self._reward)):
            if not np.isfinite(value).all():
                rows = np.flatnonzero(~np.isfinite(value.reshape(self.num_rows, -1)).all(1)).tolist()
                raise SimulatorError(
                    f"env.task is {self._config.task!r}, whose {name} is NaN or infinite in rows {short(rows)}: a "
                    "policy would learn NaN from it; let the env end such an episode, and return finite numbers"
                )
        copy = lambda array: torch.from_numpy(array.copy())  # noqa: E731
        return Measurement(
            reward=copy(self._reward),
            success=copy(self._success),
            proprio=copy(self._state),
            terminated=copy(self._terminated),
            truncated=copy(self._truncated),
        )

    def images(self, rows: Sequence[int]) -> Tensor:
        """Returns what `render` gives, or the observation where that is an image, uint8 [len(rows), 1, S, S, 3]."""
        size = self._config.obs_size
        return torch.stack([resized(self._image(row), size) for row in rows])[:, None]

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Returns what `render` gives; {} where the env cannot draw, which is said once."""
        if not self._filmable:
            return {}
        try:
            return {row: resized(self._rendered(row), size) for row in rows}
        except SimulatorError as error:
            self._filmable = False
            _LOG.warning("there will be no videos: %s", error)
            return {}

    def close(self) -> None:
        """Closes the rows."""
        if self._pool is not None:
            self._pool.shutdown()
        for row in self._rows:
            row.close()

    # ------------------------------------------------------------------------------------------------------------ rows
    def _each(self, rows: Sequence[int], run: Callable[[int], None]) -> None:
        if self._pool is None:
            for row in rows:
                run(row)
            return
        wanted = set(rows)
        share = lambda part: [run(row) for row in part if row in wanted]  # noqa: E731
        list(self._pool.map(share, self._shares))

    def _reset_row(self, row: int, seed: int) -> None:
        observation, info = self._rows[row].reset(seed=seed)
        self._keep(row, observation, info)
        self._reward[row] = 0.0
        self._terminated[row] = self._truncated[row] = False

    def _step_row(self, row: int, action: object) -> None:
        observation, reward, terminated, truncated, info = self._rows[row].step(action)
        self._keep(row, observation, info)
        self._reward[row] = reward
        self._terminated[row], self._truncated[row] = terminated, truncated

    def _keep(self, row: int, observation: object, info: dict[str, Any]) -> None:
        self._seen[row] = observation
        self._state[row] = self._code.state(observation)
        self._success[row] = bool(told_success(info))

    def _tells_success(self) -> bool:
        """Whether `info` of a first step has an entry for success; the row is reset again."""
        *_, info = self._rows[0].step(self._action.decode(np.zeros(self.action_dim)))
        self._reset_row(0, _PROBE_SEED)
        return told_success(info) is not None

    def _image(self, row: int) -> np.ndarray:
        return cast(np.ndarray, self._seen[row]) if self._code.is_image else self._rendered(row)

    def _rendered(self, row: int) -> np.ndarray:
        """Returns what a row draws.

        Raises:
            SimulatorError: its packages or a GL context are missing.
        """
        try:
            return np.asarray(self._rows[row].render())
        except Exception as error:
            raise SimulatorError(
                f"env.task is {self._config.task!r}, whose render() raised {type(error).__name__}: {error}. Install "
                "what it draws with (MuJoCo on a machine without a display: EGL or OSMesa, MUJOCO_GL=egl or osmesa), "
                "or set env.cameras=[] and eval.record_video=false"
            ) from error

    def _require_images(self) -> None:
        asked, draws = bool(self._config.cameras), CAMERA in self._rows[0].metadata.get("render_modes", ())
        task = self._config.task
        if self._code.is_image and not asked:
            raise SimulatorError(f"env.task is {task!r}, which shows nothing but an image: set env.cameras=[{CAMERA}]")
        if asked and not self._code.is_image and not draws:
            raise SimulatorError(
                f"env.cameras is [{CAMERA}], but {task} shows no image and has no render mode {CAMERA}: set "
                "env.cameras=[], or give it that render mode"
            )


def make_row(config: EnvConfig, options: GymnasiumOptions) -> gymnasium.Env:
    """Returns one Gymnasium env without a time limit, which draws what `render` is asked for.

    Raises:
        SimulatorError: there is no such id, or the package that it needs is missing.
    """
    try:
        entry, given = _entry_point(config.task), dict(options.make)
        if isinstance(entry, str) and entry.startswith("gymnasium.envs.mujoco."):
            size = config.obs_size if config.cameras else _FILM_SIZE
            given = {"width": size, "height": size} | given
        made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
        draws = CAMERA in getattr(made, "metadata", {}).get("render_modes", ())
        mode = {"render_mode": CAMERA} if draws else {}  # an env that draws nothing need not take the argument
        return gymnasium.make(config.task, max_episode_steps=-1, disable_env_checker=True, **mode, **given)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise SimulatorError(
            f"env.task is {config.task!r}, which gymnasium.make refuses ({type(error).__name__}: {error}): check the "
            "id, install its package, and name the module that registers it before the id, as in my_envs:MyEnv-v0"
        ) from error


def _entry_point(task: str) -> object:
    """Returns what makes an id; the module before its colon is imported first, which registers it."""
    module, _, name = task.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name).entry_point


def resized(image: np.ndarray, size: int) -> Tensor:
    """Returns an image [H, W], [H, W, 1] or [H, W, 3] as uint8 [size, size, 3]; each pixel is the mean of its area.

    Raises:
        SimulatorError: it has another number of channels.
    """
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise SimulatorError(
            f"an image has shape {list(image.shape)}, but policies see [height, width], or 1 or 3 channels behind "
            "these: put a wrapper around the env that gives it one of these shapes, and register that"
        )
    if tuple(pixels.shape[:2]) != (size, size):
        scaled = torch.nn.functional.interpolate(pixels.permute(2, 0, 1)[None].float(), (size, size), mode="area")
        pixels = scaled[0].permute(1, 2, 0).round().to(torch.uint8)
    return pixels.to(torch.uint8).expand(size, size, 3).contiguous()
