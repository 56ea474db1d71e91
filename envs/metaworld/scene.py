# pyright: reportMissingImports=false
"""One task as the benchmark builds it; runs in MetaWorld's own environment.

An episode is a function of its seed and its actions.  MetaWorld's resets leave these to the next episode, and `begin`
sets them anew, to what they were when the task was built:

    the model      a reset moves bodies, sites and cameras of the model itself
    attributes     of the task's object, among them what rewards compare with
    the state      a reset simulates the hand's way to its first place twice, the first time from where it was left

Objects and goal are drawn as the benchmark draws them, by a reset of its own, but from the seed; with what was drawn
the episode begins as the benchmark's does.
"""

from __future__ import annotations

import copy
import warnings

import gymnasium
import mujoco
import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import ENV_POLICY_MAP

from envs.foreign.starts import Start
from envs.metaworld.rendering import Eye, Look

warnings.filterwarnings("ignore", message="Constant")  # the scripted policies' words about actions that are clipped

_HEAVY = ("mesh_", "tex_", "hfield_", "skin_", "names", "text_", "paths")  # parts of a model that no reset changes
_NOT_STATE = ("model", "data", "mujoco_renderer", "sawyer_observation_space", "_np_random", "_np_random_seed")


class Scene:
    """A row's simulator."""

    def __init__(self, task: str, look: Look) -> None:
        self._look = look
        self._env = ALL_V3_ENVIRONMENTS[task]()
        self._env._partially_observable = False  # the goal is part of the observation, as in MT1, MT10 and MT50
        self._env.__dict__.pop("sawyer_observation_space", None)
        self._env._set_task_called = True
        self._env._set_task_inner()
        self._policy = ENV_POLICY_MAP[task]()
        self._first = _Snapshot(self._env)
        self.drawn = np.zeros(0)  # where this episode's objects and goal are, as MetaWorld codes it

    def begin(self, start: Start) -> None:
        """Brings the row to the initial state of an episode."""
        env = self._env
        self._first.restore()
        env.np_random = np.random.default_rng(start.seed)
        env.seeded_rand_vec, env._freeze_rand_vec = True, False
        env.reset_model()
        self.drawn = np.array(env._last_rand_vec)
        self._first.restore()
        env._last_rand_vec, env._freeze_rand_vec = self.drawn.copy(), True
        self._seen, _ = env.reset()
        self._reward, self._success = 0.0, False

    def step(self, action: np.ndarray) -> None:
        """Runs one control step of 12.5 ms; action [4] in [-1, 1]."""
        self._seen, reward, _, _, info = self._env.step(action)
        self._reward, self._success = float(reward), bool(info["success"])

    def state(self) -> dict[str, np.ndarray]:
        """Returns what the row tells now.

        success  bool []
        reward   float32 [], 0 to 10
        state    float32 [39], hand (m), fingers, up to two objects (m, quaternion), the same one step before, goal
        """
        return {
            "success": np.bool_(self._success),
            "reward": np.float32(self._reward),
            "state": self._seen.astype(np.float32),
        }

    def expert(self) -> np.ndarray:
        """Returns the scripted policy's next action, float32 [4]; it looks at the present observation only."""
        return np.asarray(self._policy.get_action(self._seen), dtype=np.float32)

    def open_eye(self) -> Eye:
        """Returns a renderer for scenes of this task."""
        return Eye(self._env.model, self._look)

    def image(self, eye: Eye, camera: str, size: int) -> np.ndarray:
        """Returns uint8 [size, size, 3], upright."""
        return eye.image(self._env.model, self._env.data, camera, size)

    def close(self) -> None:
        self._env.close()


class _Snapshot:
    """An env as it was built: its model, its state and its attributes."""

    def __init__(self, env) -> None:
        self._env, self._known = env, set(vars(env))
        self._model = {name: array.copy() for name, array in _arrays(env.model)}
        self._kinds = mujoco.mjtState.mjSTATE_INTEGRATION
        self._state = np.empty(mujoco.mj_stateSize(env.model, self._kinds))
        mujoco.mj_getState(env.model, env.data, self._state, self._kinds)
        kept = {name: value for name, value in vars(env).items() if name not in _NOT_STATE}
        self._attributes = {n: v for n, v in kept.items() if not isinstance(v, gymnasium.Space)}
        self._values = copy.deepcopy({n: v for n, v in self._attributes.items() if not _is_simulators(v)})

    def restore(self) -> None:
        """Brings the env back to it."""
        model, data = self._env.model, self._env.data
        for name, array in self._model.items():
            getattr(model, name)[...] = array
        mujoco.mj_resetData(model, data)
        mujoco.mj_setState(model, data, self._state, self._kinds)
        mujoco.mj_forward(model, data)
        mujoco.mj_setState(model, data, self._state, self._kinds)
        for name in [name for name in vars(self._env) if name not in self._known]:
            delattr(self._env, name)
        for name, value in self._attributes.items():
            if isinstance(value, np.ndarray) and name in self._values:
                value[...] = self._values[name]
            setattr(self._env, name, value if isinstance(value, np.ndarray) else copy.deepcopy(self._values[name]))


def _is_simulators(value: object) -> bool:
    """Whether it is an array of MuJoCo's own numbers, which a task keeps to see them change."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return isinstance(value, np.ndarray) and not value.flags.owndata


def _arrays(model: mujoco.MjModel) -> list[tuple[str, np.ndarray]]:
    """Returns the parts of a model that a task may change."""
    names = [name for name in dir(model) if not name.startswith(("_", *_HEAVY))]
    return [(name, value) for name in names if isinstance(value := getattr(model, name), np.ndarray)]
