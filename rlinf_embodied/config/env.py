"""The section `env`: a simulator task and how episodes are run on it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from rlinf_embodied.config.checks import require, require_numbers


class Reward(StrEnum):
    """The reward of an env step in training."""

    auto = "auto"  # dense_delta for ManiSkill's tasks, dense for custom envs
    dense = "dense"  # the task's own reward; for ManiSkill's tasks normalized_dense
    dense_delta = "dense_delta"  # the change of the dense reward in this step
    sparse = "sparse"  # only the success bonus


class PrefixSchedule(StrEnum):
    """Weight with which real-time chunking guides an action of a chunk to the rest of the previous chunk.

    It is 1 for actions that are executed while the policy computes, and 0 where the previous chunk has no action left.
    """

    off = "off"  # 0: no real-time chunking
    zeros = "zeros"  # 0 in between
    ones = "ones"  # 1 in between
    linear = "linear"  # falls linearly in between, LeRobot's default
    exp = "exp"  # falls faster


MANISKILL = "envs.maniskill.make_env"


@dataclass(kw_only=True, slots=True)
class EnvOptions:
    """Base class of an env's options, which `read_options(env section)` in the module of `env._target_` returns."""

    def on_accelerator(self, kind: str) -> bool:
        """Whether the env simulates and renders on an accelerator if devices are of `kind`, torch's device type."""
        return False

    def on_cores(self) -> dict[str, Any]:
        """Returns the options to change for an env that runs on CPU cores next to accelerators (cluster.cpu_devices).

        Raises:
            ConfigError: the options request an accelerator.
        """
        return {}

    def conditions(self, sees: bool, kind: str) -> dict[str, Any]:
        """Returns the properties that an evaluation must share with the training to be comparable, as JSON values.

        `sees`: whether the policy reads images; `kind`: torch's device type.
        """
        return {}


