"""The sections `generation`, `reward`, `algorithm`, `warm_start` and `eval` of the reasoning workflow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from rlinf_embodied.config.algorithm import PolicyLoss, RatioLevel, Reduction, Sharding, require_dual_clip
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.config.language import Precision

if TYPE_CHECKING:
    from rlinf_embodied.config.commands import MathConfig


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    """How completions are sampled, and in which batches."""

    max_new_tokens: int = 52  # of all turns, a tool's included; 512 if data.prompt_template is not compact
    temperature: float = 1.0  # of sampling and of log-probs; the next three restrict both
    top_k: int = 0  # sample only from this number of likeliest tokens; 0: from all
    top_p: float = 1.0  # sample only from the likeliest tokens that have this probability together
    min_p: float = 0.0  # sample only tokens with at least this fraction of the likeliest token's probability
    stop: list[str] = field(default_factory=list)  # texts that end a completion and are part of it
    precision: Precision = Precision.float32  # bfloat16: of a separate copy of the weights for generation
    rows_per_block: int = 64  # completions in a block: the unit of placement, streaming and gradients
    rows_per_batch: int = 128  # largest decoding batch in completions: consecutive blocks, in one worker
    max_num_seqs: int = 128  # sequences that decode at once; the next one starts as soon as one has ended
    engine: str = "exact"  # exact (reasoning/generation.py), vllm, or the dotted path of an Engine
    tensor_parallel_size: int = 1  # devices of one node that each engine computes on together; the plan places them
    engine_options: dict[str, Any] = field(default_factory=dict)  # vLLM's EngineArgs: {gpu_memory_utilization: 0.4}

    def __post_init__(self) -> None:
        counts = ("max_new_tokens", "rows_per_block", "rows_per_batch", "max_num_seqs", "tensor_parallel_size")
        require_numbers(self, "generation", *counts, low=1)
        size, rule = self.tensor_parallel_size, "the exact engine computes on one device"
        require(size == 1 or self.engine != "exact", "generation.tensor_parallel_size", size, rule, "use engine=vllm")
        rule, action = "the plan has to know it", "use generation.tensor_parallel_size"
        given = self.engine_options.get("tensor_parallel_size")
        require(given is None, "generation.engine_options.tensor_parallel_size", given, rule, action)
        require_numbers(self, "generation", "temperature", low=0, above=True)  # evaluation is greedy by itself
        require_numbers(self, "generation", "top_k")
        require_numbers(self, "generation", "top_p", above=True, high=1)
        require_numbers(self, "generation", "min_p", high=1)
        require(all(self.stop), "generation.stop", self.stop, "an empty text would match everywhere", "leave it out")
        required = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "stop": []} if self.engine == "vllm" else {}
        rule = "vllm does not return the set of tokens that could have been sampled, nor search for stop strings"
        action = "leave it out, or use generation.engine=exact"
        for name, neutral in required.items():
            value = getattr(self, name)
            require(value == neutral, f"generation.{name}", value, rule, action)


@dataclass(kw_only=True, slots=True)
class ToolConfig:
    """A function that answers the model's turns, if any; see reasoning/episodes.py."""

    _target_: str | None = None  # dotted path of (text, problem) -> str | None; None: a completion is one turn
    max_turns: int = 4  # of the model; an episode ends when the tool returns None, or with its last turn
    concurrency: int = 1  # number of simultaneous calls in a worker, in threads
    timeout_s: float = 30.0  # a call without an answer or progress report for this long ends the run
    waits: bool = False  # it mostly waits, so its stage may run without a core (cluster.waiting_devices)

    def __post_init__(self) -> None:
        require_numbers(self, "tool", "max_turns", "concurrency", low=1)
        require_numbers(self, "tool", "timeout_s", low=0, above=True)

    @property
    def num_turns(self) -> int:
        """Turns of an episode, at most."""
        return 1 if self._target_ is None else self.max_turns


@dataclass(kw_only=True, slots=True)
class AgentConfig:
    """A program that queries the model through an OpenAI client, if any; see reasoning/agents.py."""

    _target_: str | None = None  # dotted path of (problem, base_url) -> what the reward judges, or the reward
    max_requests: int = 16  # per episode; further ones are refused
    timeout_s: float = 600.0  # limit of an agent's work between requests; beyond it the episode earns nothing
    waits: bool = False  # agents mostly wait, so their stage may run without a core (cluster.waiting_devices)

    def __post_init__(self) -> None:
        require_numbers(self, "agent", "max_requests", low=1)
        require_numbers(self, "agent", "timeout_s", low=0, above=True)


