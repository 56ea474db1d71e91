"""Two ways to run N rows of a ManiSkill task on a CPU as a `Simulator`: batched, and one stock env object per row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.base_sensor import BaseSensor
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils.structs import Actor, Link
from torch import Tensor

from envs.batched.build import make_batched_task
from envs.batched.decimate import Swap, decimate_visuals
from envs.batched.rendering import set_visible, take_images
from envs.batched.shaders import STOCK, Pack, camera_shaders, give_shaders, note_pack
from envs.maniskill import ManiskillOptions
from envs.simulator import Measurement
from envs.stock import action_dim, build_task, recreate_scene, task_actions
from envs.tasks import TaskView, expert_of
from rlinf_embodied.errors import ConfigError, SimulatorError


class Film:
    """One film camera per filmed row, made when it is first used; nothing here touches the physics."""

    def __init__(
        self, tasks: Sequence[BaseEnv], swaps: Sequence[Sequence[Swap]], hidden: Sequence[Sequence[sapien.Entity]]
    ) -> None:
        """Takes one task with all rows or one task per row, and each row's decimated visuals and hidden entities."""
        self._tasks, self._swaps, self._hidden = tasks, swaps, hidden
        self._cameras: dict[tuple[int, int], sapien.render.RenderCameraComponent] = {}

    def image(self, scene: sapien.Scene, row: int, size: int) -> Tensor:
        """Renders one row's scene with its original visuals, uint8 [size, size, 3]."""
        camera = self._camera(scene, row, size)
        for swap in self._swaps[row]:
            swap.show_heavy()
        for entity in self._hidden[row]:
            set_visible(entity, True)
        try:
            return take_images([scene], [[camera]])[0, 0]
        finally:
            for entity in self._hidden[row]:
                set_visible(entity, False)
            for swap in self._swaps[row]:
                swap.show_light()

    def _camera(self, scene: sapien.Scene, row: int, size: int) -> sapien.render.RenderCameraComponent:
        """Returns the row's camera; its entity moves on with the others when the scene is recreated."""
        if (row, size) not in self._cameras:
            task, at = (self._tasks[0], row) if len(self._tasks) == 1 else (self._tasks[row], 0)
            config = _film_config(task)
            camera = sapien.render.RenderCameraComponent(size, size)
            camera.set_fovy(float(config.fov), compute_x=True)
            camera.near, camera.far = float(config.near), float(config.far)
            camera.local_pose = config.pose.sp
            with camera_shaders(scene, Pack.colour):
                if config.mount is None:
                    entity = sapien.Entity()
                    entity.add_component(camera)
                    scene.add_entity(entity)
                else:
                    body = config.mount._objs[at]
                    (body.entity if isinstance(config.mount, Link) else body).add_component(camera)
            note_pack([camera], Pack.colour)
            self._cameras[row, size] = camera
        return self._cameras[row, size]


def _film_config(task: BaseEnv) -> CameraConfig:
    """Returns the task's camera for people, or else its first sensor."""
    configs = [*task._human_render_camera_configs.values(), *task._sensor_configs.values()]
    for config in configs:
        if config.fov is not None and (config.mount is not None or config.entity_uid is None):
            return config
    raise SimulatorError(
        f"{type(task).__name__} has no camera to film with: use eval.record_video=false, or give the task one"
    )


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
    """Images from one CPU scene per row; `tasks` is one batched task, or one stock task per row."""

    def __init__(self, views: Sequence[TaskView], cameras: Sequence[str], options: ManiskillOptions) -> None:
        tasks, self._names = [view.env for view in views], cameras
        self._scene_lists = [
            task.scene.sub_scenes for task in tasks
        ]  # the lists stay, scene recreation replaces their items
        sensors = [sensors_of(task, cameras) for task in tasks]
        self._cameras = [
            [sensor.camera._render_cameras[row] for sensor in part]
            for task, part in zip(tasks, sensors, strict=True)
            for row in range(task.num_envs)
        ]
        pairs = zip(self._scenes(), self._cameras, strict=True)
        lighter = options.decimate and bool(cameras)
        swaps = [decimate_visuals(scene, cameras) if lighter else [] for scene, cameras in pairs]
        actors = [hidden_actors(view, options.show_goal) for view in views]
        hidden = [
            [actor._objs[row] for actor in a] for a, t in zip(actors, tasks, strict=True) for row in range(t.num_envs)
        ]
        for entity in (entity for row in hidden for entity in row):
            set_visible(entity, False)
        self._film = Film(tasks, swaps, hidden)

    def _scenes(self) -> list:
        return [scene for scenes in self._scene_lists for scene in scenes]

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        scenes = self._scenes()
        seen = take_images([scenes[row] for row in rows], [self._cameras[row] for row in rows])
        return dict(zip(self._names, seen.unbind(1), strict=True))

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        scenes = self._scenes()
        return {row: self._film.image(scenes[row], row, size) for row in rows}


