"""The section `env`: a simulator task and how episodes are run on it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from rlinf_embodied.config.checks import require, require_numbers


class Reward(StrEnum):
    """What training sees as the reward of an env step."""

    auto = "auto"  # dense_delta of ManiSkill's tasks, dense of custom envs
    dense = "dense"  # the task's own, of ManiSkill's tasks normalized_dense
    dense_delta = "dense_delta"  # its change in this step
    sparse = "sparse"  # nothing; only the success bonus


class PrefixSchedule(StrEnum):
    """How far real-time chunking draws actions of a chunk to what is left of the one before: the weight of each.

    It is 1 of those that are executed while the policy computes, and 0 where nothing is left.
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
        """Whether the env simulates and renders on an accelerator where devices are of a kind, torch's name of it."""
        return False

    def on_cores(self) -> dict[str, Any]:
        """Returns the options to change for an env that runs on CPU cores next to accelerators (cluster.cpu_devices).

        Raises:
            ConfigError: the options ask for an accelerator.
        """
        return {}

    def conditions(self, sees: bool, kind: str) -> dict[str, Any]:
        """Returns what an evaluation must share with the training for its result to mean anything, as JSON values.

        `sees`: whether the policy sees images; `kind`: of the devices, torch's name of it.
        """
        return {}


class Chunking:
    """Arithmetic of what has a horizon, and chunks that a policy predicts and an env executes."""

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
        """Policy calls of a whole episode; the last one may be cut short by its end."""
        return -(-self.horizon // self.executed)


VISUAL = ("camera", "camera_turn", "light", "texture")  # axes of PerturbConfig that only images show
LATE = ("inference_delay", "inference_jitter")  # those that concern policies: any env has them


@dataclass(kw_only=True, slots=True)
class PerturbConfig:
    """How the world differs from the one that demonstrations are made in.

    How far each axis goes is given; in which direction is drawn by `seed`, once for all episodes.  Random steps,
    paraphrases and noise are drawn by the seed of the episode.
    """

    camera: float = 0.0  # metres by which each of env.cameras is moved
    camera_turn: float = 0.0  # degrees by which it is turned
    light: float = 0.0  # share of its strength by which each light gains or loses, colour by colour, in [0, 1]
    texture: bool = False  # table and floor have other, plain colours
    initial_steps: int = 0  # env steps of random actions before an episode begins
    instruction: bool = False  # instructions are paraphrased
    delay: int = 0  # env steps until an action is executed; zeros until then
    observation_delay: int = 0  # env steps until images and state vectors are seen; the episode's first until then
    observation_jitter: int = 0  # so many more at most, drawn for each observation
    inference_delay: int = 0  # env steps that a policy call takes; until then the chunk before is executed
    inference_jitter: int = 0  # so many more at most, drawn for each call
    noise: float = 0.0  # standard deviation of what is added to each action
    seed: int = 0

    def __post_init__(self) -> None:
        require_numbers(self, "env.perturb", "camera", "camera_turn", "initial_steps", "delay", "noise", "seed")
        require_numbers(self, "env.perturb", "observation_delay", "observation_jitter")
        require_numbers(self, "env.perturb", "light", high=1.0)
        require_numbers(self, "env.perturb", *LATE)

    @property
    def axes(self) -> dict[str, Any]:
        """Returns what is perturbed, by name: {} where nothing is."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) and f.name != "seed"}


@dataclass(kw_only=True, slots=True)
class EnvConfig(Chunking):
    """A simulator task and how episodes are run on it."""

    _target_: str = MANISKILL  # or (env section, rows, device, render_final) -> a custom VectorEnv, docs/own_env.md
    task: str = "PickCube-v1"  # any registered ManiSkill task id
    instruction: str | None = None  # None: the task's own sentence
    num_envs: int = 64  # rows over all workers
    block_size: int = 16  # rows per block, at most num_envs: the unit of placement and of exact sums
    rows_per_call: int | None = None  # rows of a policy call, at most; None: all of a worker's (docs/determinism.md)
    obs_size: int = 64  # pixels, width and height of each camera
    chunk: int = 5  # actions that a policy call predicts
    execute_steps: int = 0  # how many of these are executed before the policy is asked again; 0: all
    rtc: PrefixSchedule = PrefixSchedule.off  # real-time chunking: chunks of flow policies continue the one before
    horizon: int = 50  # env steps per episode
    chunks_per_rollout: int = 20  # chunk-steps per rollout; 0: an episode; with auto_reset=false at least that
    auto_reset: bool = True  # partial resets: a row whose episode ends starts the next one within the rollout
    carry_over: bool = False  # episodes still running at the end of a rollout continue in the next one
    hold_steps: int = 10  # an episode ends once the task has been solved for this many env steps; 0: at `horizon` only
    reward: Reward = Reward.auto
    success_bonus: float = 1.0  # added to the last reward of an episode that the task ends solved: it is its future
    # whether it is paid at a time-out as well; null: where the algorithm counts no value after a time-out, see
    # algorithm.bootstrap_at_timeout
    bonus_at_timeout: bool | None = None
    control_hz: float = 0.0  # env steps per second, as a real robot's: a step takes at least its period; 0: no limit
    cameras: list[str] = field(default_factory=lambda: ["base_camera"])  # sensor names, in the policy's order
    history: int = 1  # env steps that an observation shows of each camera and state vector: the last ones
    states: list[str] | None = None  # names of state vectors, in the policy's order; None: all
    perturb: PerturbConfig = field(default_factory=PerturbConfig)  # how it differs from that of demonstrations
    options: dict[str, Any] = field(default_factory=dict)  # of this env: ManiSkill's are in envs/maniskill.py

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
        held, rule = 0 <= self.hold_steps <= self.horizon, f"it lies in [0, env.horizon={self.horizon}]"
        action = "use 1 to end episodes once the task is solved, or 0 to never end them early"
        require(held, "env.hold_steps", self.hold_steps, rule, action)
        late, left = self.perturb.inference_delay + self.perturb.inference_jitter, self.chunk - self.executed
        rule = f"it needs what is left of a chunk, and {self.executed} of env.chunk={self.chunk} actions are executed"
        action = "predict more actions (env.chunk), or execute fewer (env.execute_steps)"
        within = late <= min(left, self.executed)
        require(within, "env.perturb.inference_delay + inference_jitter", late, rule, action)
        require(left > 0 or self.rtc is PrefixSchedule.off, "env.rtc", self.rtc.value, rule, action)
        rule = "what is left of a chunk is not carried over"
        require(not (self.overlaps and self.carry_over), "env.carry_over", True, rule, "set env.carry_over=false")
        for name in (name for name in self.perturb.axes if name in VISUAL):
            value, rule = self.perturb.axes[name], "only images show it, and env.cameras is empty"
            require(bool(self.cameras), f"env.perturb.{name}", value, rule, "leave it out, or name cameras")

    @property
    def overlaps(self) -> bool:
        """Whether it matters to a chunk what is left of the one before."""
        return self.rtc is not PrefixSchedule.off or any(name in LATE for name in self.perturb.axes)

    @property
    def num_blocks(self) -> int:
        return self.num_envs // self.block_size