class Chunking:
    """Arithmetic of episodes with a horizon and of action chunks that a policy predicts and an env executes."""

    __slots__ = ()
    chunk: int
    execute_steps: int  # 0: all
    horizon: int

    @property
    def executed(self) -> int:
        """Env steps per policy call."""
        return self.execute_steps or self.chunk

    @property
    def chunks_per_episode(self) -> int:
        """Policy calls of a whole episode; the episode may end within the last one."""
        return -(-self.horizon // self.executed)


VISUAL = ("camera", "camera_turn", "light", "texture")  # axes of PerturbConfig that change images only
LATE = ("inference_delay", "inference_jitter")  # axes that delay the policy, independent of the env


@dataclass(kw_only=True, slots=True)
class PerturbConfig:
    """How the env differs from the one in which demonstrations are collected (docs/evaluation.md).

    Magnitudes are given; directions are drawn by `seed`, once for all episodes.  Random steps, paraphrases and noise
    are drawn by the seed of the episode.
    """

    camera: float = 0.0  # metres by which each of env.cameras is moved
    camera_turn: float = 0.0  # degrees by which each camera is rotated
    light: float = 0.0  # fraction by which the strength of each light changes, per colour, in [0, 1]
    texture: bool = False  # table and floor have other, plain colours
    initial_steps: int = 0  # env steps of random actions before an episode begins
    instruction: bool = False  # instructions are paraphrased
    delay: int = 0  # env steps from the choice of an action to its execution; until then actions are zero
    observation_delay: int = 0  # age in env steps of images and state vectors; until then the episode's first ones
    observation_jitter: int = 0  # largest additional age, drawn for each observation
    inference_delay: int = 0  # env steps that a policy call takes; until then the previous chunk is executed
    inference_jitter: int = 0  # largest additional duration, drawn for each call
    noise: float = 0.0  # standard deviation of Gaussian noise on each action
    seed: int = 0

    def __post_init__(self) -> None:
        require_numbers(self, "env.perturb", "camera", "camera_turn", "initial_steps", "delay", "noise", "seed")
        require_numbers(self, "env.perturb", "observation_delay", "observation_jitter")
        require_numbers(self, "env.perturb", "light", high=1.0)
        require_numbers(self, "env.perturb", *LATE)

    @property
    def axes(self) -> dict[str, Any]:
        """Returns the perturbed axes and their values by name; {} if there are none."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) and f.name != "seed"}


@dataclass(kw_only=True, slots=True)
class EnvConfig(Chunking):
    """A simulator task and how episodes are run on it."""

    _target_: str = MANISKILL  # or (env section, rows, device, render_final) -> a custom VectorEnv, docs/own_env.md
    task: str = "PickCube-v1"  # any registered ManiSkill task id
    instruction: str | None = None  # None: the task's own sentence
    num_envs: int = 64  # rows over all workers
    block_size: int = 16  # rows per block, at most num_envs: the unit of placement and of exact sums
    rows_per_call: int | None = None  # at most, in a policy call; None: all of a worker (docs/determinism.md)
    obs_size: int = 64  # pixels, width and height of each camera
    chunk: int = 5  # actions that a policy call predicts
    execute_steps: int = 0  # number of these that are executed before the next policy call; 0: all
    rtc: PrefixSchedule = PrefixSchedule.off  # real-time chunking: chunks of flow policies continue the previous one
    horizon: int = 50  # env steps per episode
    chunks_per_rollout: int = 20  # chunk-steps per rollout; 0: one episode; with auto_reset=false at least one
    auto_reset: bool = True  # partial resets: a row whose episode ends starts the next one within the rollout
    carry_over: bool = False  # episodes that are unfinished at the end of a rollout continue in the next one
    hold_steps: int = 10  # an episode ends once the task has been solved for this many env steps; 0: at `horizon` only
    reward: Reward = Reward.auto
    success_bonus: float = 1.0  # added to the last reward of an episode that ends solved, for its future rewards
    bonus_at_timeout: bool | None = None  # add it at a time-out too; null: unless algorithm.bootstrap_at_timeout
    control_hz: float = 0.0  # env steps per second: a step takes at least its period, as on a robot; 0: no limit
    cameras: list[str] = field(default_factory=lambda: ["base_camera"])  # sensor names, in the policy's order
    history: int = 1  # number of latest env steps of each camera and state vector in an observation
    states: list[str] | None = None  # names of state vectors, in the policy's order; None: all
    perturb: PerturbConfig = field(default_factory=PerturbConfig)  # differences from the env of demonstrations
    options: dict[str, Any] = field(default_factory=dict)  # of this env only; ManiSkill's are in envs/maniskill.py

    def __post_init__(self) -> None:
        if self.reward is Reward.auto:
            self.reward = Reward.dense_delta if self._target_ == MANISKILL else Reward.dense
        executed, rule = self.execute_steps, f"a policy call predicts env.chunk={self.chunk} actions"
        action = "use at most that many, or 0 for all of them"
        require(0 <= executed <= self.chunk, "env.execute_steps", executed, rule, action)
        if self.chunks_per_rollout == 0 and self.chunk >= 1:
            self.chunks_per_rollout = self.chunks_per_episode
        require_numbers(self, "env", "num_envs", "block_size", "rows_per_call", "chunks_per_rollout", low=1)
        require_numbers(self, "env", "obs_size", "history", "chunk", "horizon", low=1)
        require_numbers(self, "env", "control_hz")
        path = "env.execute_steps" if executed else "env.chunk"
        rule = f"so many steps must fit into an episode of env.horizon={self.horizon} steps"
        require(self.executed <= self.horizon, path, self.executed, rule, "use a smaller one, or a longer env.horizon")
        self.block_size = min(self.block_size, self.num_envs)
        rule = f"it must be a multiple of env.block_size={self.block_size}"
        action = f"use {max(1, self.num_envs // self.block_size) * self.block_size} or another env.block_size"
        require(self.num_envs % self.block_size == 0, "env.num_envs", self.num_envs, rule, action)
        rule = "episodes are carried over only where they are reset one by one"
        action = "set env.auto_reset=true or env.carry_over=false"
        require(self.auto_reset or not self.carry_over, "env.carry_over", True, rule, action)
        fits, rule = 0 <= self.hold_steps <= self.horizon, f"it lies in [0, env.horizon={self.horizon}]"
        action = "use 1 to end episodes once the task is solved, or 0 to never end them early"
        require(fits, "env.hold_steps", self.hold_steps, rule, action)
        delay, remaining = self.perturb.inference_delay + self.perturb.inference_jitter, self.chunk - self.executed
        rule = f"it needs unexecuted actions of a chunk, and {self.executed} of env.chunk={self.chunk} are executed"
        action = "predict more actions (env.chunk), or execute fewer (env.execute_steps)"
        fits = delay <= min(remaining, self.executed)
        require(fits, "env.perturb.inference_delay + inference_jitter", delay, rule, action)
        require(remaining > 0 or self.rtc is PrefixSchedule.off, "env.rtc", self.rtc.value, rule, action)
        rule = "unexecuted actions of a chunk are not carried over"
        require(not (self.overlaps and self.carry_over), "env.carry_over", True, rule, "set env.carry_over=false")
        for name in (name for name in self.perturb.axes if name in VISUAL):
            value, rule = self.perturb.axes[name], "it changes images only, and env.cameras is empty"
            require(bool(self.cameras), f"env.perturb.{name}", value, rule, "leave it out, or name cameras")

    @property
    def overlaps(self) -> bool:
        """Whether a chunk depends on the remaining actions of the previous one."""
        return self.rtc is not PrefixSchedule.off or any(name in LATE for name in self.perturb.axes)

    @property
    def num_blocks(self) -> int:
        return self.num_envs // self.block_size
