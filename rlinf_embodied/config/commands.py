"""The config of each command: its sections and options, and the checks that span several sections."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rlinf_embodied.config.algorithm import AlgorithmConfig, Source, require_exact
from rlinf_embodied.config.checks import require, require_numbers, require_one_of
from rlinf_embodied.config.env import EnvConfig, PerturbConfig
from rlinf_embodied.config.hierarchy import HierarchyConfig, require_hierarchy
from rlinf_embodied.config.language import DataConfig, LanguagePolicyConfig, LoraSettings, Precision
from rlinf_embodied.config.learning import PolicyConfig, WarmStartConfig
from rlinf_embodied.config.machine import ClusterConfig, PlanConfig, RecoveryConfig, require_no_cores, require_staleness
from rlinf_embodied.config.reasoning import (
    AgentConfig,
    AnswerEvalConfig,
    EpisodesConfig,
    GenerationConfig,
    LanguageAlgorithmConfig,
    LanguageWarmStartConfig,
    ReasoningAlgorithmConfig,
    RewardConfig,
    ToolConfig,
    largest,
)
from rlinf_embodied.config.run import CheckpointConfig, EvalConfig, RunConfig

# Keys that may change when a run resumes (training/resume.py): its length, where and how fast it runs, evaluation,
# checkpoints and logging.  All others stay as in the first iteration: seed, exactness, env, data, policy, algorithm,
# generation, reward and warm start.
FREE_ON_RESUME = (
    *("resume", "plan.", "cluster.", "checkpoint.", "recovery.", "eval."),
    *("warm_start.cache_dir", "warm_start.decoders"),
    *("run.dir", "run.num_iterations", "run.until_success", "run.patience"),
    *("run.dry", "run.tensorboard", "run.wandb"),
    *("env.control_hz", "env.rows_per_call"),
    # ManiSkill's: the backend that results on this machine is compared with the checkpoint's fingerprint
    "env.options.backend",
)
KEPT_ON_RESUME = ("plan.max_staleness",)  # exceptions to these, which affect the weights


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Sections that every training has."""

    cluster: ClusterConfig
    plan: PlanConfig = field(default_factory=PlanConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    resume: str = "auto"  # auto: continue where run.dir stopped; or a checkpoint


@dataclass(kw_only=True, slots=True)
class TrainConfig(TrainingConfig):
    """Everything that experiments/train_vla.py reads."""

    env: EnvConfig
    policy: PolicyConfig
    algorithm: AlgorithmConfig
    # For algorithm=sft and algorithm.bc_coef: demonstrations (.h5 of ManiSkill, LeRobot or RLDS folders), each perhaps
    # with a weight, <path>:<weight>; otherwise recorded transitions, which are checkpoints of off-policy runs.
    data: str | None = None  # files or folders to learn from, joined by commas
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    hierarchy: HierarchyConfig = field(default_factory=HierarchyConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        self.env = self._paid_once(self.env)
        env, algorithm = self.env, self.algorithm
        algorithm.check(self)
        needed, steps = env.chunks_per_episode, env.chunks_per_rollout
        rule = f"an episode may take {needed} chunk-steps, and it would not end within a rollout"
        action = f"set env.chunks_per_rollout={needed} or env.carry_over=true"
        require(env.carry_over or steps >= needed, "env.chunks_per_rollout", steps, rule, action)
        evaluation = self.eval
        first, end = evaluation.check_seed, evaluation.check_seed + evaluation.check_episodes
        disjoint = end <= evaluation.seed or first >= evaluation.seed + evaluation.num_episodes
        disjoint = disjoint and first >= 0 and end < 2**30
        rule = "checks need separate episodes, neither evaluation's nor training's"
        require(self.run.until_success is None or disjoint, "eval.check_seed", first, rule, "use 1000000")
        require_exact(self.run.exact, "algorithm", algorithm.reduction, algorithm.compile)
        require_hierarchy(self.hierarchy, env, algorithm, self.warm_start)
        high = self.hierarchy.algorithm
        if self.hierarchy.on:
            require_exact(self.run.exact, "hierarchy.algorithm", high.reduction, high.compile)
        rule, action = f"{algorithm.name} learns from rollouts", "leave it out, or use algorithm=rlpd, iql, bc or sft"
        used = algorithm.learns_from is not Source.rollouts or algorithm.uses_demonstrations
        require(self.data is None or used, "data", self.data, rule, f"{action}, or algorithm.bc_coef=0.1")
        for path, section in (("warm_start", self.warm_start), ("algorithm", algorithm)):
            names, action = [str(name) for name in getattr(section, "augment", [])], "leave it out, or name cameras"
            rule = "it changes images, and env.cameras is empty"
            require(bool(env.cameras) or not names, f"{path}.augment", names, rule, action)

    def _paid_once(self, env: EnvConfig) -> EnvConfig:
        """Returns the env section with a success bonus that is not added to a bootstrapped value after a time-out."""
        high = self.hierarchy
        levels = [(high.algorithm, high.policy)] if high.on else []
        levels += [] if high.on and high.frozen else [(self.algorithm, self.policy)]
        bootstraps = any(algorithm.bootstraps(policy.critic) for algorithm, policy in levels)
        rule = "the value after a time-out is bootstrapped, and the bonus stands for it"
        action = "leave it out, or set algorithm.bootstrap_at_timeout=false"
        require(not (env.bonus_at_timeout and bootstraps), "env.bonus_at_timeout", True, rule, action)
        return env if env.bonus_at_timeout is not None else replace(env, bonus_at_timeout=not bootstraps)

    @property
    def files(self) -> list[str]:
        return [part.strip() for part in (self.data or "").split(",") if part.strip()]


@dataclass(kw_only=True, slots=True)
class RemoteConfig:
    """The policy server of policy=remote (docs/serving.md)."""

    url: str | None = None  # ws://<host>:<port>; ws://<host>:<port>/vla-eval for vla-eval's protocol
    timeout_s: float = 60.0  # time limit of a response
    keys: dict[str, str] = field(default_factory=dict)  # {observation/image: observation.images.base_camera}, ours last
    chunk: int = 0  # number of actions of a response that are used; a command sets it to env.chunk

    def __post_init__(self) -> None:
        fits, rule = self.url is None or self.url.startswith(("ws://", "wss://")), "it names a websocket"
        require(fits, "remote.url", self.url, rule, "use ws://<host>:<port>")
        require_numbers(self, "remote", "timeout_s", low=0, above=True)


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """Everything that experiments/serve_policy.py reads."""

    checkpoint: str
    host: str = "127.0.0.1"  # interface to listen on: clients of this machine only; 0.0.0.0: any client
    port: int = 8000  # 0: any that is free
    max_batch: int = 16  # largest number of observations in a policy call
    wait_ms: float = 2.0  # wait before a policy call for requests of other connected clients
    keys: dict[str, str] = field(default_factory=dict)  # {<a client's key>: <ours>}, see docs/serving.md
    prompt: str | None = None  # instruction for requests without one
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # its first device computes
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require_numbers(self, "", "max_batch", low=1)
        require_numbers(self, "", "wait_ms", low=0)
        require_numbers(self, "", "port", low=0, high=65535)


@dataclass(kw_only=True, slots=True)
class ServeEnvConfig:
    """Everything that experiments/serve_env.py reads; the env is the checkpoint's unless it is given."""

    checkpoint: str | None = None
    env: EnvConfig = field(default_factory=EnvConfig)
    host: str = "127.0.0.1"  # interface to listen on: clients of this machine only; 0.0.0.0: any client
    port: int = 8100  # 0: any that is free
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # it simulates on the first device
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require_numbers(self, "", "port", low=0, high=65535)


def _require_policy(policy: str, checkpoint: str | None, remote: RemoteConfig) -> None:
    rule, action = "a checkpoint folder is needed", "use checkpoint=<run.dir>/checkpoints/latest, or policy=expert"
    require(policy != "checkpoint" or checkpoint is not None, "checkpoint", checkpoint, rule, action)
    fits, action = (policy == "remote") == (remote.url is not None), "give policy=remote and remote.url, or neither"
    require(fits, "remote.url", remote.url, f"policy is {policy!r}", action)


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """Everything that experiments/export_dataset.py reads; the env is the checkpoint's unless it is given."""

    out: str  # a new folder
    checkpoint: str | None = None
    policy: str = "checkpoint"  # checkpoint, expert or remote
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    num_episodes: int = 100
    successes_only: bool = True  # false: write failed episodes as well
    video: bool = False  # images as videos (smaller, not exact) instead of PNG
    env: EnvConfig = field(default_factory=EnvConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require_one_of(self, "", "policy", "checkpoint", "expert", "remote")
        _require_policy(self.policy, self.checkpoint, self.remote)
        require_numbers(self, "", "num_episodes", low=1)


@dataclass(kw_only=True, slots=True)
class MathConfig(TrainingConfig):
    """Everything that experiments/train_llm_math.py reads."""

    data: DataConfig
    policy: LanguagePolicyConfig
    algorithm: LanguageAlgorithmConfig
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    tool: ToolConfig = field(default_factory=ToolConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    episodes: EpisodesConfig = field(default_factory=EpisodesConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warm_start: LanguageWarmStartConfig = field(default_factory=LanguageWarmStartConfig)
    eval: AnswerEvalConfig = field(default_factory=AnswerEvalConfig)

    def __post_init__(self) -> None:
        require_no_cores(self.cluster)
        target, rule = self.run.until_success, "only training in simulators is stopped by its success"
        require(target is None, "run.until_success", target, rule, "leave it out")
        require_exact(self.run.exact, "algorithm", self.algorithm.reduction)
        folder, start = self.policy.folder, self.warm_start.checkpoint
        rule = f"policy.folder is {folder!r}, and training starts from one model"
        require(folder is None or start is None, "warm_start.checkpoint", start, rule, "give one of the two")
        rule = "an agent has its own tools"
        require(
            None in (self.tool._target_, self.agent._target_), "tool._target_", self.tool._target_, rule, "leave it out"
        )
        scored, rule = self.reward.model, "the agent gives the rewards"
        require(None in (scored, self.agent._target_), "reward.model", scored, rule, "leave it out")
        engine, is_vllm = self.generation.engine, self.generation.engine == "vllm"
        rule = "vLLM's kernels do not promise the same bits"
        action = "set run.exact=false, or use generation.engine=exact"
        require(not (is_vllm and self.run.exact.holds), "generation.engine", engine, rule, action)
        rank = self.policy.lora.rank
        rule, action = "vLLM applies adapters of rank 512 or less", "use a smaller one, or generation.engine=exact"
        require(not is_vllm or rank <= 512, "policy.lora.rank", rank, rule, action)
        rule, action = "only adapters are sent, to a copy in policy.precision", "leave it out"
        fits = self.generation.precision is Precision.float32 or not rank
        require(fits, "generation.precision", self.generation.precision.value, rule, action)
        self.algorithm.check(self)

    @property
    def rl(self) -> ReasoningAlgorithmConfig:
        assert isinstance(self.algorithm, ReasoningAlgorithmConfig)
        return self.algorithm

    @property
    def num_turns(self) -> int:
        """Largest number of turns of an episode."""
        return self.tool.num_turns if self.agent._target_ is None else self.agent.max_requests

    @property
    def has_loop(self) -> bool:
        """Whether episodes are a loop of two stages, turn by turn."""
        return not self.episodes.free and (self.num_turns > 1 or self.agent._target_ is not None)

    @property
    def num_rows(self) -> int:
        """Completions of a round."""
        return self.rl.prompts_per_iteration * self.rl.group_size

    @property
    def rows_per_block(self) -> int:
        """Completions of a block: generation.rows_per_block, or all of a smaller round."""
        return min(self.generation.rows_per_block, self.num_rows)

    @property
    def num_blocks(self) -> int:
        return self.num_rows // self.rows_per_block

    @property
    def prompts_per_block(self) -> int:
        return self.rows_per_block // self.rl.group_size

    @property
    def carried_per_block(self) -> int:
        """Additional prompts of a block that are in flight (episodes.carried)."""
        return round(self.episodes.carried * self.prompts_per_block)

    @property
    def blocks_per_batch(self) -> int:
        """Blocks of a decoding batch: as many as fit into generation.rows_per_batch, in batches of equal size."""
        return largest(self.rows_per_block, self.generation.rows_per_batch, self.num_rows) // self.rows_per_block


@dataclass(kw_only=True, slots=True)
class EvaluateConfig:
    """Everything that experiments/evaluate.py reads; omitted sections come from the checkpoint."""

    checkpoint: str | None = None
    policy: str = "checkpoint"  # checkpoint, expert, random, remote, or sb3: checkpoint=<zip> of Stable-Baselines3
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)
    allow_mismatch: bool = False  # evaluate although the evaluation fingerprint differs; shapes must fit
    compare: str | None = None  # <a>,<b> on the same episodes: each a checkpoint, ws://<server>, expert or random
    perturb: PerturbConfig = field(default_factory=PerturbConfig)  # compare the unchanged env with env.perturb=this
    film_failures: bool = False  # repeat and film the first eval.num_videos failures
    resolution: float = 0.05  # difference of success rates that `num_needed` episodes of a comparison detect

    def __post_init__(self) -> None:
        require_one_of(self, "", "policy", "checkpoint", "expert", "random", "remote", "sb3")
        require_numbers(self, "", "resolution", low=0, above=True, high=1)
        alone = self.checkpoint is None and self.policy == "checkpoint" and not self.perturb.axes
        rule = "it names two policies, and nothing else is compared at once"
        action = "use compare=<a>,<b>, without checkpoint, policy and perturb"
        require(self.compare is None or (alone and len(self.compared) == 2), "compare", self.compare, rule, action)
        holds, rule = not (self.film_failures and self.eval.film_seeds), "eval.film_seeds selects other episodes"
        require(holds, "film_failures", self.film_failures, rule, "leave one of them out")
        if self.compare is not None:
            return
        _require_policy(self.policy, self.checkpoint, self.remote)
        if self.policy == "sb3":
            rule, action = "a policy of Stable-Baselines3 is a file", "use checkpoint=<file>.zip of model.save"
            require(self.checkpoint is not None, "checkpoint", self.checkpoint, rule, action)
            rule = "Stable-Baselines3 chooses one action at a time"
            require(self.env.chunk == 1, "env.chunk", self.env.chunk, rule, "use env.chunk=1")
            rule = (
                "Stable-Baselines3 would sample with torch's global generator, so evaluations would not be repeatable"
            )
            require(self.eval.greedy, "eval.greedy", self.eval.greedy, rule, "leave it out")
            more = self.eval.sampled_episodes
            require(not more, "eval.sampled_episodes", more, rule, "leave it out")

    @property
    def compared(self) -> list[str]:
        return [part.strip() for part in (self.compare or "").split(",") if part.strip()]


@dataclass(kw_only=True, slots=True)
class EvaluateAnswersConfig:
    """What experiments/evaluate.py reads for a reasoning checkpoint, whose sections are the defaults."""

    checkpoint: str
    data: DataConfig
    policy: LanguagePolicyConfig
    generation: GenerationConfig
    reward: RewardConfig
    tool: ToolConfig = field(default_factory=ToolConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: AnswerEvalConfig = field(default_factory=AnswerEvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require_no_cores(self.cluster)


@dataclass(kw_only=True, slots=True)
class ProfiledConfig:
    """What experiments/plan.py and experiments/emulate.py both read."""

    profile: str = "maniskill_openvla"  # a file under configs/profiles, or a path to a .json file
    cluster: str = "h100x8"  # local, a file under configs/described_clusters, or a path to a .yaml file
    num_items: int | None = None  # episodes or prompts of an iteration; None: the profile's
    num_ranked: int = 8  # number of plans to print
    max_staleness: int = 0  # as plan.max_staleness
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require_numbers(self, "", "num_ranked", "num_items", low=1)
        require_staleness("max_staleness", self.max_staleness)


@dataclass(kw_only=True, slots=True)
class MemoryConfig:
    """Training method and devices for the memory table of experiments/plan.py model=; a GB is 1e9 bytes."""

    num_devices: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    device_gb: float = 80.0
    precision: Precision = Precision.bfloat16  # of passes and rollouts; trained weights have a float32 copy
    lora: LoraSettings = field(default_factory=lambda: LoraSettings(rank=32))  # rank 0: full fine-tuning only
    profile: str | None = None  # profile.json of a run of this policy, for measured working bytes
    tokens: int = 16384  # of a language model's training pass, whose working bytes are counted

    def __post_init__(self) -> None:
        holds, rule = bool(self.num_devices) and min(self.num_devices) >= 1, "it lists numbers of at least 1"
        require(holds, "memory.num_devices", self.num_devices, rule, "use [1,2,4,8]")
        require_numbers(self, "memory", "device_gb", low=0, above=True)
        require_numbers(self, "memory", "tokens", low=2)


@dataclass(kw_only=True, slots=True)
class PlanningConfig(ProfiledConfig):
    """Everything that experiments/plan.py reads."""

    model: str | None = None  # compute its memory instead: a file under configs/models, a config.json or its folder
    memory: MemoryConfig = field(default_factory=MemoryConfig)  # with model only
    search_s: float = 10.0  # limit of the search, in seconds


@dataclass(kw_only=True, slots=True)
class EmulationConfig(ProfiledConfig):
    """Everything that experiments/emulate.py reads."""

    plan: str = "auto"  # auto, all (what plan.py ranks), collocated, disaggregated, hybrid, or a plan file
    probes: bool = False  # first profile the emulated devices, as at a launch, and plan with that profile
    time_scale: float | None = None  # wall seconds per emulated second; None: as fast as this machine allows
    run: RunConfig = field(default_factory=lambda: RunConfig(num_iterations=3))

    def __post_init__(self) -> None:
        ProfiledConfig.__post_init__(self)
        require_numbers(self, "", "time_scale", low=0, above=True)
        number = self.run.num_iterations
        require(number >= 1, "run.num_iterations", number, "at least one iteration is measured", "use 3")
