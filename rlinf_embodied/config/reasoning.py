"""The sections `generation`, `reward`, `algorithm`, `warm_start` and `eval` of the reasoning workflow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rlinf_embodied.config.algorithm import Reduction, Sharding
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.config.language import Precision


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    """How completions are sampled, and in which portions."""

    max_new_tokens: int = 52  # of generated problems; with data.prompt_template=natural 512 (train_llm_math.yaml)
    temperature: float = 1.0  # of sampling, and of the log-probs alike
    rows_per_block: int = 64  # completions in a block: the unit of placement, streaming and gradients
    rows_per_batch: int = 128  # most completions in a decoding batch: consecutive blocks, in one worker
    max_num_seqs: int = 128  # of these at a time; the next one starts as soon as one has ended

    def __post_init__(self) -> None:
        require_numbers(self, "generation", "max_new_tokens", "rows_per_block", "rows_per_batch", "max_num_seqs", low=1)
        require_numbers(self, "generation", "temperature", low=0, above=True)  # evaluation is greedy by itself


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """What a completion earns: 1 for a right answer, or the value of a custom function."""

    _target_: str | None = None  # dotted path of (completion, problem) -> float, where 1 and more count as right
    concurrency: int = 1  # calls of this function at once, in threads: for one that waits for an answer of others
    waits: bool = False  # it waits and hardly computes: the stage may run without a core (cluster.waiting_devices)
    timeout_s: float = 2.0  # processor seconds that one answer may take
    format_reward: float = 0.0  # what the right format earns, with a right or a wrong answer
    overlong_tokens: int = 0  # this many last tokens below max_new_tokens cost, more and more; 0: nothing
    overlong_penalty: float = 1.0  # what a completion of max_new_tokens loses then

    def __post_init__(self) -> None:
        plain = self.concurrency == 1 and not self.waits
        rule = "only a custom function is called more than once at a time or waited for"
        valid = plain or (self._target_ is not None and self.concurrency >= 1)
        require(valid, "reward.concurrency", self.concurrency, rule, "give reward._target_, or use 1 and waits=false")
        require_numbers(self, "reward", "timeout_s", low=0, above=True)
        require_numbers(self, "reward", "overlong_tokens", low=0)


class ReasoningName(StrEnum):
    """Where advantages come from."""

    grpo = "grpo"  # within the group, (R - mean) / std
    rloo = "rloo"  # R minus the mean of the others
    ppo = "ppo"  # a critic's, token by token


class LossLevel(StrEnum):
    """What the policy's loss is a mean over."""

    token = "token"  # every token of the minibatch (DAPO, arXiv 2503.14476)
    sequence = "sequence"  # every completion, by the mean over its tokens (GRPO, arXiv 2402.03300)
    constant = "constant"  # the sum over tokens, over a fixed length (Dr. GRPO, arXiv 2503.20783)
    sum = "sum"  # every completion, by the sum over its tokens: its log-prob is one number (RLOO, arXiv 2402.14740)


