"""A ManiSkill task class with N CPU rows: seeds per row, partial resets, rows at rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from mani_skill.agents.base_agent import BaseAgent
from mani_skill.agents.controllers.base_controller import BaseController, DictController
from mani_skill.agents.controllers.pd_joint_pos import PDJointPosController
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.utils.registration import REGISTERED_ENVS
from torch import Tensor

from envs.batched.draws import DRAWS_BY_ROW, RowStates, row_draws
from envs.batched.patches import batched_backend, check_versions, patch_maniskill
from envs.batched.renewal import packed_state, put_back
from envs.batched.scene import BatchedScene, make_scenes
from envs.batched.single import Alone, SingleEnv, rowwise_methods
from envs.stock import build_task

CONSTRUCTION_SEED = 2022  # what stock ManiSkill builds a single env with; every row gets it, so that rows are alike


class BatchedTask:
    """Mixin in front of a ManiSkill task class.

    Every row equals a stock single env that was built afresh and reset with the row's seed, bit for bit: each row is
    initialised under its own random states, and its PhysX scene is renewed first.  A task whose code is not written for
    some of N rows is given single rows, see single.py.
    """

    _alone: Alone
    _stock_single: BaseEnv  # what `_single` lays over the rows
    _single: SingleEnv | None = None
    _row_seeds: np.ndarray | None = None  # int64 [N], of the current episodes
    _being_reset: Tensor  # bool [N]
    _task_class: type[BaseEnv]
    _draws_by_row: bool  # whether rows may be initialised together, see draws.py

    def _setup_scene(self) -> None:
        self._set_scene_config()
        scenes = make_scenes(self.num_envs, self._render_device)
        self.scene = BatchedScene(scenes, sim_config=self.sim_config, device=self.device, backend=self.backend)
        self.scene.px.timestep = 1.0 / self._sim_freq

    def _reconfigure(self, options: dict) -> None:
        super()._reconfigure(options)
        for controller in _controllers(self.agent):
            controller.reset = partial(self._reset_controller, controller.reset)
        self._steps_are_bare = self._has_bare_steps()

    def _reset_controller(self, stock_reset) -> None:
        """Keeps a partial reset to its rows; stock resets all, which moves the targets of running rows."""
        everywhere, self.scene._reset_mask = self.scene._reset_mask, self._being_reset
        stock_reset()
        self.scene._reset_mask = everywhere

    # ----------------------------------------------------------------------------------------------------------- reset
    def reset(self, seed: Sequence[int], options: dict | None = None) -> tuple[dict, dict]:
        """Resets the rows options["env_idx"] (default: all); `seed` has N entries, those of other rows are ignored.

        Returns an empty observation and info: nothing is evaluated before somebody asks.
        """
        options = options or {}
        rows = options.get("env_idx", torch.arange(self.num_envs))
        if self._row_seeds is None:  # construction
            self._row_seeds = np.full(self.num_envs, CONSTRUCTION_SEED)
        else:
            self._row_seeds[rows.numpy()] = np.asarray(seed)[rows.numpy()]
        self._being_reset = torch.zeros(self.num_envs, dtype=torch.bool)
        self._being_reset[rows] = True
        if options.get("reconfigure"):
            built = super().reset(seed=self._row_seeds, options=options)
            self._built_state = [packed_state(system) for system in self.scene.px.systems]
            return built
        for row in rows.tolist():
            self.scene.px.renew(row)
            put_back(self.scene.px.systems[row], self._built_state[row])
        self.scene.px.active = rows.tolist()
        if self._alone is not Alone.nothing:
            self._reset_rows_alone(rows, options)
        elif self._task_class.reset is BaseEnv.reset:
            self._reset_rows(rows, options)
        else:
            super().reset(seed=self._row_seeds, options=options)
        return {}, {}

    def _reset_rows(self, rows: Tensor, options: dict) -> None:
        """Does what BaseEnv.reset does for these rows, less its evaluation and its global seeding.

        BaseEnv asks for the number of CUDA devices and queues a seed for each, which takes longer than the rest.
        """
        self._set_episode_rng(self._row_seeds, rows)
        self._elapsed_steps[rows] = 0
        generator = torch.default_generator.get_state()
        self.scene._reset_mask = self._being_reset.clone()
        self._clear_sim_state()
        if self.agent is not None:
            self.agent.reset()
        self._initialize_episode(rows, options)
        self.scene._reset_mask = torch.ones(self.num_envs, dtype=torch.bool)
        torch.default_generator.set_state(generator)
        self.scene._gpu_apply_all()
        self.scene._gpu_fetch_all()
        for controller in _controllers(self.agent):
            controller.reset()

    def _reset_rows_alone(self, rows: Tensor, options: dict) -> None:
        """Resets rows one by one as stock single envs."""
        self._set_episode_rng(self._row_seeds, rows)
        self._elapsed_steps[rows] = 0
        self._initialize_alone(rows, options)
        for controller in _controllers(self.agent):
            controller.reset()

    def _initialize_alone(self, rows: Tensor, options: dict) -> None:
        options = {name: value for name, value in options.items() if name not in ("env_idx", "reconfigure")}
        for row in rows.tolist():
            self._single.reset(row, int(self._row_seeds[row]), options)
            if self._alone is Alone.initialisation:
                self._single.copy_values(row)
        self.scene.px._invalidate(rows.tolist())
        self.scene._gpu_fetch_all()

    def _set_main_rng(self, seed: object) -> None:
        """Does nothing: the main generator only draws seeds, and here they are always given."""

    def _set_episode_rng(self, seed: np.ndarray, env_idx: Tensor) -> None:
        """Seeds the rows that are reset, in place: making a RandomState takes fifty times longer than seeding it."""
        self._episode_seed = seed
        if self._batched_episode_rng is None:
            self._batched_episode_rng = BatchedRNG.from_seeds(seed)
        for row in env_idx.tolist():
            self._batched_episode_rng.rngs[row].seed(int(seed[row]))
        self._episode_rng = self._batched_episode_rng[0]

    def _initialize_episode(self, env_idx: Tensor, options: dict) -> None:
        if self._alone is not Alone.nothing:  # construction
            if self._alone is Alone.initialisation:  # makes the task's attributes, with N entries
                super()._initialize_episode(env_idx, options)
                self.scene._gpu_apply_all()
                self.scene._gpu_fetch_all()
            self._single = SingleEnv(self._stock_single, self)
            self._initialize_alone(env_idx, options)
            return
        if self._draws_by_row and not options.get("reconfigure"):
            seeds = [int(self._row_seeds[row]) for row in env_idx.tolist()]
            self._episode_rng = RowStates([self._batched_episode_rng[row] for row in env_idx.tolist()])
            with row_draws(seeds):
                super()._initialize_episode(env_idx, options)
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
    def advance(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one control step of these rows only; actions float32 [N, A] (entries of other rows are ignored)."""
        self.scene.px.active = list(rows)
        if not self._steps_are_bare:
            self._step_action(actions)
            return
        self.agent.set_action(actions)
        self._before_control_step()
        self.scene.px.advance(self._sim_steps_per_control)
        self._after_control_step()
        self.scene._gpu_fetch_all()

    def _before_simulation_step(self) -> None:
        self._fetch_for("_before_simulation_step")
        super()._before_simulation_step()

    def _after_simulation_step(self) -> None:
        self._fetch_for("_after_simulation_step")
        super()._after_simulation_step()

    def _after_control_step(self) -> None:
        self._fetch_for("_after_control_step")
        super()._after_control_step()

    def _fetch_for(self, hook: str) -> None:
        """Brings the tensors up to date for a hook of the task: on the CPU there is nothing to fetch."""
        if getattr(self._task_class, hook) is not getattr(BaseEnv, hook):
            self.scene._gpu_apply_all()
            self.scene._gpu_fetch_all()

    def _has_bare_steps(self) -> bool:
        """Whether nothing but physics happens between the simulation steps of a control step."""
        cls = self._task_class
        hooks = ("_before_simulation_step", "_after_simulation_step", "_step_action")
        if any(getattr(cls, name) is not getattr(BaseEnv, name) for name in hooks) or self.agent is None:
            return False
        if getattr(type(self.agent), "before_simulation_step", None) is not BaseAgent.before_simulation_step:
            return False
        plain = (BaseController.before_simulation_step, PDJointPosController.before_simulation_step)
        return all(
            type(leaf).before_simulation_step in plain and not getattr(leaf.config, "interpolate", False)
            for controller in _controllers(self.agent)
            for leaf in _leaves(controller)
        )


