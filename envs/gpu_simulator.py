"""One stock ManiSkill env that simulates and renders all of its rows on a GPU, as a `Simulator`.

ManiSkill steps all rows together, and a reset of some of them touches the others (line numbers: ManiSkill 3.0.1).

    RowResets    controllers and contacts: a stock reset of some rows resets the controllers of all (envs/sapien_env.py
                 953-968: the mask of the rows is cleared before), and contacts stay those of the last simulation
                 step, of finished episodes (envs/scene.py 757-780)
    ResetValues  the parts of an episode's start that `set_state_dict` does not copy (envs/sapien_env.py 1293-1305):
                 the targets of controllers, and random values of the task
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial

import torch
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.structs import Actor, Articulation, Pose
from mani_skill.utils.structs.base import BaseStruct
from sapien import physx
from torch import Tensor
from torch.utils._pytree import tree_map

from envs.batched.controllers import controllers_of, leaf_controllers
from envs.batched.scene import structs_of
from envs.batched.seeds import FIRST_SEED
from envs.maniskill import ManiskillOptions
from envs.perturbed import AXES, perturb_scenes
from envs.simulator import Measurement
from envs.simulators import OneTask, hidden_actors, sensors_of
from envs.stock import colour_images, task_actions
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError, SimulatorError


class GpuSimulator(OneTask):
    """One batched physx_cuda env; tensors stay on the device.

    All rows are stepped together.  A row at rest reports the measurement of its last step; its images and object
    positions are undefined.
    """

    backend = "physx_cuda"
    history_free = False  # a batched reset draws for all of its rows at once
    perturbs = AXES  # not initial_steps, which would also step running rows

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
            require_hideable(config.task, self.view.goal)
        task._hidden_objects = hidden_actors(self.view, options.show_goal)
        self._resets = RowResets(task)
        self._seeds = [FIRST_SEED] * self.num_rows
        self._rests = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        self._last: Measurement | None = None

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
            require_alike(self.task)
        for row, seed in seed_of.items():
            self._seeds[row] = seed
        index, written = self._index(seed_of), ResetValues(self.task)
        self._rests[index] = False
        self._resets.begin(index)
        drawn = [next(iter(seed_of.values())), *self._seeds[1:]]
        self.task.reset(seed=drawn, options={"env_idx": index})
        if followers:
            self._copy(*(self._index(part) for part in zip(*followers, strict=True)), written)

    def _copy(self, followers: Tensor, leaders: Tensor, written: ResetValues) -> None:
        """Copies the state of newly reset rows to other rows (the rows of a GRPO group start from one state)."""
        state = tree_map(lambda value: value[leaders].clone(), self.task.scene.get_sim_state())
        self.task.set_state_dict(state, followers)
        written.copy(leaders, followers)

    # ------------------------------------------------------------------------------------------------------------ step
    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self._rests[:] = True
        self._rests[self._index(rows)] = False
        self.task._step_action(task_actions(self.task, actions))
        self._resets.stepped()

    def measure(self, actions: Tensor) -> Measurement:
        measured = super().measure(actions)
        if self._last is not None:
            columns = {}
            for name in (field.name for field in fields(Measurement)):
                old, new = getattr(self._last, name), getattr(measured, name)
                rests = None if new is None else self._rests.view(-1, *[1] * (new.ndim - 1))
                columns[name] = None if new is None else torch.where(rests, old, new)
            measured = Measurement(**columns)
        self._last = measured
        return measured

    # ---------------------------------------------------------------------------------------------------------- images
    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        images, index = colour_images(self.task), self._index(rows)
        return {name: images[name][index] for name in self._cameras}

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        all_rows = self._film_images()
        for actor in self.task._hidden_objects:  # with a single camera ManiSkill leaves them visible
            actor.hide_visual()
        pixels = all_rows[self._index(rows)].permute(0, 3, 1, 2).float()
        images = torch.nn.functional.interpolate(pixels, (size, size), mode="area").round().to(torch.uint8)
        return {row: image.cpu() for row, image in zip(rows, images.permute(0, 2, 3, 1), strict=True)}

    def _film_images(self) -> Tensor:
        """Returns images of the task's first render camera, or else its first sensor, with all goals visible."""
        task = self.task
        camera = next(iter(task._human_render_cameras), None)
        images = None if camera is None else task.render_rgb_array(camera)
        if images is not None:
            return images
        hidden, task._hidden_objects = task._hidden_objects, []
        try:
            for actor in hidden:
                actor.show_visual()
            sensor_images = colour_images(task)
        finally:
            task._hidden_objects = hidden
        if not sensor_images:
            raise SimulatorError(
                f"{type(task).__name__} has no camera to film with: use eval.record_video=false, or give the task one"
            )
        return next(iter(sensor_images.values()))

    def _index(self, rows: Iterable[int]) -> Tensor:
        return torch.as_tensor(list(rows), dtype=torch.long, device=self.device)


