"""The sections `data` and `policy` of the reasoning workflow: which problems, and which language model answers them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlinf_embodied.config.checks import require, require_numbers


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Problems with verifiable answers, and the prompts that they become."""

    level: str = "sum4-6-9"  # of generated problems, several joined by commas; see docs/problems_and_rewards.md
    files: dict[str, str] = field(default_factory=dict)  # {train: a, test: b}, or {all: a}: split by a hash
    question_column: str = "question"  # a text or a chat; also a dotted path into mappings
    answer_column: str = "answer"
    columns: list[str] = field(default_factory=list)  # further columns of files, kept as Problem.columns for a reward
    where: dict[str, Any] = field(default_factory=dict)  # rows to keep: {column: value, [values] or {min: a, max: b}}
    solved_share: float = 1.0  # fraction drawn again of the problems that all completions solved the last time
    unsolved_share: float = 1.0  # fraction drawn again of the problems that no completion solved the last time
    max_prompt_tokens: int | None = None  # longer prompts are omitted; None: the model's context is the limit
    _target_: str | None = None  # custom problems, instead of level and files: (data, seed) -> ProblemSource
    prompt_template: str = "compact"  # compact: characters as tokens; natural: sentences; or the path of a .jinja file
    final_answer: list[str] = field(default_factory=list)  # rules that locate it in a completion; []: the template's
    seed: int = 77  # of the held-out problems; training problems follow from run.seed

    def __post_init__(self) -> None:
        splits, custom = set(self.files), self._target_ is not None
        rule = "its keys are `all`, or train, test and perhaps validation; evaluation needs test, training both"
        all_splits = {"train", "validation", "test"}
        fits = splits in (set(), {"all"}) or {"test"} <= splits <= all_splits
        require(fits, "data.files", self.files, rule, "use data.files.all=<file>, or add the missing one")
        rule = "problems are of a level (data.level) or come from files"
        has_problems = bool(self.files or self.level) or custom
        action = "use data.files.all=<file>.jsonl, or data.level=sum4-6-9"
        require(has_problems, "data.files", self.files, rule, action)
        fits, rule = not self.columns or bool(self.files) or custom, "generated problems have no columns"
        require(fits, "data.columns", self.columns, rule, "leave it out, or use data.files.all=<file>.jsonl")
        rule, action = "it chooses among the rows of files", "leave it out"
        require(not self.where or bool(self.files), "data.where", self.where, rule, action)
        ranges = [set(condition) for condition in self.where.values() if isinstance(condition, dict)]
        fits, rule = all(keys <= {"min", "max"} for keys in ranges), "a range has min, max or both"
        require(fits, "data.where", self.where, rule, "use {<column>: {min: 1, max: 5}}")
        require_numbers(self, "data", "max_prompt_tokens", low=1)
        require_numbers(self, "data", "solved_share", "unsolved_share", high=1)
        rule, action = "generated problems are not drawn again", "leave it out, or use data.files.all=<file>"
        for name in ("solved_share", "unsolved_share"):
            share = getattr(self, name)
            require(share == 1 or bool(self.files) or custom, f"data.{name}", share, rule, action)
        rule, action = "problems come from files or from a custom source", "leave out one of the two"
        require(not (custom and self.files), "data._target_", self._target_, rule, action)

    @property
    def has_pools(self) -> bool:
        """Whether some problems are drawn less often than others."""
        return self.solved_share < 1 or self.unsolved_share < 1


@dataclass(kw_only=True, slots=True)
class LoraSettings:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W + alpha / rank * B A, and only A and B are trained."""

    rank: int = 16  # 0: none, all weights are trained
    alpha: float = 32.0
    targets: list[str] = field(default_factory=lambda: ["all-linear"])  # module names; all-linear: all but the head

    def __post_init__(self) -> None:
        require_numbers(self, "policy.lora", "rank")
        require_numbers(self, "policy.lora", "alpha", above=True)
        require(bool(self.targets), "policy.lora.targets", self.targets, "it names modules", "use [all-linear]")


class Precision(StrEnum):
    """Of stored weights (policy.precision, policy.options.precision) or of passes (algorithm.precision)."""

    float32 = "float32"
    bfloat16 = "bfloat16"


_RESERVED_ARGUMENTS = ("tokenize", "add_generation_prompt", "continue_final_message")


@dataclass(kw_only=True, slots=True)
class LanguagePolicyConfig:
    """A causal language model: a Hugging Face folder, or a small Qwen2-shaped one from scratch.

    The latter has tied embeddings and one token per character (0.3 M parameters).
    """

    # of the model from scratch
    characters: str = "0123456789+-*/=;#()x,:?"
    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    intermediate_size: int = 240
    context_length: int = 128
    # of any model
    _target_: str = "policies.causal_lm.CausalLM"
    critic_target: str = "policies.value_lm.ValueLM"  # for PPO
    folder: str | None = None  # config.json, safetensors, tokenizer, as save_pretrained writes them; None: from scratch
    precision: Precision = Precision.float32  # of a folder's weights; adapters are always float32
    lora: LoraSettings = field(default_factory=lambda: LoraSettings(rank=0))
    packing: bool | None = None  # concatenate rows, so that passes compute no padding; None: on NVIDIA GPUs only
    checkpoint_activations: bool = False  # recompute them in the backward pass: less memory, a third slower
    system_prompt: str | None = None  # for the chat template; None: none
    chat_template_args: dict[str, bool | int | float | str] = field(default_factory=dict)  # {enable_thinking: false}

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "context_length")
        require_numbers(self, "policy", *sizes, low=1)
        rule = f"it must be a multiple of twice policy.num_heads={self.num_heads} (rotary embeddings pair dimensions)"
        even = self.hidden_size % (2 * self.num_heads) == 0
        require(even, "policy.hidden_size", self.hidden_size, rule, "change one of the two")
        reserved = [name for name in self.chat_template_args if name in _RESERVED_ARGUMENTS]
        rule, action = f"the program sets {', '.join(_RESERVED_ARGUMENTS)}", f"leave out {', '.join(reserved)}"
        require(not reserved, "policy.chat_template_args", self.chat_template_args, rule, action)
        rule = "policy=folder reads a model from disk"
        require(self.folder != "", "policy.folder", self.folder, rule, "use policy.folder=<dir>")
        valid = self.precision is Precision.float32 or self.lora.rank > 0
        rule = "trained weights are stored in float32, since a lower precision loses small updates"
        action = "use float32, or train adapters only: policy.lora.rank=16"
        require(valid, "policy.precision", self.precision.value, rule, action)
