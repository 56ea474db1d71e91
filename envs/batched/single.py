"""A stock env object laid over the physics of one row after the other, for code that knows a single row only.

Some tasks write what only holds for one env: they combine the limits of all N robots with draws for the rows that are
reset, or count the steps of an episode in one number.  Such code is given a stock single env whose structs point at the
SAPIEN objects of one row of the batch, so that whatever it does happens to that row exactly as in a stock env.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.utils.structs import Pose
from sapien import physx
from torch import Tensor
from torch.utils._pytree import tree_map

from envs.batched.controllers import copy_targets
from envs.batched.scene import structs_of
from envs.stock import overrides
from rlinf_embodied.errors import SimulatorError


class Alone(StrEnum):
    """What of a task's own code runs row by row on a single env, from fast to slow."""

    nothing = "nothing"
    initialisation = "initialisation"  # of episodes
    everything = "everything"  # hooks of a step, evaluation, rewards and observations too


HOOKS = ("_before_control_step", "_after_control_step", "_before_simulation_step", "_after_simulation_step")
MEASURES = (
    "evaluate",
    "_get_obs_extra",
    "compute_sparse_reward",
    "compute_dense_reward",
    "compute_normalized_dense_reward",
)
_COMPONENTS = ("rigid_dynamic_components", "rigid_static_components", "articulation_link_components")
_OBJECT_LISTS = ("_objs", "_bodies", "_physx_articulations")  # where ManiSkill's structs keep SAPIEN objects
_OF_BASE_ENV = frozenset({"_elapsed_steps", "_episode_seed", "_last_obs", "_main_seed"})  # the batch keeps its own


class SingleEnv:
    """One stock env, N rows to lay it over; each row has its own values of the env's attributes."""

    def __init__(self, env: BaseEnv, batch: BaseEnv) -> None:
        """Takes a newly built stock single env of the task of which `batch` has N rows.

        Raises:
            SimulatorError: the rows have other bodies than the single env.
        """
        self.env, self._batch = env, batch
        self._fresh = _data_of(env)
        self._values = [_copied(self._fresh) for _ in range(batch.num_envs)]
        twins = [_twins(env.scene.px, system) for system in batch.scene.px.systems]
        self._places = _places(env, twins)

    def reset(self, row: int, seed: int, options: Mapping[str, object]) -> None:
        """Starts an episode in this row as in a stock env that was just built; nothing is evaluated."""
        self._values[row] = _copied(self._fresh)
        with self.over(row):
            self.env.get_info = self.env.get_obs = lambda *_: {}
            self.env.reset(seed=seed, options=dict(options))
            del self.env.get_info, self.env.get_obs

    @contextmanager
    def over(self, row: int) -> Iterator[BaseEnv]:
        """Within it, the env is that of this row."""
        scene, px = self.env.scene, self._batch.scene.px
        scene.sub_scenes[0], scene.px = px.scenes[row], px.systems[row]
        for objects, index, by_row in self._places:
            objects[index] = by_row[row]
        self.env.__dict__.update(self._values[row])
        self.env._obs_mode, self.env.obs_mode_struct = self._batch._obs_mode, self._batch.obs_mode_struct
        self.env._elapsed_steps = self._batch._elapsed_steps[row : row + 1].clone()
        try:
            yield self.env
        finally:
            self._values[row] = _data_of(self.env)

    @contextmanager
    def acting(self, row: int) -> Iterator[BaseEnv]:
        """Within it, the env is that of this row, in the middle of an episode."""
        with self.over(row) as env:
            copy_targets(self._batch.agent, row, len(self._values), env.agent)
            yield env

    def copy_values(self, row: int) -> None:
        """Copies the attributes of this row's env into the batch's attributes with one entry per row."""
        for name, value in self._values[row].items():
            if name not in _OF_BASE_ENV:
                _copy_row(value, self._batch.__dict__.get(name), row, self._batch.num_envs)

    def measured(self, name: str, *args: object) -> object:
        """Calls a method of the env for every row, with the row's entries of the arguments; returns all results."""
        n = len(self._values)
        results = []
        for row in range(n):
            with self.acting(row) as env:
                results.append(getattr(env, name)(*tree_map(lambda value, row=row: _entry(value, row, n), args)))
        return tree_map(lambda *values: torch.cat([_as_rows(value) for value in values]), *results)


