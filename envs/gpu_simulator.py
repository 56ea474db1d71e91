"""One stock ManiSkill env that simulates and renders all of its rows on a GPU, as a `Simulator`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields

import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.structs import Actor
from sapien import physx
from torch import Tensor
from torch.utils._pytree import tree_map

from envs.batched.seeds import FIRST_SEED
from envs.gpu_rows import ResetValues, RestStates, RowResets, require_alike
from envs.maniskill import ManiskillOptions
from envs.simulator import Measurement
from envs.simulators import OneTask, hidden_actors, sensors_of
from envs.stock import colour_images, task_actions
from rlinf_embodied.errors import ConfigError, SimulatorError


class GpuSimulator(OneTask):
    """One batched physx_cuda env; tensors stay on the device.

    All rows are stepped together, including those at rest, which report the state in which they came to rest.
    """

    backend = "physx_cuda"
    history_free = False  # a batched reset draws for all of its rows at once

    def __init__(self, task_id: str, task: BaseEnv, cameras: Sequence[str], options: ManiskillOptions) -> None:
        """Takes a task whose scenes are simulated and rendered as one batch.

        Raises:
            ConfigError: an unknown camera, or a goal that cannot be hidden.
        """
        super().__init__(task_id, task, options)
        self._cameras = cameras
        sensors_of(task, cameras)
        if not options.show_goal:
            require_hideable(task_id, self._view.goal)
        task._hidden_objects = hidden_actors(self._view, options.show_goal)
        self._resets, self._rest = RowResets(task), RestStates(task)
        self._seeds = [FIRST_SEED] * self.num_rows
        self._resting: set[int] = set()
        self._moved: set[int] = set()  # rows at rest that were stepped since they came to rest
        self._rests = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        self._shown: Measurement | None = None

    # ----------------------------------------------------------------------------------------------------------- reset
    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Resets rows; rows with equal seeds get equal states (SimulatorError if they are built of different objects).

        A batched reset draws for all rows at once, from a generator seeded with the first entry of the seed list.
        """
        seed_of = {row: int(seed) for row, seed in sorted(zip(rows, seeds, strict=True))}  # rows are written in order
        leaders: dict[int, int] = {}
        pairs = [(row, leaders.setdefault(seed, row)) for row, seed in seed_of.items()]
        followers = [(row, leader) for row, leader in pairs if row != leader]
        if followers:
            require_alike(self._task)
        for row, seed in seed_of.items():
            self._seeds[row] = seed
        self._set_resting(self._resting.difference(rows))
        self._moved.difference_update(rows)
        index, written = self._index(seed_of), ResetValues(self._task)
        self._resets.begin(index)
        drawn = [next(iter(seed_of.values())), *self._seeds[1:]]
        self._task.reset(seed=drawn, options={"env_idx": index})
        if followers:
            self._copy(*(self._index(part) for part in zip(*followers, strict=True)), written)

    def _copy(self, followers: Tensor, leaders: Tensor, written: ResetValues) -> None:
        """Copies the state of rows that were reset to other rows (groups of GRPO start from one state)."""
        state = tree_map(lambda value: value[leaders].clone(), self._task.scene.get_sim_state())
        self._task.set_state_dict(state, followers)
        written.copy(leaders, followers)

    # ------------------------------------------------------------------------------------------------------------ step
    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        resting = set(range(self.num_rows)).difference(rows)
        self._put_back(self._resting - resting)
        if begins := resting - self._resting:
            self._rest.keep(begins)
        self._set_resting(resting)
        self._task._step_action(task_actions(self._task, actions))
        self._resets.stepped()
        self._moved = set(resting)

    def measure(self, actions: Tensor) -> Measurement:
        measured = super().measure(actions)
        if self._resting and self._shown is not None:
            measured = _joined(self._rests, self._shown, measured)
        self._shown = measured
        return measured

    def object_positions(self) -> Tensor | None:
        self._put_back(self._moved)
        return super().object_positions()

    def _set_resting(self, rows: set[int]) -> None:
        if rows != self._resting:
            self._resting = rows
            self._rests[:] = False
            self._rests[self._index(rows)] = True

    def _put_back(self, rows: Collection[int]) -> None:
        """Restores the state in which these rows came to rest."""
        moved = self._moved.intersection(rows)
        self._rest.put_back(moved)
        self._moved -= moved

    # ---------------------------------------------------------------------------------------------------------- images
    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        self._put_back(rows)
        seen, index = colour_images(self._task), self._index(rows)
        return {name: seen[name][index] for name in self._cameras}

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        self._put_back(rows)
        shown = self._film_images()
        for actor in self._task._hidden_objects:  # ManiSkill leaves them shown where there is one camera only
            actor.hide_visual()
        pixels = shown[self._index(rows)].permute(0, 3, 1, 2).float()
        images = torch.nn.functional.interpolate(pixels, (size, size), mode="area").round().to(torch.uint8)
        return {row: image.cpu() for row, image in zip(rows, images.permute(0, 2, 3, 1), strict=True)}

    def _film_images(self) -> Tensor:
        """Returns images of the task's first render camera, or else its first sensor, with all goals visible."""
        task = self._task
        people = next(iter(task._human_render_cameras), None)
        shown = None if people is None else task.render_rgb_array(people)
        if shown is not None:
            return shown
        hidden, task._hidden_objects = task._hidden_objects, []
        try:
            for actor in hidden:
                actor.show_visual()
            seen = colour_images(task)
        finally:
            task._hidden_objects = hidden
        if not seen:
            raise SimulatorError(
                f"{type(task).__name__} has no camera to film with: use eval.record_video=false, or give the task one"
            )
        return next(iter(seen.values()))

    def _index(self, rows: Iterable[int]) -> Tensor:
        return torch.as_tensor(list(rows), dtype=torch.long, device=self.device)


def _joined(rests: Tensor, before: Measurement, now: Measurement) -> Measurement:
    """Returns `before` for the rows that rest [N] and `now` for the others."""
    columns = {}
    for name in (each.name for each in fields(Measurement)):
        old, new = getattr(before, name), getattr(now, name)
        columns[name] = None if new is None else torch.where(rests.view(-1, *[1] * (new.ndim - 1)), old, new)
    return Measurement(**columns)


def require_hideable(task_id: str, goal: Actor | None) -> None:
    """Raises ConfigError if a goal has collision shapes: on a GPU, ManiSkill hides an actor by moving it far away."""
    bodies = [] if goal is None else [each.find_component_by_type(physx.PhysxRigidBaseComponent) for each in goal._objs]
    if any(body is not None and body.collision_shapes for body in bodies):
        raise ConfigError(
            f"env.options.show_goal is false, but the goal of {task_id} can be touched, and ManiSkill cannot hide "
            "such a body on a GPU: use env.options.show_goal=true, or env.backend=batched"
        )
