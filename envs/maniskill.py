"""Any ManiSkill task behind the `VectorEnv` protocol: its options, and what is known without importing a simulator.

make_env              config -> simulator -> EpisodeEnv
  episodes.EpisodeEnv   chunks, shaped reward, freezing, partial resets, replay, films
    maniskill_rows      which simulator, and with which arguments of the task
    simulators          physics and images of N rows on a CPU: batched, or stock
    gpu_simulator       one stock CUDA env with N rows that begin and end separately
      tasks               values read from a task's state, and scripted experts
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rlinf_embodied.config import EnvConfig, EnvOptions
from rlinf_embodied.config.checks import require
from rlinf_embodied.interfaces.options import typed

if TYPE_CHECKING:
    from envs.episodes import EpisodeEnv

EXPERT_TASKS = ("PickCube-v1", "PushCube-v1", "PullCube-v1", "StackCube-v1")
CONTROL_MODE = "pd_ee_delta_pose"  # of the experts
WORKER_IMPORTS = ("envs.maniskill_rows",)  # modules that a worker imports for its envs, which takes seconds


class Backend(StrEnum):
    """Which physics steps the env."""

    auto = "auto"  # gpu if available, else batched CPU, else stock
    batched = "batched"  # N CPU scenes in one process behind ManiSkill's batched code path
    cpu = "cpu"  # batched CPU, else stock, even if a GPU is available
    stock = "stock"  # one stock ManiSkill env object per row
    gpu = "gpu"  # one batched physx_cuda env


@dataclass(kw_only=True, slots=True)
class ManiskillOptions(EnvOptions):
    """The options in env.options."""

    backend: Backend = Backend.auto
    control_mode: str = CONTROL_MODE
    robot: str | None = None  # ManiSkill's robot_uids; None: the task's default
    camera_fov: float | None = None  # of the first camera, radians; None: as the task has it
    decimate: bool = True  # lighter visual meshes when rendering on a CPU
    show_goal: bool = False  # whether images show goal markers
    goal_in_proprio: bool = True  # whether the proprioception holds the goal position
    objects_in_proprio: bool = False  # whether it holds the positions of the task's objects, as a tracker reports them

    def on_accelerator(self, kind: str) -> bool:
        return self.backend is Backend.gpu or (self.backend is Backend.auto and kind == "cuda")

    def on_cores(self) -> dict[str, Any]:
        rule = "with cluster.cpu_devices simulators run on cores"
        action = "use env.options.backend=auto, or leave cluster.cpu_devices out"
        require(self.backend is not Backend.gpu, "env.options.backend", self.backend.value, rule, action)
        return {"backend": Backend.cpu.value} if self.backend is Backend.auto else {}

    def conditions(self, sees: bool, kind: str) -> dict[str, Any]:
        """Returns what an evaluation must share with the training.

        The CPU's backends count as one, since their results are bit-equal.  The GPU's differs: its inverse kinematics
        takes one step along the Jacobian, a reset draws for all rows at once, and images have the original meshes.
        Frequencies, gains and solver settings are those of the task and the robot on CPUs and GPUs alike: task, robot,
        control mode and versions determine them.
        """
        on_gpu = self.on_accelerator(kind)
        return {
            "backend": "physx_cuda" if on_gpu else "physx_cpu",
            "control_mode": self.control_mode,
            "robot": self.robot or "default",
            "camera_fov": self.camera_fov,
            "decimate": sees and not on_gpu and self.decimate,
            "show_goal": sees and self.show_goal,
            "goal_in_proprio": self.goal_in_proprio,
            "objects_in_proprio": self.objects_in_proprio,
        }


def read_options(config: EnvConfig) -> ManiskillOptions:
    """Returns env.options; raises ConfigError for unknown or invalid ones."""
    return typed(config.options, ManiskillOptions, "env.options")


def why_no_expert(config: EnvConfig) -> str | None:
    """Returns why an env section has no scripted expert, None if it has one.

    The robot is not checked: whether it has an arm with a gripper is known only once it is built.
    """
    if config.task not in EXPERT_TASKS:
        return f"env.task is {config.task!r}, but scripted experts are for {', '.join(EXPERT_TASKS)} only"
    mode = read_options(config).control_mode
    if mode != CONTROL_MODE:
        return f"env.options.control_mode is {mode!r}, but scripted experts act in {CONTROL_MODE} only"
    return None


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of a ManiSkill task.

    Args:
        config: the task, its cameras, rewards and options.
        num_envs: rows N of this env object.
        device: torch's name; with env.options.backend=auto a CUDA device uses the gpu backend, any other the CPU's.
        render_final: whether final observations have images.

    Raises:
        ConfigError: unknown task, robot, camera, control mode or option, or a reward that the task does not have.
        SimulatorError: no usable renderer, missing assets, or a task that cannot be built.
    """
    from envs.episodes import EpisodeEnv
    from envs.maniskill_rows import make_rows  # importing ManiSkill takes seconds

    simulator, instruction = make_rows(config, read_options(config), num_envs, device)
    return EpisodeEnv(config, simulator, instruction, render_final)