@dataclass(kw_only=True, slots=True)
class ReasoningAlgorithmConfig:
    """GRPO and what it became (Dr. GRPO, DAPO, RLOO), and PPO with a separate critic.

    What a named algorithm is stands whole in configs/reasoning/algorithm/<name>.yaml.
    """

    name: ReasoningName = ReasoningName.grpo
    prompts_per_iteration: int = 32
    group_size: int = 8  # completions of a prompt
    scale_by_std: bool = True  # GRPO: divide by the group's standard deviation; false: Dr. GRPO
    loss_level: LossLevel = LossLevel.token
    drop_zero_variance_groups: bool = True  # groups that are all right or all wrong leave the batch (DAPO) ...
    dynamic_sampling: bool = False  # ... and others are generated in their place, ...
    max_resamples: int = 3  # ... at most this many rounds of them
    mask_truncated: bool = False  # completions that were cut off leave the loss
    clip_low: float = 0.2
    clip_high: float = 0.28
    epochs: int = 1
    num_minibatches: int = 1  # a minibatch is one slice of every block
    lr: float = 1e-4  # of the small model; of a folder's 1e-6, of its adapters 1e-5 (configs/train_llm_math.yaml)
    lr_end_fraction: float = 1.0  # lr falls linearly to this fraction at the last iteration ...
    lr_warmup_iterations: int = 0  # ... and rises over the policy's first iterations
    beta2: float = 0.99  # of Adam
    max_grad_norm: float = 1.0  # of policy and critic
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # towards the starting policy
    tis_cap: float | None = 2.0  # importance sampling: largest pi_training / pi_rollout of a token; None: not used
    tokens_per_microbatch: int = 1024  # padding included; what a core's cache holds of a small model, more for GPUs
    reduction: Reduction = Reduction.auto
    sharding: Sharding = Sharding.none  # of the actor; a critic is never sharded
    precision: Precision = Precision.float32  # of the actor's passes and what is compared with them, not of generation
    # PPO
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_lr: float = 3e-4  # of the small model; of a folder's 1e-5
    value_epochs: int = 1
    critic_warmup_iterations: int = 5  # iterations that train the critic only

    def __post_init__(self) -> None:
        at_least_one = ("prompts_per_iteration", "epochs", "num_minibatches", "value_epochs", "tokens_per_microbatch")
        require_numbers(self, "algorithm", *at_least_one, low=1)
        require_numbers(self, "algorithm", "gamma", "gae_lambda", "lr_end_fraction", high=1)
        require(0 <= self.beta2 < 1, "algorithm.beta2", self.beta2, "it must lie in [0, 1)", "use 0.99")
        require_numbers(self, "algorithm", "lr", "value_lr", "tis_cap", low=0, above=True)
        bounds = ("clip_low", "clip_high", "max_grad_norm")  # an infinite one is none
        require_numbers(self, "algorithm", *bounds, above=True, high=math.inf)
        counts = ("max_resamples", "critic_warmup_iterations", "lr_warmup_iterations")
        require_numbers(self, "algorithm", "kl_coef", *counts, low=0)
        compares = self.name is not ReasoningName.ppo
        rule = f"{self.name.value} compares the completions of a prompt, so a group needs at least two"
        enough = self.group_size >= (2 if compares else 1)
        require(enough, "algorithm.group_size", self.group_size, rule, "use 8, or algorithm=ppo")
        one_step, rule = self.name is not ReasoningName.rloo or self.num_steps == 1, "RLOO makes one step per iteration"
        require(one_step, "algorithm.epochs", self.epochs, rule, "use epochs=1 num_minibatches=1, or algorithm=grpo")
        dynamic, rule = self.dynamic_sampling, "PPO has no groups whose rewards could be compared"
        action = "set it to false, or use algorithm=dapo"
        require(compares or not dynamic, "algorithm.dynamic_sampling", dynamic, rule, action)
        drops, rule = self.drop_zero_variance_groups, "dynamic sampling replaces what was dropped"
        require(drops or not dynamic, "algorithm.drop_zero_variance_groups", drops, rule, "set it to true")

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an iteration."""
        return self.epochs * self.num_minibatches


@dataclass(kw_only=True, slots=True)
class FineTuningConfig:
    """The warm start of a model from scratch: supervised fine-tuning on generated problems with their solutions."""

    checkpoint: str | None = None  # a policy folder of this project; None: fine-tuned now, or found in the cache
    num_examples: int = 20000
    chain_of_thought_share: float = 0.45  # of the examples, with their steps; the others are direct answers
    steps: int = 1200
    batch_size: int = 32
    lr: float = 3e-3  # rises over 20 steps, then falls as a cosine to a tenth
    cache_dir: str = "~/.cache/rlinf_embodied"  # RLINF_EMBODIED_CACHE overrides it

    def __post_init__(self) -> None:
        require_numbers(self, "warm_start", "num_examples", "steps", "batch_size", low=1)
        require_numbers(self, "warm_start", "lr", low=0, above=True)
        require_numbers(self, "warm_start", "chain_of_thought_share", high=1)
        even = self.batch_size % 2 == 0
        rule = "a batch is a slice of each of 2 blocks of examples"
        require(even, "warm_start.batch_size", self.batch_size, rule, "use an even number")
        number, rule = self.num_examples, f"there are fewer than in a batch (warm_start.batch_size={self.batch_size})"
        require(number >= self.batch_size, "warm_start.num_examples", number, rule, "use 20000")


@dataclass(kw_only=True, slots=True)
class AnswerEvalConfig:
    """Evaluation on held-out problems."""

    num_problems: int = 1000
    num_samples: int = 8  # per problem, at generation.temperature, for pass@k; 0: greedy answers only
    every: int = 0  # iterations between (greedy) evaluations during training; 0: before and after only
    problems_per_block: int = 125  # of a decoding batch
    num_shown: int = 12  # answers in the table of samples

    def __post_init__(self) -> None:
        require_numbers(self, "eval", "num_problems", "problems_per_block", low=1)
        require_numbers(self, "eval", "num_samples", "every", "num_shown", low=0)
