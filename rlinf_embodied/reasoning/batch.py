"""What flows through the reasoning workflow: prompts in blocks, how they are completed, and groups of completions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from logits, and when a completion ends (at a token of `spec.eos_ids`, or by its length)."""

    max_new_tokens: int = 52
    temperature: float = 1.0  # 0: the likeliest token, always
    top_p: float = 1.0  # mass of the nucleus; 1: everything

    def __post_init__(self) -> None:
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least one token is generated", "use 52"),
            ("temperature", self.temperature >= 0, "it must not be negative", "use 1.0, or 0 for the likeliest token"),
            ("top_p", 0 < self.top_p <= 1, "it lies in (0, 1]", "use 1.0 to keep every token"),
        )
        for name, holds, rule, action in checks:
            if not holds:
                raise ConfigError(f"generation.{name} is {getattr(self, name)!r}, but {rule}: {action}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as Prompt(17, (5, 6, 2)): the id keys its noise and is unique within the run's data."""

    id: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationBlock:
    """A fixed list of prompts, G samples each."""

    prompts: tuple[Prompt, ...]
    group_size: int  # G

    @property
    def num_rows(self) -> int:
        """Number of completions."""
        return len(self.prompts) * self.group_size


@dataclass(frozen=True, slots=True)
class Noise:
    """What keys a block's uniforms besides prompt, sample and position."""

    seed: int
    iteration: int
    purpose: str = "token"  # evaluation draws under another name


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt, R = the longest of them; entries behind a row's length are 0 (tokens: padding).

    log_probs + log_mass is the log-prob under temperature alone, which is what training computes; they differ by
    top-p only.
    """

    prompt: Prompt
    tokens: Tensor  # int64 [G, R]
    lengths: Tensor  # int64 [G], at least 1; the ending token counts
    log_probs: Tensor  # float32 [G, R], of the distribution sampled from; greedy: at temperature 1
    log_mass: Tensor  # float32 [G, R], of the nucleus, at most 0
    ended: Tensor  # bool [G], False where max_new_tokens cut the completion off


# ------------------------------------------------------------------------------------------------- between the stages
@dataclass(frozen=True, slots=True)
class PromptSet:
    """The problems of a block, each with its prompt, and those of the other blocks of its batch."""

    blocks: tuple[tuple[tuple[Problem, Prompt], ...], ...]
    index: int  # of this block among them

    @property
    def own(self) -> tuple[tuple[Problem, Prompt], ...]:
        """The block's problems."""
        return self.blocks[self.index]


@dataclass(frozen=True, slots=True)
class Completions:
    """What was generated for a block: K groups of G completions."""

    problems: tuple[Problem, ...]  # K
    groups: tuple[Group, ...]  # K
    texts: tuple[str, ...]  # K x G, group by group
    version: int  # of the weights


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a block's completions earned; [K, G] each."""

    rewards: Tensor  # float32
    raw: Tensor  # float32, the raw metric: right (1) or wrong (0), or the value of the user's function


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probs of a block's completions under some weights."""

    log_probs: Tensor | None  # float32 [K x G, R]; None: the learner computes them
    version: int


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """What a critic says of a block's completions."""

    advantages: Tensor  # float32 [K x G, R]


# ------------------------------------------------------------------------------------------------------------- reports
@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What the driver learns of generation; `finish_s` as StageSpec.at_once asks for it."""

    tokens: int
    completions: int
    truncated: int
    longest: int
    finish_s: dict[int, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion for people to read, as Sample("3+4=", "7", "3+4=8", 0.0, 0.0)."""

    prompt: str
    answer: str
    completion: str
    reward: float
    correct: float  # 1 or 0


@dataclass(frozen=True, slots=True)
class RewardReport:
    """What the driver learns of rewards, by block."""

    correct: dict[int, tuple[tuple[bool, ...], ...]]  # K tuples of G
    zero_variance: dict[int, tuple[bool, ...]]  # K: whether the group's completions are all alike in the raw metric
    rewards: dict[int, float]  # sums
    formatted: dict[int, int]
    shown: tuple[tuple[tuple[int, int], Sample], ...] = ()  # ((block, row), sample)
