"""Two ways to run N rows of a ManiSkill task on a CPU as a `Simulator`: batched, and one stock env object per row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.base_sensor import BaseSensor
from mani_skill.utils.structs import Actor, Link
from torch import Tensor

from envs.batched.build import make_batched_task
from envs.batched.decimate import Swap, decimate_visuals
from envs.batched.rendering import set_visible, take_images
from envs.batched.shaders import STOCK, Pack, camera_shaders, give_shaders, note_pack
from envs.maniskill import ManiskillOptions
from envs.perturbed import AXES, perturb_scenes
from envs.simulator import Measurement, Simulator
from envs.stock import action_dim, build_task, recreate_scene, task_actions
from envs.tasks import TaskView, expert_of
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError, SimulatorError


def sensors_of(task: BaseEnv, cameras: Sequence[str]) -> list[BaseSensor]:
    """Returns the named cameras of a task, or raises ConfigError."""
    unknown = [name for name in cameras if name not in task._sensors]
    if unknown:
        known = ", ".join(task._sensors) or "none"
        raise ConfigError(f"env.cameras has {', '.join(unknown)}, but the cameras of this task and robot are: {known}")
    return [task._sensors[name] for name in cameras]


def hidden_actors(view: TaskView, show_goal: bool) -> list[Actor]:
    """Returns the actors that policies must not see: those that the task hides, and its goal marker."""
    hidden = [actor for actor in view.env._hidden_objects if actor is not view.goal]
    return hidden if show_goal or view.goal is None else [*hidden, view.goal]


class _CpuRenderer:
    """Images from one CPU scene per row; does not change the physics.

    `views` are of one batched task, or of one stock task per row.  A row gets another camera when it is first filmed,
    whose images show the original meshes and the goal.
    """

    def __init__(self, views: Sequence[TaskView], config: EnvConfig, options: ManiskillOptions) -> None:
        cameras = config.cameras
        self._names, self._places = cameras, [(v.env, row) for v in views for row in range(v.env.num_envs)]
        self._cameras = [
            [sensor.camera._render_cameras[row] for sensor in sensors_of(task, cameras)] for task, row in self._places
        ]
        for view in views:
            perturb_scenes(view.env, cameras, config.perturb)
        self._swaps: list[list[Swap]] = [[] for _ in self._places]
        if options.decimate and cameras:
            self._swaps = [decimate_visuals(self._scene(row), cameras) for row, cameras in enumerate(self._cameras)]
        hidden = {view.env: hidden_actors(view, options.show_goal) for view in views}
        self._hidden = [[actor._objs[row] for actor in hidden[task]] for task, row in self._places]
        for entity in (entity for row in self._hidden for entity in row):
            set_visible(entity, False)
        self._film_cameras: dict[tuple[int, int], sapien.render.RenderCameraComponent] = {}

    def _scene(self, row: int) -> sapien.Scene:
        task, index = self._places[row]
        return task.scene.sub_scenes[index]  # looked up each time: scene recreation replaces the list's items

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        images = take_images([self._scene(row) for row in rows], [self._cameras[row] for row in rows])
        return dict(zip(self._names, images.unbind(1), strict=True))

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        return {row: self._film(row, size) for row in rows}

    def _film(self, row: int, size: int) -> Tensor:
        camera = self._film_cameras.get((row, size)) or self._add_film_camera(row, size)
        for swap in self._swaps[row]:
            swap.show_heavy()
        for entity in self._hidden[row]:
            set_visible(entity, True)
        try:
            return take_images([self._scene(row)], [[camera]])[0, 0]
        finally:
            for entity in self._hidden[row]:
                set_visible(entity, False)
            for swap in self._swaps[row]:
                swap.show_light()

    def _add_film_camera(self, row: int, size: int) -> sapien.render.RenderCameraComponent:
        """Adds a copy of the task's human render camera, or else of its first sensor; scene recreation keeps it.

        Raises:
            SimulatorError: the task has no camera.
        """
        task, index = self._places[row]
        configs = [*task._human_render_camera_configs.values(), *task._sensor_configs.values()]
        usable = [c for c in configs if c.fov is not None and (c.mount is not None or c.entity_uid is None)]
        if not usable:
            raise SimulatorError(
                f"{type(task).__name__} has no camera to film with: use eval.record_video=false, or give the task one"
            )
        config, camera = usable[0], sapien.render.RenderCameraComponent(size, size)
        camera.set_fovy(float(config.fov), compute_x=True)
        camera.near, camera.far = float(config.near), float(config.far)
        camera.local_pose = config.pose.sp
        with camera_shaders(self._scene(row), Pack.colour):
            if config.mount is None:
                entity = sapien.Entity()
                entity.add_component(camera)
                self._scene(row).add_entity(entity)
            else:
                body = config.mount._objs[index]
                (body.entity if isinstance(config.mount, Link) else body).add_component(camera)
        note_pack([camera], Pack.colour)
        self._film_cameras[row, size] = camera
        return camera


class OneTask(Simulator):
    """A simulator whose rows are those of one ManiSkill env object."""

    def __init__(self, task_id: str, task: BaseEnv, options: ManiskillOptions) -> None:
        self.num_rows, self.device, self.task = task.num_envs, task.device, task
        self.action_dim = action_dim(task)
        self.view = TaskView(task, options.goal_in_proprio, options.objects_in_proprio)
        expert = expert_of(task_id, self.view)
        self.expert = expert and partial(expert, self.view)

    def measure(self, actions: Tensor) -> Measurement:
        return self.view.measure(task_actions(self.task, actions))

    def object_positions(self) -> Tensor | None:
        return self.view.object_position()

    def close(self) -> None:
        self.task.close()


class BatchedSimulator(OneTask):
    """One batched CPU task (envs/batched): the default without a GPU."""

    backend = "physx_cpu (batched)"
    perturbs = (*Simulator.perturbs, *AXES)

    def __init__(self, config: EnvConfig, num_rows: int, options: ManiskillOptions, kwargs: dict[str, object]) -> None:
        """Builds N rows; `kwargs` go to the task class."""
        super().__init__(config.task, make_batched_task(config.task, num_rows, True, **kwargs), options)
        renderer = _CpuRenderer([self.view], config, options)
        self.images, self.film = renderer.images, renderer.film

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        self.task.begin(rows, seeds)

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self.task.advance(task_actions(self.task, actions), rows)


class _StockRow(OneTask):
    """A stock ManiSkill env object with one row."""

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        recreate_scene(self.task)
        self.task.reset(seed=int(seeds[0]))

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self.task._step_action(task_actions(self.task, actions))


class StockSimulator(Simulator):
    """One stock ManiSkill env object per row: slower, but it runs every task."""

    backend = "physx_cpu (stock)"
    perturbs = (*Simulator.perturbs, *AXES)

    def __init__(self, config: EnvConfig, num_rows: int, options: ManiskillOptions, kwargs: dict[str, object]) -> None:
        self.num_rows, settings = num_rows, {"num_envs": 1, "sim_backend": "physx_cpu", **kwargs}
        tasks = [build_task(config.task, **settings) for _ in range(num_rows)]
        for sensor in (sensor for task in tasks for sensor in sensors_of(task, config.cameras)):
            pack, cameras = sensor.config.shader_config.shader_pack, sensor.camera._render_cameras
            if pack != STOCK:
                note_pack(cameras, Pack(pack))
            for camera in cameras if pack == STOCK else ():
                give_shaders(camera, Pack.colour)  # faster ones than ManiSkill's default
        self._rows = [_StockRow(config.task, task, options) for task in tasks]
        self.action_dim = self._rows[0].action_dim
        if experts := [row.expert for row in self._rows if row.expert is not None]:
            self.expert = lambda: torch.cat([expert() for expert in experts])
        self._measured: list[Measurement | None] = [None] * num_rows
        renderer = _CpuRenderer([row.view for row in self._rows], config, options)
        self.images, self.film = renderer.images, renderer.film

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        for row, seed in zip(rows, seeds, strict=True):
            self._rows[row].reset([0], [seed])
            self._measured[row] = None

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows[row].step(actions[row : row + 1], [0])
            self._measured[row] = None

    def measure(self, actions: Tensor) -> Measurement:
        for row, simulator in enumerate(self._rows):
            if self._measured[row] is None:
                self._measured[row] = simulator.measure(actions[row : row + 1])
        return Measurement.concatenate(self._measured)

    def object_positions(self) -> Tensor | None:
        positions = [row.object_positions() for row in self._rows]
        return None if positions[0] is None else torch.cat(positions)

    def close(self) -> None:
        for row in self._rows:
            row.close()