@dataclass(kw_only=True, slots=True)
class EpisodesConfig:
    """In which order episodes are run; see reasoning/episode_runner.py."""

    free: bool = False  # an episode continues once its tool has answered; false: once its whole block has ended a turn
    carried: float = 0.0  # partial rollouts: additional prompts in flight, as a fraction of those of an iteration
    max_behind: int = 4  # updates for which an episode may be unfinished
    drop_late: bool = False  # restart it then; false: the iteration waits for it

    def __post_init__(self) -> None:
        require_numbers(self, "episodes", "carried", high=1)
        require_numbers(self, "episodes", "max_behind", low=1)
        rule = "an episode that is carried over does not end its turn with the others"
        require(self.free or not self.carried, "episodes.carried", self.carried, rule, "use episodes.free=true")

    def check(self, config: MathConfig) -> None:
        """Checks the section against the others of a training by RL."""
        if not self.free:
            return
        exact, rule = config.run.exact, "the time of a tool's response decides which rows are decoded together"
        require(not exact.holds, "episodes.free", True, rule, "set run.exact=false, or episodes.free=false")
        rule, action = "tools run in threads of the worker that generates", "leave it out: it decodes while they wait"
        for name, section in (("tool", config.tool), ("agent", config.agent)):
            require(not section.waits, f"{name}.waits", True, rule, action)
        if self.carried:
            rule = "an iteration's problems are begun before those before it are scored"
            for name in ("solved_share", "unsolved_share"):
                share, action = getattr(config.data, name), "use episodes.carried=0, or leave it out"
                require(share == 1, f"data.{name}", share, rule, action)
            agent, rule = config.agent._target_, "agents are not carried over to the next iteration"
            require(agent is None, "agent._target_", agent, rule, "use episodes.carried=0")
            algorithm = config.rl
            rule, action = "it corrects for tokens sampled by older weights", "use 2.0, or episodes.carried=0"
            require(algorithm.tis_cap is not None, "algorithm.tis_cap", None, rule, action)
            rule, action = "it chooses the problems of an iteration by itself", "use episodes.carried=0"
            resamples = algorithm.dynamic_sampling
            require(not resamples, "algorithm.dynamic_sampling", resamples, rule, action)


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """The reward of a completion: 1 for a right answer, the value of a custom function, or a reward model's score."""

    _target_: str | None = None  # dotted path of (completion, problem) -> float, where 1 or more counts as right
    model: str | None = None  # folder of a frozen reward model: its score, instead of 1 for a right answer
    model_target: str = "policies.reward_lm.RewardLM"  # class that reads this folder
    weights: dict[str, float] = field(default_factory=dict)  # for a function that returns a dict of rewards by name
    batch_size: int = 0  # the function takes and returns lists of at most this length; 0: one completion
    concurrency: int = 1  # simultaneous calls of the function, in threads, or awaited if it is async
    waits: bool = False  # it mostly waits, so its stage may run without a core (cluster.waiting_devices)
    timeout_s: float = 2.0  # limit of math-verify, in processor seconds per answer
    format_reward: float = 0.0  # for the right format, with a right or a wrong answer
    overlong_tokens: int = 0  # the penalty grows over this number of tokens below max_new_tokens; 0: no penalty
    overlong_penalty: float = 1.0  # penalty of a completion of max_new_tokens

    def __post_init__(self) -> None:
        require_numbers(self, "reward", "concurrency", low=1)
        for name, plain in {"concurrency": 1, "waits": False, "weights": {}, "batch_size": 0}.items():
            value, rule = getattr(self, name), "it belongs to a custom function"
            fits = self._target_ is not None or value == plain
            require(fits, f"reward.{name}", value, rule, f"give reward._target_, or use {plain}")
        rule = "a completion has one reward, from a function or from a model"
        require(None in (self._target_, self.model), "reward.model", self.model, rule, "leave out reward._target_")
        require_numbers(self, "reward", "timeout_s", low=0, above=True)
        require_numbers(self, "reward", "overlong_tokens", "batch_size", low=0)


