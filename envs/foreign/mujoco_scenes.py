"""MuJoCo scenes: images, drawn in a context that all scenes of one task share, and a task's env as it was built."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

_MOST_GEOMS = 1000
_CELLS = 24  # along the longest side of a mesh: vertices in one cell become one
_FEW_FACES = 300  # meshes with fewer are not changed
_HEAVY = ("mesh_", "bvh_", "tex_", "hfield_", "skin_", "names", "text_", "paths")  # parts that no reset changes
_NOT_STATE = ("model", "data", "mujoco_renderer", "_np_random", "_np_random_seed")


class Renderer:
    """Renders scenes of one task: a context holds the task's meshes and textures once."""

    def __init__(self, model: Any, light: bool = False) -> None:
        """Opens a rendering context for MuJoCo models such as this one; `options` selects the groups to draw.

        `light`: coarser meshes, no shadows, reflections or smoothed edges.
        """
        import mujoco

        rendered = copy.copy(model)  # the physics keeps the original meshes
        if light:
            rendered.vis.quality.offsamples = 0
            coarsen(rendered)
        self._size = 64
        rendered.vis.global_.offwidth = rendered.vis.global_.offheight = self._size
        self._gl = mujoco.GLContext(self._size, self._size)
        self._gl.make_current()
        self._context = mujoco.MjrContext(rendered, mujoco.mjtFontScale.mjFONTSCALE_50)
        self._scene = mujoco.MjvScene(model, _MOST_GEOMS)
        if light:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self.options = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def image(self, model: Any, data: Any, camera: str, size: int) -> np.ndarray:
        """Returns uint8 [size, size, 3], upright."""
        import mujoco

        self._gl.make_current()
        if size > self._size:
            mujoco.mjr_resizeOffscreen(size, size, self._context)
            self._size = size
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._camera.fixedcamid = model.camera(camera).id
        parts = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self.options, None, self._camera, parts, self._scene)
        view = mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_render(view, self._scene, self._context)
        pixels = np.empty((size, size, 3), dtype=np.uint8)
        mujoco.mjr_readPixels(pixels, None, view, self._context)  # from the lowest line on
        return pixels[::-1]

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()
        self._gl.free()


def coarsen(model: Any) -> None:
    """Merges the vertices of large meshes within each cell of a grid, and drops the faces that collapse."""
    for k in range(model.nmesh):
        vertices = model.mesh_vert[model.mesh_vertadr[k] :][: model.mesh_vertnum[k]]
        first, count = model.mesh_faceadr[k], model.mesh_facenum[k]
        if count < _FEW_FACES:
            continue
        low = vertices.min(0)
        cells = np.floor((vertices - low) / ((vertices - low).max() / _CELLS)).astype(np.int64)
        _, index, member = np.unique(cells, axis=0, return_index=True, return_inverse=True)
        mean = np.zeros((len(index), 3))
        np.add.at(mean, member, vertices)
        vertices[:] = (mean / np.bincount(member)[:, None])[member]
        faces = index[member[model.mesh_face[first:][:count]]]
        same = (faces == np.roll(faces, 1, axis=1)).any(1)
        _, unlike = np.unique(np.sort(faces, axis=1), axis=0, return_index=True)
        kept = np.setdiff1d(unlike, np.flatnonzero(same))
        for part in (model.mesh_face, model.mesh_facenormal, model.mesh_facetexcoord):
            values = faces if part is model.mesh_face else part[first:][:count].copy()
            part[first:][: len(kept)] = values[kept]
        model.mesh_facenum[k] = len(kept)


class Snapshot:
    """An env as it was built, for tasks whose resets do not restore its model, its state and its attributes."""

    def __init__(self, env: Any, ignored: tuple[str, ...] = ()) -> None:
        """Keeps copies of `env.model`, `env.data` and the attributes of a Gymnasium `MujocoEnv`, without `ignored`."""
        import mujoco
        from gymnasium import Space

        self._env, self._known = env, set(vars(env))
        names = [name for name in dir(env.model) if not name.startswith(("_", *_HEAVY))]
        parts = [(name, getattr(env.model, name)) for name in names]
        self._model = {name: part.copy() for name, part in parts if isinstance(part, np.ndarray)}
        self._kinds = mujoco.mjtState.mjSTATE_INTEGRATION
        self._state = np.empty(mujoco.mj_stateSize(env.model, self._kinds))
        mujoco.mj_getState(env.model, env.data, self._state, self._kinds)
        attributes = {name: value for name, value in vars(env).items() if name not in (*_NOT_STATE, *ignored)}
        self._attributes = {n: v for n, v in attributes.items() if not isinstance(v, Space)}
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
    """Returns whether a value is a view of MuJoCo's memory, which a task keeps to observe changes."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    return isinstance(value, np.ndarray) and not value.flags.owndata
