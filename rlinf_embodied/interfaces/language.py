"""The protocol of language models: batches of tokens in; log-probs, logits or values out.

Axes: N prompts, B sequences, L tokens of the longest prompt with its completion, R of the longest completion, V
vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rlinf_embodied.config import LanguagePolicyConfig


@dataclass(frozen=True, slots=True)
class LanguageSpec:
    """Static description of a language model, for example LanguageSpec("qwen2", 0, (1,))."""

    name: str
    pad_id: int
    eos_ids: tuple[int, ...]  # any of them ends a completion


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B sequences, prompt then completion, padded on the right.

    [[5, 6, 7, 1], [8, 9, 1, 0]] with prompt_lengths [2, 1], lengths [4, 3]: completions [7, 1] and [9, 1], both R = 2.
    """

    tokens: Tensor  # int64 [B, L]
    prompt_lengths: Tensor  # int64 [B], at least 1
    lengths: Tensor  # int64 [B], prompt and completion
    given: Tensor | None = None  # bool [B, R], True for tokens that were inserted, not sampled; None: all sampled
    # the sets of tokens that sampling was restricted to: their sizes (int32 [B, R], 0: not restricted), and their
    # members row by row (int32 [sum of the sizes]); None: no token was restricted
    support: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        given: Sequence[Sequence[bool]] | None = None,
        support_sizes: Sequence[Sequence[int]] = (),
        support_ids: Sequence[array[int]] = (),
    ) -> TokenBatch:
        """Returns prompts with their completions; behind each row are zeros.  `support_ids` are "i" arrays, by row."""
        ids = array("i", b"".join(support_ids))
        whole = [[*prompt, *rest] for prompt, rest in zip(prompts, completions, strict=True)]
        return TokenBatch(
            padded(whole, torch.long),
            torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long),
            torch.tensor([len(row) for row in whole], dtype=torch.long),
            padded(given, torch.bool) if given is not None and any(map(any, given)) else None,
            (padded(support_sizes, torch.int32), torch.frombuffer(ids, dtype=torch.int32)) if ids else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def mask(self) -> Tensor:
        """Bool [B, R], True for sampled tokens of a completion."""
        counts = self.lengths - self.prompt_lengths
        inside = torch.arange(max(counts.tolist(), default=0), device=counts.device) < counts[:, None]
        return inside if self.given is None else inside & ~self.given

    def select(self, rows: Sequence[int]) -> TokenBatch:
        """Returns these sequences, in this order, without columns that are padding in all of them."""
        index = torch.tensor(rows, dtype=torch.long, device=self.tokens.device)
        lengths, prompt_lengths = self.lengths[index], self.prompt_lengths[index]
        longest = max(lengths.tolist(), default=0)
        most = max((lengths - prompt_lengths).tolist(), default=0)
        given, support = None if self.given is None else self.given[index, :most], self.support
        if support is not None:
            sizes, ids = support
            of_rows = ids.split(sizes.sum(1).tolist())
            support = sizes[index, :most], torch.cat([ids[:0], *(of_rows[row] for row in rows)])
        return TokenBatch(self.tokens[index, :longest], prompt_lengths, lengths, given, support)

    def completions(self) -> list[list[int]]:
        """Returns the tokens behind each prompt."""
        rows = zip(self.tokens.tolist(), self.prompt_lengths.tolist(), self.lengths.tolist(), strict=True)
        return [row[start:end] for row, start, end in rows]

    def to(self, device: str) -> TokenBatch:
        given = None if self.given is None else self.given.to(device)
        support = None if self.support is None else (self.support[0].to(device), self.support[1].to(device))
        tokens, prompt_lengths, lengths = (part.to(device) for part in (self.tokens, self.prompt_lengths, self.lengths))
        return TokenBatch(tokens, prompt_lengths, lengths, given, support)


