"""A ManiSkill task class with N CPU rows: a complete BaseEnv with a seed per row, partial resets and resting rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.envs.utils.system.backend import BackendInfo
from torch import Tensor

from envs.batched.controllers import adopt_controllers, controllers_of, has_bare_steps
from envs.batched.rotations import few_operations
from envs.batched.scene import BatchedScene, adopt_robots, adopt_structs, make_scenes
from envs.batched.scene_recreation import packed_state, put_back
from envs.batched.seeds import FIRST_SEED, RowStates, row_draws
from envs.stock import overrides


class BatchedTask:
    """Mixin in front of a ManiSkill task class.

    Every row equals, bit for bit, a newly built stock env with one row that was reset with the row's seed: each row is
    initialised with separate random states, after its PhysX scene was recreated.
    """

    _row_seeds: np.ndarray  # int64 [N], of the current episodes
    _being_reset: Tensor  # bool [N]
    _task_class: type[BaseEnv]
    _draws_by_row: bool  # whether rows may be initialised together, see seeds.py

    def _setup_scene(self) -> None:
        self._set_scene_config()
        scenes = make_scenes(self.num_envs, self._render_device)
        stock = {"sim_config": self.sim_config, "device": self.device, "backend": self.backend}
        self.scene = BatchedScene(scenes, **stock)
        self.scene.px.timestep = 1.0 / self._sim_freq

    @property
    def backend(self) -> BackendInfo:
        """CPU tensors, with a separate backend name and simulation device.

        BaseEnv refuses N > 1 rows where the backend is called "physx_cpu", and applies drive targets only where the
        simulation device says "cuda".
        """
        return self._backend

    @backend.setter
    def backend(self, cpu: BackendInfo) -> None:
        device = SimpleNamespace(is_cuda=lambda: True)
        self._backend = replace(cpu, sim_backend="physx_cpu_batched", sim_device=device)

    def _load_scene(self, options: dict) -> None:
        super()._load_scene(options)
        self.scene.px.number()
        adopt_structs(self)

    def _reconfigure(self, options: dict) -> None:
        super()._reconfigure(options)
        adopt_robots(self.agent)
        adopt_controllers(self.agent, self._reset_controller)
        self._steps_are_bare = has_bare_steps(self._task_class, self.agent)

    def _after_reconfigure(self, options: dict) -> None:
        super()._after_reconfigure(options)
        adopt_structs(self)  # the task may have merged some

    def _reset_controller(self, stock_reset) -> None:
        """Limits a partial reset to its rows; stock resets all rows, which moves the targets of running ones."""
        everywhere, self.scene._reset_mask = self.scene._reset_mask, self._being_reset
        stock_reset()
        self.scene._reset_mask = everywhere

    # ----------------------------------------------------------------------------------------------------------- reset
    def reset(self, seed: object = None, options: dict | None = None) -> tuple[object, dict]:
        """Builds all scenes, for BaseEnv's construction; `begin` starts episodes.  Rows are built as stock envs are."""
        self._row_seeds = np.full(self.num_envs, FIRST_SEED)
        self._being_reset = torch.ones(self.num_envs, dtype=torch.bool)
        built = super().reset(seed=self._row_seeds, options={**(options or {}), "reconfigure": True})
        self._built_state = [packed_state(system) for system in self.scene.px.systems]
        return built

    @few_operations()
    def begin(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts an episode in each of these rows from its own seed, and evaluates nothing."""
        index = torch.as_tensor(list(rows))
        options = {"env_idx": index}
        self._row_seeds[index.numpy()] = seeds
        self._being_reset = torch.zeros(self.num_envs, dtype=torch.bool)
        self._being_reset[index] = True
        for row in rows:
            self.scene.px.recreate_scene(row)
            put_back(self.scene.px.systems[row], self._built_state[row])
        self.scene.px.active = list(rows)
        if overrides(self._task_class, "reset"):
            super().reset(seed=self._row_seeds, options=options)
        else:
            self._reset_rows(index, options)

    def _reset_rows(self, rows: Tensor, options: dict) -> None:
        """Does what BaseEnv.reset does for these rows, except for its evaluation and its global seeding.

        BaseEnv queries the number of CUDA devices and queues a seed for each, which takes longer than the rest.
        """
        self._set_episode_rng(self._row_seeds, rows)
        self._elapsed_steps[rows] = 0
        generator = None if self._draws_by_row else torch.default_generator.get_state()  # saved only if it is used
        self.scene._reset_mask = self._being_reset.clone()
        self._clear_sim_state()
        if self.agent is not None:
            self.agent.reset()
        self._initialize_episode(rows, options)
        self.scene._reset_mask = torch.ones(self.num_envs, dtype=torch.bool)
        if generator is not None:
            torch.default_generator.set_state(generator)
        self.scene._gpu_apply_all()
        self.scene._gpu_fetch_all()
        for controller in controllers_of(self.agent):
            controller.reset()

    def _clear_sim_state(self) -> None:
        """Sets all velocities to zero in the rows that are reset."""
        self.scene.px.stop(self._being_reset.nonzero()[:, 0].tolist())
        self.scene._gpu_fetch_all()

    def _set_main_rng(self, seed: object) -> None:
        """Does nothing: rows have separate seeds."""

    def _set_episode_rng(self, seed: np.ndarray, env_idx: Tensor) -> None:
        """Seeds the rows that are reset, in place: building a RandomState takes fifty times longer than seeding it."""
        self._episode_seed = seed
        if self._batched_episode_rng is None:
            self._batched_episode_rng = BatchedRNG.from_seeds(seed)
        for row in env_idx.tolist():
            self._batched_episode_rng.rngs[row].seed(int(seed[row]))
        self._episode_rng = self._batched_episode_rng[0]

    def _initialize_episode(self, env_idx: Tensor, options: dict) -> None:
        if self._draws_by_row and not options.get("reconfigure"):
            seeds = [int(self._row_seeds[row]) for row in env_idx.tolist()]
            self._episode_rng = RowStates([self._batched_episode_rng[row] for row in env_idx.tolist()])
            with row_draws(self._task_class._initialize_episode, seeds) as initialize:
                initialize(self, env_idx, options)
            return
        active = self.scene.px.active
        for row in env_idx.tolist():
            # torch.manual_seed also seeds accelerators, which is slow where none is initialised
            torch.default_generator.manual_seed(int(self._row_seeds[row]))
            self._episode_rng = self._batched_episode_rng[row]
            self.scene._reset_mask = torch.zeros(self.num_envs, dtype=torch.bool)
            self.scene._reset_mask[row] = True
            self.scene.px.active = [row]  # a task that steps the physics while it is set up steps this row only
            super()._initialize_episode(torch.tensor([row]), options)
        self.scene.px.active = active

    # ------------------------------------------------------------------------------------------------------------ step
    @few_operations()
    def advance(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one control step of these rows only; actions float32 [N, A] (entries of other rows are ignored)."""
        self.scene.px.active = list(rows)
        self._step_action(actions)

    def _step_action(self, action: Tensor | dict) -> Tensor | dict:
        if not self._steps_are_bare:
            return super()._step_action(action)
        self.agent.set_action(action)
        self._before_control_step()
        self.scene.px.advance(self._sim_steps_per_control)
        self._after_control_step()
        self.scene._gpu_fetch_all()
        return action