class ReasoningName(StrEnum):
    """The baseline that advantages are computed with."""

    grpo = "grpo"  # within the group, (R - mean) / std
    rloo = "rloo"  # R minus the mean reward of the group's other completions
    ppo = "ppo"  # a critic's values, token by token


class LossLevel(StrEnum):
    """The unit over which the policy's loss is averaged."""

    token = "token"  # every token of the minibatch (DAPO, arXiv 2503.14476)
    sequence = "sequence"  # every completion, by the mean over its tokens (GRPO, arXiv 2402.03300)
    constant = "constant"  # the sum over tokens, over a fixed length (Dr. GRPO, arXiv 2503.20783)


@dataclass(kw_only=True, slots=True)
class LanguageAlgorithmConfig:
    """Settings that every algorithm has: the optimizer, and how the learner computes."""

    section: ClassVar[str] = "algorithm"  # name of this section

    _target_: str = ""  # dotted path of a subclass of this dataclass; "": reinforcement learning
    lr: float = 1e-4  # for the small model; a folder 1e-6, its adapters 1e-5 (configs/train_llm_math.yaml)
    beta2: float = 0.99  # of Adam
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # of policy and critic
    tokens_per_microbatch: int = 1024  # padding included; fits a core's cache for a small model, more for GPUs
    reduction: Reduction = Reduction.auto
    sharding: Sharding = Sharding.none  # of the policy; a critic is never sharded
    precision: Precision = Precision.float32  # of passes of actor, old log-probs, reference, reward model

    def __post_init__(self) -> None:
        path = self.section
        require_numbers(self, path, "tokens_per_microbatch", low=1)
        require(0 <= self.beta2 < 1, f"{path}.beta2", self.beta2, "it must lie in [0, 1)", "use 0.99")
        require_numbers(self, path, "lr", low=0, above=True)
        require_numbers(self, path, "weight_decay", low=0)
        require_numbers(self, path, "max_grad_norm", above=True, high=math.inf)  # infinite: no clipping

    def check(self, config: MathConfig) -> None:
        """Checks the algorithm against the other sections of a training."""