def _controllers(agent: BaseAgent | None) -> list[BaseController]:
    if agent is None:
        return []
    return list(agent.controller.values()) if isinstance(agent.controller, dict) else [agent.controller]


def _leaves(controller: BaseController) -> list[BaseController]:
    if isinstance(controller, DictController):
        return [leaf for part in controller.controllers.values() for leaf in _leaves(part)]
    return [controller]


def make_batched_task(
    task_id: str, num_envs: int, render: bool, alone: Alone = Alone.nothing, **kwargs: object
) -> BaseEnv:
    """Returns N CPU rows of a registered ManiSkill task as one env object whose tensors have N rows.

    Args:
        task_id: a registered task.
        num_envs: rows N.
        render: whether renderers are set up.
        alone: what of the task's own code runs row by row.
        kwargs: for the task class, for example control_mode, reward_mode, sensor_configs, robot_uids.

    Raises:
        SimulatorError: the installed ManiSkill or SAPIEN is not one that the batched route knows.
    """
    check_versions()
    patch_maniskill()
    spec = REGISTERED_ENVS[task_id]
    attributes = {
        "_alone": alone,
        "_task_class": spec.cls,
        "_draws_by_row": task_id in DRAWS_BY_ROW,
    }
    if alone is not Alone.nothing:
        single = {**kwargs, "num_envs": 1, "sim_backend": "physx_cpu", "render_backend": "none"}
        attributes["_stock_single"] = build_task(task_id, **single)
    if alone is Alone.everything:
        attributes |= rowwise_methods(spec.cls)
    cls = type(f"Batched{spec.cls.__name__}", (BatchedTask, spec.cls), attributes)
    with batched_backend():
        return cls(
            **{
                **(spec.default_kwargs or {}),
                "num_envs": num_envs,
                "obs_mode": "none",
                "render_backend": "cpu" if render else "none",
                "reconfiguration_freq": 0,
                **kwargs,
            }
        )
