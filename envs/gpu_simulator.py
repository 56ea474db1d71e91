"""One stock ManiSkill env that simulates and renders all of its rows on a GPU, as a `Simulator`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.structs import Actor
from sapien import physx
from torch import Tensor
from torch.utils._pytree import tree_map

from envs.batched.seeds import FIRST_SEED
from envs.gpu_rows import ResetValues, RowResets, require_alike
from envs.maniskill import ManiskillOptions
from envs.perturbed import AXES, perturb_scenes
from envs.simulator import Measurement
from envs.simulators import OneTask, hidden_actors, sensors_of
from envs.stock import colour_images, task_actions
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError, SimulatorError


class GpuSimulator(OneTask):
    """One batched physx_cuda env; tensors stay on the device.

    All rows are stepped together.  Those at rest report the measurement with which they came to rest; images and
    object positions of theirs are not defined.
    """

    backend = "physx_cuda"
    history_free = False  # a batched reset draws for all of its rows at once
    perturbs = AXES  # no initial steps: they would step running rows, too

    def __init__(self, config: EnvConfig, task: BaseEnv, options: ManiskillOptions) -> None:
        """Takes a task whose scenes are simulated and rendered as one batch.

        Raises:
            ConfigError: an unknown camera, or a goal that cannot be hidden.
        """
        super().__init__(config.task, task, options)
        self._cameras = config.cameras
        sensors_of(task, config.cameras)
        perturb_scenes(task, config.cameras, config.perturb)
        if not options.show_goal:
            require_hideable(config.task, self._view.goal)
        task._hidden_objects = hidden_actors(self._view, options.show_goal)
        self._resets = RowResets(task)
        self._seeds = [FIRST_SEED] * self.num_rows
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
        index, written = self._index(seed_of), ResetValues(self._task)
        self._rests[index] = False
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
        self._rests[:] = True
        self._rests[self._index(rows)] = False
        self._task._step_action(task_actions(self._task, actions))
        self._resets.stepped()

    def measure(self, actions: Tensor) -> Measurement:
        measured = super().measure(actions)
        if self._shown is not None:
            columns = {}
            for name in (each.name for each in fields(Measurement)):
                old, new = getattr(self._shown, name), getattr(measured, name)
                rests = None if new is None else self._rests.view(-1, *[1] * (new.ndim - 1))
                columns[name] = None if new is None else torch.where(rests, old, new)
            measured = Measurement(**columns)
        self._shown = measured
        return measured

    # ---------------------------------------------------------------------------------------------------------- images
    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        seen, index = colour_images(self._task), self._index(rows)
        return {name: seen[name][index] for name in self._cameras}

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
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


def require_hideable(task_id: str, goal: Actor | None) -> None:
    """Raises ConfigError if a goal has collision shapes: on a GPU, ManiSkill hides an actor by moving it far away."""
    bodies = [] if goal is None else [each.find_component_by_type(physx.PhysxRigidBaseComponent) for each in goal._objs]
    if any(body is not None and body.collision_shapes for body in bodies):
        raise ConfigError(
            f"env.options.show_goal is false, but the goal of {task_id} can be touched, and ManiSkill cannot hide "
            "such a body on a GPU: use env.options.show_goal=true, or env.options.backend=batched"
        )