def padded(rows: Sequence[Sequence[int | float]], dtype: torch.dtype) -> Tensor:
    """Returns rows as a table, with zeros on the right."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)


@runtime_checkable
class Decoder(Protocol):
    """The memory (KV cache) of up to S rows that decode together; it keeps slots 0..n-1, n = tokens of the last step.

    The weights must not change while it is used.  A row joins with a prompt and receives one token per step.  It is
    dropped when another row joins or moves into its slot, or when the caller steps with fewer tokens.
    """

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Prefills N prompts, which have no slots yet; returns the logits of their first completion tokens [N, V]."""
        ...

    def join(self, prompts: Tensor, slots: Tensor) -> None:
        """Puts copies of the prompts that were prefilled last (int64 [k], their numbers) into slots (int64 [k])."""
        ...

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Moves rows (int64 [k] slots, disjoint from `targets`) into other slots."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token to each of slots 0..n-1 (int64 [n]) and returns the next one's logits [n, V]."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probs and entropy of the completions of a batch; 0 where a row has no token."""

    log_probs: Tensor  # float32 [B, R]
    entropy: Tensor | None  # float32 [B, R] nats; None if not requested


ChatMessage = dict[str, str]  # role: system, user, assistant or tool; content


@runtime_checkable
class PromptCodec(Protocol):
    """Turns prompts into tokens, without the model's weights."""

    context_length: int | None  # tokens of prompt and completion together; None: no limit

    def chat(self, text: str, history: Sequence[tuple[str, str]] = ()) -> list[ChatMessage]:
        """Returns the messages of a prompt, after the earlier ones of `history` (role, text)."""
        ...

    def encode_chat(self, chat: Sequence[ChatMessage]) -> list[int]:
        """Returns the tokens of messages, up to the model's reply, in the model's chat template where it has one."""
        ...

    def encode_answer(self, text: str) -> list[int]:
        """Returns the tokens of an answer without an end token."""
        ...

    def encode_next_turn(self, tokens: Sequence[int], chat: Sequence[ChatMessage]) -> list[int] | None:
        """Returns the tokens that follow `tokens` in a longer chat; None if the chat does not begin with them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones left out."""
        ...


@runtime_checkable
class LanguagePolicy(Protocol):
    """A causal language model with its tokenizer.

    It draws no random numbers, and its forward pass is the same in training and in generation (no dropout).  Both
    exclude the padding token from predictions.
    """

    spec: LanguageSpec
    module: nn.Module

    @property
    def codec(self) -> PromptCodec:
        """Its tokenizer."""
        ...

    @property
    def packs(self) -> bool:
        """Whether `log_probs` computes no padding, so that a batch costs the sum of its lengths."""
        ...

    def log_probs(
        self, batch: TokenBatch, temperature: float, with_entropy: bool = True, entropy_gradient: bool = True
    ) -> TokenLogProbs:
        """Returns differentiable log-probs, and entropy, of the completions' tokens at a temperature.

        Both are those of the distribution restricted to `batch.support`, if any.  Without `entropy_gradient` the
        entropy is only reported, and needs no memory for a backward pass.
        """
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Returns a context in which the adapters are switched off."""
        ...

    def update_flops(self, lengths: Sequence[int], predicted: int) -> float:
        """Returns the FLOPs of forward and backward passes over sequences with `predicted` completion tokens in all."""
        ...

    def decoder(self, max_num_seqs: int, width: int) -> Decoder:
        """Returns a decoder for S rows of at most `width` tokens each, with the current weights."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """Returns what RL trains, in a fixed order."""
        ...

    def save(self, folder: Path, base: str = "") -> None:
        """Writes a folder that transformers' from_pretrained loads to the same logits (adapters merged).

        Its folder `adapter` has the adapters, too.  Within `without_adapters` the weights are those of the base model.
        """
        ...

    def save_adapters(self, folder: Path, base: str = "") -> None:
        """Writes the adapters, if there are any, in peft's layout; `base` is the folder of their base model."""
        ...

    @classmethod
    def from_config(cls, config: LanguagePolicyConfig, folder: Path | None, seed: int) -> LanguagePolicy:
        """Returns the policy of a folder, or a new one; adapters and new weights are drawn from the seed.

        Raises:
            CheckpointError: the folder is incomplete or damaged.
            ConfigError: settings that do not fit the model.
        """
        ...

    @classmethod
    def codec_from_config(cls, config: LanguagePolicyConfig, folder: Path | None) -> PromptCodec:
        """Returns the codec of the policy with these arguments, without its weights."""
        ...


@runtime_checkable
class ValueModel(Protocol):
    """A critic for completions."""

    module: nn.Module  # all of its parameters are trained

    def values(self, batch: TokenBatch) -> Tensor:
        """Returns V before each token of the completions, float32 [B, R], differentiable; 0 where a row has none."""
        ...

    @classmethod
    def from_policy(cls, policy: LanguagePolicy) -> ValueModel:
        """Returns a new critic initialised with a policy's weights, sharing none."""
        ...


class RewardModel(Protocol):
    """A frozen model that scores a prompt with its completion."""

    module: nn.Module
    pad_id: int | None  # of rows shorter than the batch; None: it takes one row at a time

    def scores(self, batch: TokenBatch) -> Tensor:
        """Returns the score of each sequence, float32 [B]."""
        ...

    @classmethod
    def check(cls, folder: Path, codec: PromptCodec, longest: int) -> None:
        """Checks, without the weights, that a folder's model can read a policy's rows of up to `longest` tokens.

        Raises:
            ConfigError: it cannot.
        """
        ...

    @classmethod
    def load(cls, folder: Path) -> RewardModel:
        """Returns the model of a folder.

        Raises:
            ConfigError: the weights cannot be read, or have no head for the score.
        """
        ...