class OneTask:
    """A simulator whose rows are those of one ManiSkill env object."""

    def __init__(self, task_id: str, task: BaseEnv, options: ManiskillOptions) -> None:
        self.num_rows, self.device, self._task = task.num_envs, task.device, task
        self.action_dim = action_dim(task)
        self._view = TaskView(task, options.goal_in_proprio, options.objects_in_proprio)
        expert = expert_of(task_id, self._view)
        self.expert = expert and partial(expert, self._view)

    def measure(self, actions: Tensor) -> Measurement:
        return self._view.measure(task_actions(self._task, actions))

    def object_positions(self) -> Tensor | None:
        return self._view.object_position()

    def close(self) -> None:
        self._task.close()


class BatchedSimulator(OneTask):
    """One batched CPU task (envs/batched): the default without a GPU."""

    backend = "physx_cpu (batched)"

    def __init__(
        self, task_id: str, num_rows: int, cameras: Sequence[str], options: ManiskillOptions, kwargs: dict[str, object]
    ) -> None:
        """Builds N rows; `kwargs` go to the task class."""
        super().__init__(task_id, make_batched_task(task_id, num_rows, True, **kwargs), options)
        self._renderer = _CpuRenderer([self._view], cameras, options)
        self.images, self.film = self._renderer.images, self._renderer.film

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        self._task.begin(rows, seeds)

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self._task.advance(task_actions(self._task, actions), rows)


class StockSimulator:
    """One stock ManiSkill env object per row: slower, but takes every task."""

    backend = "physx_cpu (stock)"
    device = torch.device("cpu")

    def __init__(
        self, task_id: str, num_rows: int, cameras: Sequence[str], options: ManiskillOptions, kwargs: dict[str, object]
    ) -> None:
        self.num_rows = num_rows
        self._tasks = [build_task(task_id, num_envs=1, sim_backend="physx_cpu", **kwargs) for _ in range(num_rows)]
        for task in self._tasks:
            _draw_colours_only(task, cameras)
        self.action_dim = action_dim(self._tasks[0])
        self._views = [TaskView(task, options.goal_in_proprio, options.objects_in_proprio) for task in self._tasks]
        expert = expert_of(task_id, self._views[0])
        self.expert = expert and (lambda: torch.cat([expert(view) for view in self._views]))
        self._measured: list[Measurement | None] = [None] * num_rows
        self._renderer = _CpuRenderer(self._views, cameras, options)
        self.images, self.film = self._renderer.images, self._renderer.film

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        for row, seed in zip(rows, seeds, strict=True):
            recreate_scene(self._tasks[row])
            self._tasks[row].reset(seed=int(seed))
            self._measured[row] = None

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        for row in rows:
            self._tasks[row]._step_action(task_actions(self._tasks[row], actions[row : row + 1]))
            self._measured[row] = None

    def measure(self, actions: Tensor) -> Measurement:
        for row, view in enumerate(self._views):
            if self._measured[row] is None:
                self._measured[row] = view.measure(task_actions(view.env, actions[row : row + 1]))
        return Measurement.concatenate(self._measured)

    def object_positions(self) -> Tensor | None:
        positions = [view.object_position() for view in self._views]
        return None if positions[0] is None else torch.cat(positions)

    def close(self) -> None:
        for task in self._tasks:
            task.close()


def _draw_colours_only(task: BaseEnv, cameras: Sequence[str]) -> None:
    """Gives the cameras of a stock task that have ManiSkill's default shaders faster ones."""
    for sensor in sensors_of(task, cameras):
        if sensor.config.shader_config.shader_pack == STOCK:
            for camera in sensor.camera._render_cameras:
                give_shaders(camera, Pack.colour)
        else:
            note_pack(sensor.camera._render_cameras, Pack(sensor.config.shader_config.shader_pack))
