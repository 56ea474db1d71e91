"""The configuration: one typed dataclass per Hydra group, checked when built; imports neither torch, ray nor hydra.

Every default lives here; the files under configs/ only say what differs.  A check names the path, the value, the rule
and what to do next.  Sections are handed to the component they belong to; nobody gets the whole but the entry points.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rlinf_embodied.errors import ConfigError


def _require(holds: bool, path: str, value: object, rule: str, action: str) -> None:
    if not holds:
        raise ConfigError(f"{path} is {value!r}, but {rule}: {action}")


class Backend(StrEnum):
    """Which physics steps the env."""

    auto = "auto"  # gpu where there is one, else batched CPU, else stock
    batched = "batched"  # N CPU scenes in one process behind ManiSkill's batched code path
    stock = "stock"  # one stock ManiSkill env object per row
    gpu = "gpu"  # one batched physx_cuda env


class Reward(StrEnum):
    """What training sees as the reward of an env step."""

    dense = "dense"  # ManiSkill's normalized_dense
    dense_delta = "dense_delta"  # its change in this step
    sparse = "sparse"  # nothing; only the success bonus


class AlgorithmName(StrEnum):
    """The reinforcement-learning algorithm."""

    ppo = "ppo"
    grpo = "grpo"


class Level(StrEnum):
    """How far log-probs are summed before a ratio is formed."""

    token = "token"
    action = "action"
    chunk = "chunk"


class Critic(StrEnum):
    """What the value head sees."""

    privileged = "privileged"  # the simulator's state (training only)
    observation = "observation"  # the policy's own features


class TransportMode(StrEnum):
    """How data gets from stage to stage."""

    adaptive = "adaptive"  # chosen per edge from the placement: what can stay in its process does
    object_store = "object_store"  # always through the object store, as if no two stages shared a process


class Reduction(StrEnum):
    """How gradients are summed over workers."""

    exact = "exact"  # along one fixed binary tree over blocks: the same bits for every plan and worker count
    fast = "fast"  # all-reduce


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    """A simulator task and how episodes are run on it."""

    _target_: str = "envs.maniskill.make_env"
    task: str = "PickCube-v1"  # any registered ManiSkill task id
    instruction: str | None = None  # None: the task's own sentence
    num_envs: int = 64  # rows over all workers
    block_size: int = 16  # rows per block: the unit of placement, policy call and gradient microbatch
    obs_size: int = 64  # pixels, width and height of each camera
    chunk: int = 5  # actions per policy call
    horizon: int = 50  # env steps per episode
    chunks_per_rollout: int = 20  # chunk-steps per rollout; with auto_reset=false at least horizon / chunk
    auto_reset: bool = True  # partial resets: a row whose episode ends starts the next one within the rollout
    carry_over: bool = False  # episodes still running at the end of a rollout go on in the next one
    ends_at_success: bool = True  # an episode ends when the task is solved (false: always `horizon` steps)
    reward: Reward = Reward.dense_delta
    success_bonus: float = 1.0  # added in the first step of an episode in which the task is solved
    backend: Backend = Backend.auto
    control_mode: str = "pd_ee_delta_pose"
    robot: str | None = None  # ManiSkill's robot_uids; None: the task's default
    cameras: list[str] = field(default_factory=lambda: ["base_camera"])  # sensor names, in the policy's order
    camera_fov: float | None = None  # of the first camera, radians; None: as the task has it
    camera_eye: list[float] | None = None  # where the first camera is, metres; None: as the task has it
    camera_target: list[float] | None = None  # what it looks at, metres
    decimate: bool | None = None  # lighter visual meshes; None: where a CPU renders
    show_goal: bool = False  # whether goal markers are seen in pictures
    goal_in_proprio: bool = True  # whether the proprioception holds the goal position
    options: dict[str, float] = field(default_factory=dict)  # for envs of one's own, see envs/point_reach.py

    def __post_init__(self) -> None:
        for name in ("num_envs", "block_size", "obs_size", "chunk", "horizon", "chunks_per_rollout"):
            value = getattr(self, name)
            _require(value >= 1, f"env.{name}", value, "it must be at least 1", f"set env.{name} to a positive number")
        _require(
            self.chunk <= self.horizon,
            "env.chunk",
            self.chunk,
            f"a chunk must fit into an episode of env.horizon={self.horizon} steps",
            "use a smaller env.chunk or a longer env.horizon",
        )
        _require(
            self.horizon % self.chunk == 0,
            "env.horizon",
            self.horizon,
            f"it must be a multiple of env.chunk={self.chunk}",
            f"use {max(1, self.horizon // self.chunk) * self.chunk}",
        )
        _require(
            self.num_envs % self.block_size == 0,
            "env.num_envs",
            self.num_envs,
            f"it must be a multiple of env.block_size={self.block_size}",
            f"use {max(1, self.num_envs // self.block_size) * self.block_size} or another env.block_size",
        )
        _require(
            not (self.carry_over and not self.auto_reset),
            "env.carry_over",
            self.carry_over,
            "episodes are carried over only where they are reset one by one",
            "set env.auto_reset=true or env.carry_over=false",
        )
        _require(
            (self.camera_eye is None) == (self.camera_target is None),
            "env.camera_eye",
            self.camera_eye,
            f"env.camera_target is {self.camera_target!r}, and a camera needs both or neither",
            "give both, for example env.camera_eye=[0.3,0,0.6] env.camera_target=[-0.1,0,0.1]",
        )
        for name in ("camera_eye", "camera_target"):
            point = getattr(self, name)
            _require(
                point is None or len(point) == 3, f"env.{name}", point, "a point has x, y and z", "give three numbers"
            )
        needed = self.horizon // self.chunk
        _require(
            self.auto_reset or self.chunks_per_rollout >= needed,
            "env.chunks_per_rollout",
            self.chunks_per_rollout,
            f"without partial resets a rollout holds one whole episode, {needed} chunk-steps",
            f"set env.chunks_per_rollout={needed} or env.auto_reset=true",
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks over all workers."""
        return self.num_envs // self.block_size


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """A policy and its size."""

    _target_: str = "policies.tiny_vla.TinyVLA"
    name: str = "tiny_vla"
    num_bins: int = 33  # values per action dimension
    stem_width: int = 64  # channels of the convolutional stem
    keypoints: int = 32  # spatial-softmax keypoints per camera
    instruction_length: int = 8  # word tokens; the rest of a longer instruction is folded into the last one
    hidden_size: int = 128  # of the causal transformer
    num_layers: int = 2
    num_heads: int = 4
    critic: Critic = Critic.privileged
    critic_hidden_size: int = 256
    freeze_stem: bool = True  # in RL: its feature maps are cached with the rollout
    temperature: float = 0.6  # of sampling, and of the log-probs alike

    def __post_init__(self) -> None:
        _require(self.num_bins >= 2, "policy.num_bins", self.num_bins, "a token needs at least two values", "use 33")
        _require(self.temperature > 0, "policy.temperature", self.temperature, "it must be positive", "use 0.6 or 1.0")
        _require(
            self.hidden_size % self.num_heads == 0,
            "policy.hidden_size",
            self.hidden_size,
            f"it must be a multiple of policy.num_heads={self.num_heads}",
            "change one of the two",
        )


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """PPO and GRPO share the clipped objective; they differ in where advantages come from."""

    name: AlgorithmName = AlgorithmName.ppo
    ratio_level: Level = Level.action  # log-probs are summed up to this level before a ratio is formed
    clip_low: float = 0.2
    clip_high: float = 0.2
    epochs: int = 4
    num_minibatches: int = 5  # a minibatch is one slice of every block
    lr: float = 1.5e-4
    lr_end_fraction: float = 0.3  # lr decays linearly to this fraction at the last iteration
    max_grad_norm: float = 0.5
    entropy_coef: float = 0.0
    target_kl: float | None = 0.05  # the policy epochs of an iteration end when a minibatch exceeds it
    reduction: Reduction = Reduction.exact
    # PPO
    gamma: float = 0.97  # per env step
    gae_lambda: float = 0.95  # per env step
    bootstrap_at_timeout: bool = False  # false: a time-out counts as terminal (right for a critic that sees the time)
    value_lr: float = 1e-3
    value_epochs: int = 8
    value_clip: float | None = None  # how far a value may move per iteration; None: unclipped
    value_max_grad_norm: float = 1.0
    critic_warmup_iterations: int = 1  # iterations that train the critic only
    # GRPO
    group_size: int = 8  # episodes from one initial state
    success_only: bool = True  # the return of an episode is its success, not its shaped reward
    drop_uniform_groups: bool = True  # groups without spread in the raw success are dropped ...
    max_refills: int = 2  # ... and refilled by further rollouts, at most so many
    min_groups: int = 8  # refill until so many groups are left
    length_normalized: bool = True  # every episode weighs the same, however long

    def __post_init__(self) -> None:
        for name in ("epochs", "num_minibatches", "group_size", "min_groups"):
            value = getattr(self, name)
            _require(value >= 1, f"algorithm.{name}", value, "it must be at least 1", "use a positive number")
        for name in ("lr", "value_lr", "clip_low", "clip_high", "max_grad_norm"):
            value = getattr(self, name)
            _require(value > 0, f"algorithm.{name}", value, "it must be positive", "use a positive number")
        for name in ("gamma", "gae_lambda"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"algorithm.{name}", value, "it must lie in [0, 1]", "use 0.97 or so")
        _require(
            self.name is not AlgorithmName.grpo or self.group_size >= 2,
            "algorithm.group_size",
            self.group_size,
            "GRPO compares episodes of a group, so a group needs at least two",
            "use 8",
        )


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    """Which plan tree runs: `auto` (the best one for what is measured), a preset, or any file of the same form."""

    name: str = "auto"
    file: str | None = None
    trees: list[dict] = field(default_factory=list)  # variants by number of devices, see flow/plan.py
    replan: bool = True  # auto: plan again when the stages' times have drifted from the profile, see flow/drift.py
    profile: str | None = None  # auto: a profile file to plan with; None: the cached one, or measured now
    profile_budget_s: float = 36.0  # auto: seconds for the repeated measurements of a profile, besides set-up

    def __post_init__(self) -> None:
        _require(
            self.profile_budget_s > 0,
            "plan.profile_budget_s",
            self.profile_budget_s,
            "it must be positive",
            "use 36",
        )
        _require(
            self.is_auto or bool(self.trees) or self.file is not None,
            "plan",
            self.name,
            "a plan needs a tree",
            "use plan=auto, plan=collocated, plan=disaggregated, or plan=<file.yaml>",
        )

    @property
    def is_auto(self) -> bool:
        """Whether the plan is still to be found."""
        return self.name == "auto" and not self.trees and self.file is None


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """The machines at hand."""

    name: str = "local"
    num_devices: int | None = None  # None: all GPUs, or all cores of a machine without one
    session: str = "ray"  # ray, or serial: one process, for debuggers
    call_timeout_s: float = 600.0  # a call that takes longer is reported as a hang
    object_store_bytes: int | None = None  # None: Ray's choice
    transport: TransportMode = TransportMode.adaptive
    emulated: bool = False  # described by the two below; for planning and for stages that only sleep
    nodes: list[dict] = field(default_factory=list)  # groups of alike nodes, see cluster/hardware.py
    links: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(
            self.num_devices is None or self.num_devices >= 1,
            "cluster.num_devices",
            self.num_devices,
            "it must be at least 1",
            "leave it out to use all devices",
        )
        _require(
            self.session in ("ray", "serial"),
            "cluster.session",
            self.session,
            "it is ray or serial",
            "use cluster.session=ray",
        )
        _require(
            self.transport is TransportMode.adaptive or self.session == "ray",
            "cluster.transport",
            self.transport.value,
            "one process (cluster.session=serial) has no object store",
            "use cluster.session=ray or cluster.transport=adaptive",
        )
        limit = self.call_timeout_s
        _require(limit > 0, "cluster.call_timeout_s", limit, "it must be positive", "use 600")


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """The imitation checkpoint that RL starts from."""

    checkpoint: str | None = None  # a checkpoint folder; None: demonstrations of the scripted expert are cloned
    num_demos: int = 120  # about half of the clone's PickCube episodes succeed then: RL has room above
    noise: list[float] = field(default_factory=lambda: [0.0, 0.05, 0.1, 0.3])  # of the expert's actions, by episode
    noise_steps: int = 15  # the largest noise lasts so many steps only
    epochs: int = 24  # of the whole policy
    head_epochs: int = 120  # of everything but the stem, on cached features
    batch_size: int = 32
    head_batch_size: int = 64
    lr: float = 1e-3
    head_lr: float = 2e-3
    cache_dir: str = "~/.cache/rlinf_embodied"  # RLINF_EMBODIED_CACHE overrides it

    def __post_init__(self) -> None:
        rule = "each of the 4 blocks of demonstrations needs at least one"
        _require(self.num_demos >= 4, "warm_start.num_demos", self.num_demos, rule, "use 120")
        for name in ("batch_size", "head_batch_size"):
            value = getattr(self, name)
            _require(value >= 1, f"warm_start.{name}", value, "it must be at least 1", "use 32")
        _require(bool(self.noise), "warm_start.noise", self.noise, "it holds at least one level", "use [0.0]")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out initial states."""

    num_episodes: int = 200
    num_envs: int = 32  # rows that are evaluated at a time, over all workers
    every: int = 0  # iterations between evaluations during training; 0: before and after only
    seed: int = 9000  # of the first episode; the following ones count up (training seeds are >= 2^30)
    greedy: bool = True  # false: sample at policy.temperature
    record_video: bool = True
    num_videos: int = 6  # episodes that are filmed
    video_size: int = 256

    def __post_init__(self) -> None:
        _require(self.num_episodes >= 1, "eval.num_episodes", self.num_episodes, "it must be at least 1", "use 200")
        _require(self.num_envs >= 1, "eval.num_envs", self.num_envs, "it must be at least 1", "use 32")
        _require(
            self.seed >= 0 and self.seed + self.num_episodes < 2**30,
            "eval.seed",
            self.seed,
            "evaluation seeds lie in [0, 2^30), apart from training's",
            "use 9000",
        )


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int = 10  # iterations; 0: only at the end
    keep: int = 3

    def __post_init__(self) -> None:
        _require(self.every >= 0, "checkpoint.every", self.every, "it must not be negative", "use 0 for the end only")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "the newest one is always kept", "use 1 or more")


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run."""

    dir: str | None = None  # None: runs/<task>-<algorithm>-<time>
    seed: int = 0
    num_iterations: int = 60
    exact: bool = True  # the same seed gives the same weights under every plan (CPU)
    dry: bool = False  # print the resolved config and stop
    wandb: bool = False

    def __post_init__(self) -> None:
        number = self.num_iterations
        _require(number >= 0, "run.num_iterations", number, "it must not be negative", "use 60")
        _require(0 <= self.seed < 2**31, "run.seed", self.seed, "it lies in [0, 2^31)", "use 0")


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Everything that experiments/train_vla.py reads."""

    env: EnvConfig
    policy: PolicyConfig
    algorithm: AlgorithmConfig
    plan: PlanConfig
    cluster: ClusterConfig
    run: RunConfig = field(default_factory=RunConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: str = "auto"  # auto: go on where run.dir stopped; never: refuse a used folder; <path>: a checkpoint

    def __post_init__(self) -> None:
        env, algorithm = self.env, self.algorithm
        if algorithm.name is AlgorithmName.grpo:
            _require(
                env.block_size % algorithm.group_size == 0,
                "env.block_size",
                env.block_size,
                f"a group of algorithm.group_size={algorithm.group_size} episodes stays within one block",
                "make the block a multiple of the group",
            )
            _require(
                not env.auto_reset,
                "env.auto_reset",
                env.auto_reset,
                "GRPO compares whole episodes, one per row",
                "set env.auto_reset=false",
            )
            _require(
                algorithm.min_groups <= env.num_envs // algorithm.group_size,
                "algorithm.min_groups",
                algorithm.min_groups,
                f"env.num_envs={env.num_envs} rows hold {env.num_envs // algorithm.group_size} groups",
                "use fewer groups or more envs",
            )
        _require(
            algorithm.reduction is Reduction.exact or not self.run.exact,
            "algorithm.reduction",
            algorithm.reduction.value,
            "run.exact=true needs sums in a fixed order",
            "set run.exact=false or algorithm.reduction=exact",
        )


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """Everything that experiments/evaluate.py reads; sections left out come from the checkpoint."""

    checkpoint: str | None = None
    policy: str = "checkpoint"  # checkpoint, expert or random
    env: EnvConfig = field(default_factory=EnvConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)
    allow_mismatch: bool = False  # evaluate although the evaluation fingerprint differs

    def __post_init__(self) -> None:
        _require(
            self.policy in ("checkpoint", "expert", "random"),
            "policy",
            self.policy,
            "it is checkpoint, expert or random",
            "use policy=checkpoint checkpoint=<dir>",
        )
        _require(
            self.policy != "checkpoint" or self.checkpoint is not None,
            "checkpoint",
            self.checkpoint,
            "a checkpoint folder is needed",
            "use checkpoint=<run.dir>/checkpoints/latest, or policy=expert",
        )


@dataclass(kw_only=True, slots=True)
class PlanningConfig:
    """Everything that experiments/plan.py reads."""

    profile: str = "maniskill_openvla"  # a file under configs/profiles, or a path to a .json file
    workflow: str | None = None  # embodied or reasoning; None: what the profile was measured for
    cluster: str = "h100x8"  # local, a file under configs/cluster (also without "emulated_"), or a path to a .yaml file
    num_items: int | None = None  # another amount of work than the profile's
    num_ranked: int = 8  # plans that are shown
    overlap_in_worker: bool = False  # price loops as if a worker's CPU and device sides ran at once
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        _require(
            self.workflow in (None, "embodied", "reasoning"),
            "workflow",
            self.workflow,
            "it is embodied or reasoning",
            "leave it out to take the profile's",
        )
        _require(self.num_ranked >= 1, "num_ranked", self.num_ranked, "it must be at least 1", "use 8")
        _require(
            self.num_items is None or self.num_items >= 1, "num_items", self.num_items, "it is positive", "use 256"
        )


@dataclass(kw_only=True, slots=True)
class EmulationConfig(PlanningConfig):
    """Everything that experiments/emulate.py reads."""

    plan: str = "auto"  # auto, all (what plan.py ranks), temporal, hybrid, spatial, or a path to a plan file
    time_scale: float | None = None  # wall seconds per emulated second; None: as fast as this machine keeps up with
    out: str | None = None  # a .json file for the results
    run: RunConfig = field(default_factory=lambda: RunConfig(num_iterations=3))

    def __post_init__(self) -> None:
        PlanningConfig.__post_init__(self)
        scale = self.time_scale
        _require(scale is None or scale > 0, "time_scale", scale, "it must be positive", "use 0.02, or leave it out")
        number = self.run.num_iterations
        _require(number >= 1, "run.num_iterations", number, "something must be measured", "use 3")
