"""N stock CPU env objects behind the interface of one ManiSkill env with N rows, for tasks that cannot be batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import REGISTERED_ENVS
from torch import Tensor
from torch.utils._pytree import tree_map

from envs.batched.checks import check_actions, check_num_envs, chosen_rows, short
from envs.batched.seeds import FIRST_SEED, RowSeeds, Seeds
from envs.stock import note_built, recreate_scene
from rlinf_embodied.errors import SimulatorError

Tree = Any  # nested dicts of tensors


class StackedEnv(gym.Env):
    """One stock env object per row, stepped one after the other; what they return is stacked.

    It has what wrappers ask of a BaseEnv (ManiSkillVectorEnv, RecordEpisode, TimeLimitWrapper, those that flatten).
    """

    metadata = BaseEnv.metadata
    gpu_sim_enabled = False
    update_obs_space = BaseEnv.update_obs_space
    single_observation_space = BaseEnv.__dict__["single_observation_space"]
    observation_space = BaseEnv.__dict__["observation_space"]

    def __init__(self, task_id: str, num_envs: int, history_free: bool = True, **kwargs: object) -> None:
        """Builds N envs, row i with ManiSkill's seed for row i.

        Args:
            task_id: a registered task.
            num_envs: rows N.
            history_free: whether a reset also recreates the row's scene, so that the episode is a function
                of its seed; stock envs do not.
            kwargs: for the task class.

        Raises:
            ConfigError: no rows.
        """
        check_num_envs(num_envs)
        spec = REGISTERED_ENVS[task_id]
        kwargs = {**(spec.default_kwargs or {}), **kwargs, "num_envs": 1, "sim_backend": "physx_cpu"}
        if kwargs.get("reconfiguration_freq") is None and num_envs > 1:
            kwargs["reconfiguration_freq"] = 0  # as tasks choose for themselves where they have several rows
        self.envs: list[BaseEnv] = [spec.cls(**kwargs) for _ in range(num_envs)]
        for row in range(1, num_envs):
            self.envs[row].reset(seed=FIRST_SEED + row, options={"reconfigure": True})
        for env in self.envs:
            note_built(env)
        first = self.envs[0]
        self.num_envs, self.device, self.render_mode = num_envs, first.device, first.render_mode
        self.reconfiguration_freq = first.reconfiguration_freq
        self.single_action_space = first.single_action_space
        self.action_space = gym.vector.utils.batch_space(first.single_action_space, num_envs)
        self._init_raw_obs = _stacked([env._init_raw_obs for env in self.envs])
        self._history_free, self._seeds = history_free, RowSeeds(num_envs)
        self._seen: list[Tree] = [env._last_obs for env in self.envs]
        self._infos: list[dict] = [env.get_info() for env in self.envs]

    # -------------------------------------------------------------------------------------------------- reset and step
    def reset(self, *, seed: Seeds | None = None, options: dict | None = None) -> tuple[Tree, dict]:
        """Starts episodes; as BaseEnv.reset with its options env_idx (rows) and reconfigure.

        Args:
            seed: one per row (N entries), or one that those of the rows are derived from as in ManiSkill.  None: each
                row draws its next seed from its own generator.
            options: see BaseEnv.

        Returns:
            Observation and info of all N rows.

        Raises:
            SimulatorError: another number of seeds, or rows that do not exist or come twice.
        """
        options = dict(options or {})
        rows = chosen_rows(options.pop("env_idx", None), self.num_envs)
        if "reset_to_env_states" in options:
            raise SimulatorError("stock envs are not reset to given states together: use set_state_dict")
        for row, chosen in zip(rows, self._seeds.next(seed, rows).tolist(), strict=True):
            if self._history_free:
                recreate_scene(self.envs[row])
            self._seen[row], self._infos[row] = self.envs[row].reset(seed=chosen, options=dict(options))
            if self._infos[row]["reconfigure"]:
                note_built(self.envs[row])
        rebuilt = [self._infos[row].pop("reconfigure") for row in rows]
        return _stacked(self._seen), {**_stacked(self._infos), "reconfigure": any(rebuilt)}

    def step(self, action: Tensor | np.ndarray | dict | None) -> tuple[Tree, Tensor, Tensor, Tensor, dict]:
        """Steps all rows; as BaseEnv.step.

        Raises:
            SimulatorError: actions of another shape, or not finite; nothing was stepped.
        """
        check_actions(action, self.single_action_space, self.num_envs)
        if isinstance(action, Tensor | np.ndarray):
            action = action.reshape(self.num_envs, -1)
        taken = [env.step(_row_of(action, row)) for row, env in enumerate(self.envs)]
        self._seen, rewards, terminated, truncated, self._infos = (list(column) for column in zip(*taken, strict=True))
        flags = torch.cat(terminated), torch.cat(truncated)
        return _stacked(self._seen), torch.cat(rewards), *flags, _stacked(self._infos)

    # -------------------------------------------------------------------------------------- what wrappers read and call
    @property
    def elapsed_steps(self) -> Tensor:
        """Steps since the last reset, int32 [N]."""
        return torch.cat([env.elapsed_steps for env in self.envs])

    @property
    def control_mode(self) -> str:
        """The robot's control mode."""
        return self.envs[0].control_mode

    @property
    def _episode_seed(self) -> np.ndarray:
        return np.concatenate([env._episode_seed for env in self.envs])

    def get_state_dict(self) -> dict:
        """Returns the simulation state of all rows."""
        return _stacked([env.get_state_dict() for env in self.envs])

    def set_state_dict(self, state: dict, env_idx: Sequence[int] | Tensor | None = None) -> None:
        """Sets the simulation state of these rows (default: all); entries of `state` are in the rows' order."""
        for at, row in enumerate(chosen_rows(env_idx, self.num_envs)):
            self.envs[row].set_state_dict(_row_of(state, at))

    def render(self) -> Tensor | None:
        """Returns images uint8 [N, height, width, 3] in the way of `render_mode`."""
        images = [env.render() for env in self.envs]
        return None if images[0] is None else torch.cat([_batch(image) for image in images])

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def __str__(self) -> str:
        return f"<StackedEnv of {type(self.envs[0]).__name__}, rows {short(range(self.num_envs))}>"


def _batch(image: Tensor | np.ndarray) -> Tensor:
    image = torch.as_tensor(image)
    return image if image.dim() == 4 else image[None]


def _row_of(tree: Tree, row: int) -> Tree:
    """Returns one row of nested values, with its leading axis; a control mode is that of every row."""
    return tree_map(lambda value: value if isinstance(value, str | None) else value[row : row + 1], tree)


def _stacked(trees: Sequence[Tree]) -> Tree:
    """Returns the rows of equal trees together: tensors with a leading axis are joined, single numbers stacked."""

    def join(*values: object) -> object:
        if not isinstance(values[0], Tensor | np.ndarray | np.generic | bool | int | float):
            return values[0]
        tensors = [torch.as_tensor(value) for value in values]
        return torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors)

    return tree_map(join, *trees)