def rowwise_methods(task_class: type[BaseEnv]) -> dict[str, Callable]:
    """Returns replacements of the methods a task class overrides that run them on the batch's single env."""

    def hook(name: str) -> Callable:
        def method(batch: BaseEnv) -> None:
            rows = batch.scene.px.active
            for row in rows:
                with batch._single.acting(row) as env:
                    getattr(env, name)()
            batch.scene.px._invalidate(rows)

        return method

    def measure(name: str) -> Callable:
        def method(batch: BaseEnv, *args: object, **kwargs: object) -> object:
            return batch._single.measured(name, *args, *kwargs.values())

        return method

    own = [name for name in (*HOOKS, *MEASURES) if overrides(task_class, name)]
    own.append("_get_obs_agent")  # what robots observe is their own code too
    return {name: (hook if name in HOOKS else measure)(name) for name in own}


def _twins(single: physx.PhysxCpuSystem, row: physx.PhysxCpuSystem) -> dict[object, object]:
    """Returns the row's counterpart of every SAPIEN object of the single env; both were built by the same code."""
    twins: dict[object, object] = {}
    for kind in _COMPONENTS:
        ours, theirs = getattr(single, kind), getattr(row, kind)
        if [type(component) for component in ours] != [type(component) for component in theirs]:
            raise SimulatorError(f"its rows are not built alike: {len(theirs)} {kind}, {len(ours)} in a single env")
        for component, twin in zip(ours, theirs, strict=True):
            twins[component], twins[component.entity] = twin, twin.entity
            if isinstance(component, physx.PhysxArticulationLinkComponent):
                twins[component.articulation], twins[component.joint] = twin.articulation, twin.joint
    return twins


def _places(env: BaseEnv, twins: list[dict[object, object]]) -> list[tuple[list, int, list]]:
    """Returns (list, index, object by row) for every place where the env's structs refer to SAPIEN objects."""
    found = [getattr(struct, name, None) for struct in structs_of(env) for name in _OBJECT_LISTS]
    lists = {id(objects): objects for objects in found if isinstance(objects, list)}
    return [
        (objects, index, [by_object[objects[index]] for by_object in twins])
        for objects in lists.values()
        for index in range(len(objects))
    ]


def _is_data(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_data(item) for item in value)
    if isinstance(value, dict):
        return all(_is_data(item) for item in value.values())
    kinds = (Tensor, np.ndarray, np.generic, np.random.RandomState, BatchedRNG, Pose, bool, int, float, str)
    return value is None or isinstance(value, kinds)


def _data_of(env: BaseEnv) -> dict[str, object]:
    """Returns the env's attributes that are values, not parts of the simulation."""
    return {name: value for name, value in env.__dict__.items() if _is_data(value)}


def _copied(value: object) -> object:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value if isinstance(value, BatchedRNG) else copy.deepcopy(value)  # a reset makes new generators


def _copy_row(value: object, batch: object, row: int, num_rows: int) -> None:
    if isinstance(value, Pose) and isinstance(batch, Pose):
        value, batch = value.raw_pose, batch.raw_pose
    for kind in (Tensor, np.ndarray):
        if not isinstance(value, kind) or not isinstance(batch, kind):
            continue
        if value.shape[:1] == (1,) and tuple(batch.shape) == (num_rows, *value.shape[1:]):
            batch[row] = value[0]


def _entry(value: object, row: int, num_rows: int) -> object:
    return value[row : row + 1] if isinstance(value, Tensor) and value.shape[:1] == (num_rows,) else value


def _as_rows(value: object) -> Tensor:
    value = torch.as_tensor(value)
    return value if value.dim() else value[None]