def require_hideable(task_id: str, goal: Actor | None) -> None:
    """Raises ConfigError if a goal has collision shapes: on a GPU, ManiSkill hides an actor by moving it far away."""
    entities = [] if goal is None else goal._objs
    bodies = [entity.find_component_by_type(physx.PhysxRigidBaseComponent) for entity in entities]
    if any(body is not None and body.collision_shapes for body in bodies):
        raise ConfigError(
            f"env.options.show_goal is false, but the goal of {task_id} has collision shapes, and ManiSkill cannot "
            "hide such a body on a GPU: use env.options.show_goal=true, or env.options.backend=batched"
        )


# ---------------------------------------------------------------------------------------------------------------- rows
class RowResets:
    """Limits the effects of a reset to the rows that are reset."""

    def __init__(self, task: BaseEnv) -> None:
        """Replaces methods of the task's controllers, scene and bodies; its classes stay stock."""
        self._scene = task.scene
        self._being_reset = torch.ones(task.num_envs, dtype=torch.bool, device=task.device)
        self._without_contacts = torch.zeros_like(self._being_reset)
        for controller in controllers_of(task.agent):
            controller.reset = partial(self._reset_controller, controller.reset)
        pairwise = self._scene.get_pairwise_contact_impulses
        self._scene.get_pairwise_contact_impulses = lambda first, second: self._impulses(pairwise, first, first, second)
        for struct in structs_of(task):
            if hasattr(struct, "get_net_contact_impulses"):
                struct.get_net_contact_impulses = partial(self._impulses, struct.get_net_contact_impulses, struct)

    def begin(self, rows: Tensor) -> None:
        """Marks these rows [B] as being reset; they report no contacts until they are stepped."""
        self._being_reset[:] = False
        self._being_reset[rows] = True
        self._without_contacts[rows] = True

    def stepped(self) -> None:
        self._without_contacts[:] = False

    def _reset_controller(self, stock_reset: Callable[[], None]) -> None:
        everywhere, self._scene._reset_mask = self._scene._reset_mask, self._being_reset
        stock_reset()
        self._scene._reset_mask = everywhere

    def _impulses(self, stock: Callable[..., Tensor], struct: BaseStruct, *args: object) -> Tensor:
        """Returns the stock method's impulses [objects, ..., 3], zeros in rows that have not been stepped."""
        impulses = stock(*args)
        unknown = self._without_contacts[struct._scene_idxs.long()]
        return impulses.masked_fill(unknown.view(-1, *[1] * (impulses.ndim - 1)), 0.0)


class ResetValues:
    """The tensors with one entry per row that a reset writes into the task, its robots and their controllers.

    Tensors that a reset does not write belong to the scene, such as the sizes of its objects.
    """

    def __init__(self, task: BaseEnv) -> None:
        agents = task.agent.agents if isinstance(task.agent, MultiAgent) else [task.agent]
        robots = [agent for agent in agents if agent is not None]
        self._num_rows, self._owners = task.num_envs, [task, *robots, *leaf_controllers(task.agent)]
        self._before = {key: (value, value._version) for key, value in _rowwise(self._owners, self._num_rows)}

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies the values that the reset wrote for rows `sources` [B] to rows `targets` [B]."""
        for key, value in _rowwise(self._owners, self._num_rows):
            before, version = self._before.get(key, (None, 0))
            written = before is not value or version != value._version
            if written and value.stride(0):  # stride 0: all rows share one entry
                value[targets] = value[sources]


def _rowwise(owners: Sequence[object], num_rows: int) -> Iterator[tuple[tuple[int, str], Tensor]]:
    """Yields the fields with one entry per row: ((number of the owner, name), tensor [N, ...])."""
    for number, owner in enumerate(owners):
        for name, value in vars(owner).items():
            tensor = value.raw_pose if isinstance(value, Pose) else value
            if isinstance(tensor, Tensor) and tensor.shape[:1] == (num_rows,):
                yield (number, name), tensor


def require_alike(task: BaseEnv) -> None:
    """Raises SimulatorError if rows are built of different objects, so that a row cannot take another row's state."""
    robots = {id(getattr(agent, "robot", None)) for agent in getattr(task.agent, "agents", [task.agent])}
    registry = task.scene.state_dict_registry
    structs: list[Actor | Articulation] = [*registry.actors.values(), *registry.articulations.values()]
    differing = [s.name for s in structs if len(s._objs) != task.num_envs or (s.merged and id(s) not in robots)]
    if differing:
        names = ", ".join(str(name) for name in differing[:3])
        raise SimulatorError(
            f"the rows of {type(task).__name__} differ in {names}, so the rows of a group cannot start "
            "from one state on env.options.backend=gpu: use env.options.backend=batched, or algorithm=ppo"
        )
