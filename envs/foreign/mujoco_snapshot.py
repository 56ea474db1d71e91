"""A MuJoCo env as it was built, for tasks whose resets do not restore all that an episode changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

_HEAVY = ("mesh_", "tex_", "hfield_", "skin_", "names", "text_", "paths")  # parts of a model that no reset changes
_NOT_STATE = ("model", "data", "mujoco_renderer", "_np_random", "_np_random_seed")


class Snapshot:
    """An env as it was built: its model, its state and its attributes."""

    def __init__(self, env: Any, ignored: tuple[str, ...] = ()) -> None:
        """Keeps copies of `env.model`, `env.data` and the attributes of Gymnasium's `MujocoEnv` but for some."""
        import mujoco
        from gymnasium import Space

        self._env, self._known = env, set(vars(env))
        names = [name for name in dir(env.model) if not name.startswith(("_", *_HEAVY))]
        parts = [(name, getattr(env.model, name)) for name in names]
        self._model = {name: part.copy() for name, part in parts if isinstance(part, np.ndarray)}
        self._kinds = mujoco.mjtState.mjSTATE_INTEGRATION
        self._state = np.empty(mujoco.mj_stateSize(env.model, self._kinds))
        mujoco.mj_getState(env.model, env.data, self._state, self._kinds)
        kept = {name: value for name, value in vars(env).items() if name not in (*_NOT_STATE, *ignored)}
        self._attributes = {n: v for n, v in kept.items() if not isinstance(v, Space)}
        self._values = copy.deepcopy({n: v for n, v in self._attributes.items() if not _is_simulators(v)})

    def restore(self) -> None:
        import mujoco

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
    """Returns whether it is a view of MuJoCo's memory, which a task keeps to observe changes."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return isinstance(value, np.ndarray) and not value.flags.owndata
