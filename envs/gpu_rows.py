"""Lets the rows of one stock GPU env begin and end their episodes separately.

ManiSkill steps all rows together, and a reset of some of them touches the others (line numbers: ManiSkill 3.0.1).

    RowResets    controllers and contacts: a stock reset of some rows resets the controllers of all (envs/sapien_env.py
                 953-968: the mask of the rows is cleared before), and contacts stay those of the last simulation
                 step, of finished episodes (envs/scene.py 757-780)
    ResetValues  the parts of an episode's start that `set_state_dict` does not copy (envs/sapien_env.py 1293-1305):
                 the targets of controllers, values that the task has drawn
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from mani_skill.agents.multi_agent import MultiAgent
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.structs import Actor, Articulation, Pose
from mani_skill.utils.structs.base import BaseStruct
from torch import Tensor

from envs.batched.controllers import controllers_of, leaf_controllers
from envs.batched.scene import structs_of
from rlinf_embodied.errors import SimulatorError


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
        """Marks these rows [B] as being reset: until they are stepped they have no contacts."""
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

    What a reset does not write belongs to the scene, such as the sizes of what was built.
    """

    def __init__(self, task: BaseEnv) -> None:
        agents = task.agent.agents if isinstance(task.agent, MultiAgent) else [task.agent]
        robots = [agent for agent in agents if agent is not None]
        self._num_rows, self._owners = task.num_envs, [task, *robots, *leaf_controllers(task.agent)]
        self._before = {key: (value, value._version) for key, value in _rowwise(self._owners, self._num_rows)}

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies what the reset has written for rows `sources` [B] to rows `targets` [B]."""
        for key, value in _rowwise(self._owners, self._num_rows):
            before, version = self._before.get(key, (None, 0))
            written = before is not value or version != value._version
            if written and value.stride(0):  # a stride of 0: all rows share one entry
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
    own = [s.name for s in structs if len(s._objs) != task.num_envs or (s.merged and id(s) not in robots)]
    if own:
        raise SimulatorError(
            f"the rows of {type(task).__name__} differ in {', '.join(str(name) for name in own[:3])}, so that those of "
            "a group cannot start from one state on env.options.backend=gpu: use env.options.backend=batched, or "
            "algorithm=ppo"
        )
