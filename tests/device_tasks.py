"""The simulator's GPU class on any device: PhysX stays the CPU's, but its tensors come and go there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from envs.batched.build import make_batched_task
from envs.episodes import EpisodeEnv
from envs.simulator import Measurement
from envs.simulators import GpuSimulator, SimulatorOptions
from rlinf_embodied.config import EnvConfig


def moved(value: object, device: torch.device | str) -> object:
    """Returns nested tensors on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


class _Task:
    """A batched CPU task whose tensors come and go by way of a device."""

    def __init__(self, task, device: str) -> None:
        self._inner, self.device = task, torch.device(device)

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_inner", "device"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def reset(self, seed, options):
        self._require(options["env_idx"])
        return self._inner.reset(seed=seed, options={"env_idx": options["env_idx"].cpu()})

    def get_state_dict(self):
        return moved(self._inner.get_state_dict(), self.device)

    def set_state_dict(self, state, rows: Tensor) -> None:
        self._require(rows)
        self._inner.set_state_dict(moved(state, "cpu"), rows.cpu())

    def _step_action(self, action: Tensor) -> None:
        self._require(action)
        self._inner._step_action(action.cpu())

    def _get_obs_sensor_data(self):
        return moved(self._inner._get_obs_sensor_data(), self.device)

    def render_rgb_array(self):
        return self._inner.render_rgb_array().to(self.device)

    def _require(self, tensor: Tensor) -> None:
        assert tensor.device == self.device, f"a tensor of {tensor.device} for a simulator on {self.device}"


class _View:
    """What is read from the task, on its device."""

    def __init__(self, view, device: torch.device) -> None:
        self._inner, self._device = view, device

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def measure(self, actions: Tensor) -> Measurement:
        assert actions.device == self._device
        found = self._inner.measure(actions.cpu())
        columns = ("reward", "success", "fail", "proprio", "privileged")
        return replace(found, **{name: moved(getattr(found, name), self._device) for name in columns})

    def object_position(self) -> Tensor | None:
        return moved(self._inner.object_position(), self._device)  # pyright: ignore[reportReturnType]


class DeviceSimulator(GpuSimulator):
    """GpuSimulator on such a task."""

    def __init__(self, task_id: str, num_rows: int, options: SimulatorOptions, device: str, **kwargs: object) -> None:
        """Builds N rows; `kwargs` go to the task class."""
        task = make_batched_task(task_id, num_rows, True, **kwargs)
        super().__init__(task_id, task, options)
        self._task, self.device = _Task(task, device), torch.device(device)
        self._view = _View(self._view, self.device)
        if self.expert is not None:
            expert = self.expert
            self.expert = lambda: expert().to(self.device)


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns rows of a ManiSkill task as envs.maniskill.make_env does with env.backend=gpu."""
    options = SimulatorOptions(tuple(config.cameras), False, config.show_goal, config.goal_in_proprio)
    simulator = DeviceSimulator(
        config.task,
        num_envs,
        options,
        device,
        control_mode=config.control_mode,
        reward_mode="normalized_dense",
        robot_uids=config.robot or "panda_wristcam",
        sensor_configs={"width": config.obs_size, "height": config.obs_size},
    )
    return EpisodeEnv(config, simulator, "pick up the cube", render_final)