@dataclass(kw_only=True, slots=True)
class ReasoningAlgorithmConfig(LanguageAlgorithmConfig):
    """GRPO and its variants (Dr. GRPO, DAPO, RLOO), and PPO with a separate critic.

    configs/reasoning/algorithm/<name>.yaml has all settings of a named algorithm.
    """

    name: ReasoningName = ReasoningName.grpo
    prompts_per_iteration: int = 32
    group_size: int = 8  # completions of a prompt
    scale_by_std: bool = True  # GRPO: divide by the group's standard deviation; false: Dr. GRPO
    loss_level: LossLevel = LossLevel.token
    loss: PolicyLoss = field(default_factory=PolicyLoss)  # Clipped of algorithms/policy_losses.py by default
    drop_zero_variance_groups: bool = True  # groups that are all right or all wrong are dropped from the batch (DAPO)
    dynamic_sampling: bool = False  # and replaced by groups of further problems
    max_resamples: int = 3  # largest number of rounds of dynamic sampling
    mask_truncated: bool = False  # completions that were cut off are excluded from the loss
    clip_low: float = 0.2  # infinite: no clipping
    clip_high: float = 0.28
    dual_clip: float | None = None  # largest effective ratio at a negative advantage; None: no limit
    epochs: int = 1
    num_minibatches: int = 1  # a minibatch is one slice of every block
    lr_end_fraction: float = 1.0  # lr falls linearly to this fraction at the last iteration
    lr_warmup_iterations: int = 0  # lr rises over this number of first iterations of the policy
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # towards the starting policy
    tis_cap: float | None = 2.0  # truncated importance sampling: largest pi_training / pi_rollout; None: off
    tis_floor: float = 0.0  # smallest pi_training / pi_rollout
    tis_level: RatioLevel = RatioLevel.token  # of that ratio
    tis_masks: bool = False  # ratios outside of [tis_floor, tis_cap] weigh 0 instead of the nearest bound
    # PPO
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_lr: float = 3e-4  # for the small model; a folder 1e-5
    value_epochs: int = 1
    critic_warmup_iterations: int = 5  # iterations that train the critic only

    def __post_init__(self) -> None:
        LanguageAlgorithmConfig.__post_init__(self)
        at_least_one = ("prompts_per_iteration", "epochs", "num_minibatches", "value_epochs")
        require_numbers(self, "algorithm", *at_least_one, low=1)
        require_numbers(self, "algorithm", "gamma", "gae_lambda", "lr_end_fraction", high=1)
        require_numbers(self, "algorithm", "value_lr", "tis_cap", low=0, above=True)
        require_numbers(self, "algorithm", "tis_floor")
        require_numbers(self, "algorithm", "clip_low", "clip_high", above=True, high=math.inf)
        require_dual_clip(self.dual_clip, self.loss)
        counts = ("max_resamples", "critic_warmup_iterations", "lr_warmup_iterations")
        require_numbers(self, "algorithm", "kl_coef", *counts, low=0)
        compares = self.name is not ReasoningName.ppo
        rule = f"{self.name.value} compares the completions of a prompt, so a group needs at least two"
        enough = self.group_size >= (2 if compares else 1)
        require(enough, "algorithm.group_size", self.group_size, rule, "use 8, or algorithm=ppo")
        level, rule = self.loss_level, f"{type(self.loss).__name__} has one loss per completion, not per token"
        fits = level is LossLevel.sequence or self.loss.level is not RatioLevel.sequence
        require(fits, "algorithm.loss_level", str(level), rule, "use sequence")
        rule = f"{type(self.loss).__name__} has one advantage per completion, and PPO's critic gives one per token"
        fits = compares or self.loss.level is RatioLevel.token
        require(fits, "algorithm.loss", type(self.loss).__name__, rule, "use algorithm.loss=clipped")
        self._check_importance()
        dynamic, rule = self.dynamic_sampling, "PPO has no groups whose rewards could be compared"
        action = "set it to false, or use algorithm=dapo"
        require(compares or not dynamic, "algorithm.dynamic_sampling", dynamic, rule, action)
        drops, rule = self.drop_zero_variance_groups, "dynamic sampling replaces what was dropped"
        require(drops or not dynamic, "algorithm.drop_zero_variance_groups", drops, rule, "set it to true")

    def _check_importance(self) -> None:
        cap, rule = self.tis_cap, "without algorithm.tis_cap losses have no weights that it could bound"
        for name in ("tis_floor", "tis_masks"):
            value = getattr(self, name)
            require(cap is not None or not value, f"algorithm.{name}", value, rule, "use algorithm.tis_cap=2.0")
        rule = f"it lies below algorithm.tis_cap={cap}"
        require(cap is None or self.tis_floor < cap, "algorithm.tis_floor", self.tis_floor, rule, "use 0")
        rule = f"{type(self.loss).__name__} has one loss per completion, so single tokens cannot be masked"
        masks_tokens = self.tis_masks and self.tis_level is RatioLevel.token
        holds = not masks_tokens or self.loss.level is RatioLevel.token
        require(holds, "algorithm.tis_level", str(self.tis_level), rule, "use sequence or geometric")

    @property
    def needs_reference(self) -> bool:
        """Whether completions are also scored by the starting policy."""
        return self.kl_coef > 0 or self.loss.needs_reference

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an iteration."""
        return self.epochs * self.num_minibatches

    def check(self, config: MathConfig) -> None:
        config.episodes.check(config)
        agent, rule = config.agent._target_, "its episodes may have several rows, which a critic does not take"
        require(
            agent is None or self.name is not ReasoningName.ppo, "agent._target_", agent, rule, "use algorithm=grpo"
        )
        group, block, rows = self.group_size, config.rows_per_block, config.num_rows
        rule = f"algorithm.group_size={group} divides it, and it divides the {rows} completions of a round"
        whole = block % group == 0 and rows % block == 0
        require(whole, "generation.rows_per_block", block, rule, f"use {largest(group, block, rows)}")
        rule = "the small model learns to write from generated problems and their steps, which files and sources lack"
        action = "give warm_start.checkpoint=<run.dir>/checkpoints/latest of a run on these, or a pretrained model"
        can_start = not (config.data.files or config.data._target_) or config.warm_start.checkpoint is not None
        require(can_start or config.policy.folder is not None, "policy.folder", None, rule, action)


def largest(unit: int, limit: int, whole: int) -> int:
    """Returns the largest multiple of `unit` up to `limit` that divides `whole`; `unit` otherwise."""
    return max((n for n in range(unit, limit + 1, unit) if whole % n == 0), default=unit)


@dataclass(kw_only=True, slots=True)
class LanguageSFTConfig(LanguageAlgorithmConfig):
    """Supervised fine-tuning on problems with their solutions; an iteration is `steps_per_iteration` steps."""

    num_examples: int = 20000  # generated problems; finite files and sources have no more than their rows
    chain_of_thought_share: float = 0.45  # fraction of examples with steps; the others are direct answers
    tool_share: float = 0.0  # fraction of examples with steps as calls of tool._target_, one per turn
    num_held_out: int = 256  # test problems, whose loss is reported; 0: none
    steps: int = 1200
    steps_per_iteration: int = 50
    batch_size: int = 32
    lr: float = 3e-3  # rises over 20 steps, then falls as a cosine to a tenth
    beta2: float = 0.98
    weight_decay: float = 0.01
    tokens_per_microbatch: int = 4096

    def __post_init__(self) -> None:
        LanguageAlgorithmConfig.__post_init__(self)
        path = self.section
        require_numbers(self, path, "num_examples", "steps", "steps_per_iteration", "batch_size", low=1)
        require_numbers(self, path, "num_held_out")
        require_numbers(self, path, "chain_of_thought_share", high=1)
        require_numbers(self, path, "tool_share", high=1 - self.chain_of_thought_share)
        even, rule = self.batch_size % 2 == 0, "a batch is a slice of each of 2 blocks of examples"
        require(even, f"{path}.batch_size", self.batch_size, rule, "use an even number")
        number, rule = self.num_examples, f"there are fewer than in a batch ({path}.batch_size={self.batch_size})"
        require(number >= self.batch_size, f"{path}.num_examples", number, rule, "use 20000")

    @property
    def num_iterations(self) -> int:
        return -(-self.steps // self.steps_per_iteration)

    def check(self, config: MathConfig) -> None:
        number, steps = config.run.num_iterations, self.num_iterations
        rule = f"an iteration is {self.steps_per_iteration} of algorithm.steps={self.steps} steps, which makes {steps}"
        require(number == steps, "run.num_iterations", number, rule, "leave it out, and set algorithm.steps")


@dataclass(kw_only=True, slots=True)
class LanguageWarmStartConfig(LanguageSFTConfig):
    """What training starts from: a folder, or a small model made by supervised fine-tuning with these settings."""

    section = "warm_start"

    checkpoint: str | None = None  # a policy folder of this project; None: fine-tuned now, or from the cache
    num_held_out: int = 0
    cache_dir: str = "~/.cache/rlinf_embodied"  # RLINF_EMBODIED_CACHE overrides it


GREEDY, SAMPLED = "greedy", "sampled"  # names of the two evaluations of the held-out problems


@dataclass(kw_only=True, slots=True)
class EvalSetConfig:
    """A further set of problems in every evaluation, with its own sampling.

    For example {data: {files: {test: aime.jsonl}}, generation: {temperature: 0.6, top_p: 0.95}, num_samples: 32}.
    """

    data: dict[str, Any] = field(default_factory=dict)  # changes to the section data, whose test problems are used
    generation: dict[str, Any] = field(default_factory=dict)  # changes to the section generation
    greedy: bool = False  # always take the likeliest token
    num_problems: int = 1000
    num_samples: int = 1  # per problem

    def __post_init__(self) -> None:
        require_numbers(self, "eval.sets.<name>", "num_problems", "num_samples", low=1)


@dataclass(kw_only=True, slots=True)
class AnswerEvalConfig:
    """Evaluation on held-out problems."""

    num_problems: int = 1000
    num_samples: int = 8  # per problem, sampled as in training, before and after only; 0: greedy answers only
    every: int = 0  # iterations between (greedy) evaluations during training; 0: before and after only
    sets: dict[str, EvalSetConfig] = field(default_factory=dict)  # further named sets
    problems_per_block: int = 125  # per decoding batch
    num_shown: int = 12  # answers in samples.md

    def __post_init__(self) -> None:
        require_numbers(self, "eval", "num_problems", "problems_per_block", low=1)
        require_numbers(self, "eval", "num_samples", "every", "num_shown", low=0)
        names, reserved = list(self.sets), ("accuracy", "length", "reward", GREEDY, SAMPLED)
        plain = all(name.isidentifier() and name not in reserved for name in names)
        rule = "it names metrics, such as eval/<name>/avg@8"
        require(plain, "eval.sets", names, rule, "use letters and digits, and none of the metrics' names")
