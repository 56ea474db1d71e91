"""The exact engine: batched generation with continuous batching, in the worker itself.

    requests   samples of problem 0 | samples of problem 1 | ...       rows, in the order in which they get a slot
    slots      at most S decoding rows, one token each per step; a row that ends hands its slot to the next waiting
               row; if none waits, the last row moves into the gap, so that a step computes decoding rows only
    poll       makes one step

The first prompt of a problem is prefilled once, and its keys and values are copied to all samples.  A row's uniforms
are keyed by (seed, iteration, prompt id, sample, position), so they depend neither on other rows nor on the worker that
decodes.  The *last bits* of a row's log-probs depend on the number of rows and columns of each step, since matrix
products of other shapes are summed in another order.  For requests that are submitted to an idle engine these numbers
are a function of the requests and of S.  Another S, or requests that join unfinished ones, may change log-probs by some
1e-6, and a token whose uniform falls that close to the border between two tokens.

Log-probs are those of the whole vocabulary at the temperature, as training computes them, also if top_k, top_p or
min_p exclude tokens.  A completion ends with the token that completes a stop string in its text: its tokens are the
sampled ones, never cut and never encoded again.

New weights, and requests that exceed the allocated cache, need a new cache: unfinished rows are prefilled again,
including the tokens that they have sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.log_probs import inverse_cdf, log_softmax, truncated
from rlinf_embodied.interfaces.language import Decoder, LanguagePolicy
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import GenerationBlock, Prompt
from rlinf_embodied.reasoning.engine import Generated
from rlinf_embodied.telemetry.progress import report_progress


@dataclass(slots=True)
class _Rows:
    """All N rows of the engine; T is max_new_tokens."""

    numbers: list[int]  # as `submit` returned them
    prompts: list[Prompt]
    uniforms: Tensor  # float32 [N, T]
    room: Tensor  # int64 [N], largest length
    tokens: Tensor  # int64 [N, T], sampled so far
    log_probs: Tensor  # float32 [N, T]
    versions: Tensor  # int64 [N, T]
    lengths: Tensor  # int64 [N]
    ended: Tensor  # bool [N], by the model

    @staticmethod
    def of(requests: GenerationBlock, first_number: int, pad_id: int, device: torch.device) -> _Rows:
        """Returns the rows of requests before their first token."""
        size, length = len(requests.prompts), requests.sampling.max_new_tokens
        return _Rows(
            numbers=[*range(first_number, first_number + size)],
            prompts=[*requests.prompts],
            uniforms=_uniforms(requests).to(device),
            room=torch.tensor([length if p.room is None else p.room for p in requests.prompts], device=device),
            tokens=torch.full((size, length), pad_id, device=device),
            log_probs=torch.zeros(size, length, device=device),
            versions=torch.zeros(size, length, dtype=torch.long, device=device),
            lengths=torch.zeros(size, dtype=torch.long, device=device),
            ended=torch.zeros(size, dtype=torch.bool, device=device),
        )

    def extended(self, kept: list[int], new: _Rows) -> _Rows:
        """Returns the rows `kept` of these, followed by new ones."""

        def joined(old: Any, added: Any) -> Any:
            return torch.cat([old[kept], added]) if isinstance(old, Tensor) else [*(old[row] for row in kept), *added]

        return _Rows(*(joined(getattr(self, field.name), getattr(new, field.name)) for field in fields(self)))

    def sequence(self, row: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Returns a key and all tokens so far; samples of one problem have the same key in their first turn."""
        prompt, sampled = self.prompts[row], self.tokens[row, : int(self.lengths[row])].tolist()
        return (prompt.id, prompt.sample if prompt.place else 0), (*prompt.tokens, *sampled)


class ExactEngine:
    """Decodes in this process; Engine in engine.py is the protocol.

    The policy's weights must not change while rows are unfinished, except by `load`.
    """

    def __init__(self, policy: LanguagePolicy, version: int = 0) -> None:
        self.version = version
        self._policy = policy
        self._paused, self._next_number = False, 0
        self._clear()

    def _clear(self) -> None:
        self._device = next(self._policy.module.parameters()).device
        self._waiting: deque[int] = deque()  # rows to prefill
        self._drop_cache()

    def _drop_cache(self) -> None:
        self._decoder: Decoder | None = None
        self._prefilled: deque[tuple[int, int]] = deque()  # (number of the decoder's prompt, row), without a slot yet
        self._row_of = torch.zeros(0, dtype=torch.long, device=self._device)  # [n], row in each slot
        self._last = torch.zeros(0, dtype=torch.long, device=self._device)  # [n], last token in each slot

    # ------------------------------------------------------------------------------------------------------- requests
    def submit(self, requests: GenerationBlock) -> list[int]:
        """Adds rows; unfinished ones must have the same sampling."""
        # tables are created outside of inference mode, so that training may use them
        new = _Rows.of(requests, self._next_number, self._policy.spec.pad_id, self._device)
        self._next_number += len(new.numbers)
        kept = self._unfinished()
        if kept:
            assert (requests.sampling, requests.greedy) == (self._requests.sampling, self._requests.greedy)
            self._rows = self._rows.extended(kept, new)
            index = {row: place for place, row in enumerate(kept)}
            self._waiting = deque(index[row] for row in self._waiting)
            self._prefilled = deque((prompt, index[row]) for prompt, row in self._prefilled)
            self._row_of = torch.tensor(
                [index[r] for r in self._row_of.tolist()], dtype=torch.long, device=self._device
            )
        else:
            self._clear()
            self._rows, self._requests = new, requests
        self._waiting += range(len(kept), len(kept) + len(new.numbers))
        self._reserve(requests.sampling.max_num_seqs)
        return new.numbers

    def _reserve(self, max_num_seqs: int) -> None:
        """Sets the size of the cache; one that is too small is dropped."""
        rooms = self._rows.room.tolist()
        slots = min(max_num_seqs, len(rooms))
        width = max(len(prompt.tokens) + room for prompt, room in zip(self._rows.prompts, rooms, strict=True))
        if self._decoder is not None and (slots > self._slots or width > self._width):
            self._prefill_again()
        if self._decoder is None:
            self._slots, self._width = slots, width

    def _unfinished(self) -> list[int]:
        """Returns the rows that have not ended, in ascending order."""
        return sorted([*self._row_of.tolist(), *(row for _, row in self._prefilled), *self._waiting])

    def abort(self, rows: Collection[int]) -> list[Generated]:
        aborted = {row for row in self._unfinished() if self._rows.numbers[row] in rows}
        self._waiting = deque(row for row in self._waiting if row not in aborted)
        self._prefilled = deque((prompt, row) for prompt, row in self._prefilled if row not in aborted)
        gaps = [slot for slot, row in enumerate(self._row_of.tolist()) if row in aborted]
        with torch.inference_mode():
            self._compact(torch.tensor(gaps, dtype=torch.long, device=self._device))
        self._free_if_idle()
        return [self._generated(row) for row in sorted(aborted)]

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def load(self, version: int, policy: LanguagePolicy) -> None:
        self._policy, self.version = policy, version
        self._prefill_again()

    def stats(self) -> tuple[int, int]:
        return len(self._row_of), len(self._prefilled) + len(self._waiting)

    def close(self) -> None:
        self._clear()

    def _generated(self, row: int) -> Generated:
        table, length = self._rows, int(self._rows.lengths[row])
        tokens, log_probs, versions = (t[row, :length].clone() for t in (table.tokens, table.log_probs, table.versions))
        return Generated(table.numbers[row], tokens, log_probs, bool(table.ended[row]), versions)

    # -------------------------------------------------------------------------------------------------------- one step
    def poll(self) -> list[Generated]:
        """Adds a token to every decoding row, and gives free slots to waiting rows."""
        decoding = len(self._row_of)
        finished: list[int] = []
        if self._paused or self._is_idle:
            return []
        if decoding < self._slots and (self._prefilled or self._waiting):
            finished = self._admit(torch.arange(decoding, self._slots, device=self._device))
        if decoding:
            finished += self._step()
        report_progress()
        self._free_if_idle()
        return [self._generated(row) for row in finished]

    @property
    def _is_idle(self) -> bool:
        return not (len(self._row_of) or self._prefilled or self._waiting)

    def _free_if_idle(self) -> None:
        if self._is_idle:
            self._drop_cache()

    @torch.inference_mode()
    def _step(self) -> list[int]:
        """Adds a token to every decoding row; returns the rows that ended."""
        assert self._decoder is not None
        self._last, over = self._sample(self._decoder.step(self._last), self._row_of)
        gaps = over.nonzero()[:, 0]
        if len(gaps) == 0:
            return []
        finished = self._row_of[gaps].tolist()
        return finished + self._admit(gaps)

    def _sample(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Samples and records the next token of each row; returns the tokens, and whether each was the row's last."""
        table, greedy, sampling = self._rows, self._requests.greedy, self._requests.sampling
        position = table.lengths[rows]
        log_probs = log_softmax(logits, 1.0 if greedy else sampling.temperature)
        if greedy:
            tokens = log_probs.argmax(-1)
        else:
            allowed = truncated(log_probs, sampling.top_k, sampling.top_p, sampling.min_p)
            tokens = inverse_cdf(allowed, table.uniforms[rows, position])
        table.tokens[rows, position] = tokens
        table.log_probs[rows, position] = log_probs.gather(-1, tokens[:, None])[:, 0]
        table.versions[rows, position] = self.version
        table.lengths[rows] = position + 1
        ended = torch.isin(tokens, self._eos) if len(self._eos) > 1 else tokens == self._eos
        if sampling.stop:
            ended = ended | self._completes_stop(rows, sampling.stop)
        table.ended[rows] = ended
        return tokens, ended | (position + 1 == table.room[rows])

    def _completes_stop(self, rows: Tensor, stop: list[str]) -> Tensor:
        """Returns whether the last token of each row completes a stop string, bool [n]."""
        # a window that begins within a character decodes differently there: up to four bytes
        num_bytes = max(len(text.encode()) for text in stop) + 4
        tokens, lengths = self._rows.tokens, self._rows.lengths[rows].tolist()
        endings = [self._ending(tokens[row, :n], num_bytes) for row, n in zip(rows, lengths, strict=True)]
        return torch.tensor([any(text in ending for text in stop) for ending in endings], device=rows.device)

    def _ending(self, tokens: Tensor, num_bytes: int) -> str:
        """Returns at least the last `num_bytes` of a text, if it has as many.  Special tokens have no bytes."""
        window = num_bytes
        while True:
            text = self._policy.codec.decode(tokens[-window:].tolist())
            if window >= len(tokens) or len(text.encode()) >= num_bytes:
                return text
            window *= 2

    # ----------------------------------------------------------------------------------------------------------- slots
    @torch.inference_mode()
    def _admit(self, gaps: Tensor) -> list[int]:
        """Fills gaps with waiting rows, then with the last rows; returns rows that ended at their first token."""
        finished: list[int] = []
        while len(gaps) > 0 and (self._prefilled or self._waiting):
            if not self._prefilled:
                self._prefill()
            assert self._decoder is not None
            admitted = [self._prefilled.popleft() for _ in range(min(len(gaps), len(self._prefilled)))]
            prompts, rows = (torch.tensor(part, device=gaps.device) for part in zip(*admitted, strict=True))
            tokens, over = self._sample(self._logits[prompts], rows)
            finished += rows[over].tolist()
            unfinished = (~over).nonzero()[:, 0]
            slots, gaps = gaps[: len(unfinished)], gaps[len(unfinished) :]
            if len(unfinished) > 0:
                self._decoder.join(prompts[unfinished], slots)
                missing = max(0, int(slots.max()) + 1 - len(self._row_of))
                self._row_of, self._last = (torch.cat([t, t.new_zeros(missing)]) for t in (self._row_of, self._last))
                self._row_of[slots], self._last[slots] = rows[unfinished], tokens[unfinished]
        self._compact(gaps)
        return finished

    def _prefill(self) -> None:
        """Prefills the prompts of about S rows."""
        if self._decoder is None:
            self._decoder = self._policy.decoder(self._slots, self._width)
            self._eos = torch.tensor(self._policy.spec.eos_ids, device=self._device)
        numbers = dict[tuple[tuple[int, int], tuple[int, ...]], int]()  # of the prompts
        while self._waiting:
            sequence = self._rows.sequence(self._waiting[0])
            if len(self._prefilled) >= self._slots and sequence not in numbers:
                break
            self._prefilled.append((numbers.setdefault(sequence, len(numbers)), self._waiting.popleft()))
        self._logits = self._decoder.prefill([tokens for _, tokens in numbers])

    def _prefill_again(self) -> None:
        """Drops the cache, and queues its rows in front of the waiting ones, those that decode first."""
        rows = [*self._row_of.tolist(), *(row for _, row in self._prefilled)]
        self._waiting = deque([*rows, *self._waiting])
        self._drop_cache()

    def _compact(self, gaps: Tensor) -> None:
        """Moves the last decoding rows into gaps, so that these rows have the slots 0..n-1."""
        gaps = gaps[gaps < len(self._row_of)]
        remaining = len(self._row_of) - len(gaps)
        occupied = torch.ones_like(self._row_of, dtype=torch.bool)
        occupied[gaps] = False
        sources = occupied[remaining:].nonzero()[:, 0] + remaining
        targets = gaps[gaps < remaining]
        if len(sources) > 0:
            assert self._decoder is not None
            self._decoder.move(sources, targets)
            self._row_of[targets], self._last[targets] = self._row_of[sources], self._last[sources]
        self._row_of, self._last = self._row_of[:remaining], self._last[:remaining]


def _uniforms(requests: GenerationBlock) -> Tensor:
    """Returns the uniforms of each row's tokens, float32 [N, max_new_tokens]."""
    column = lambda name: np.array([getattr(prompt, name) for prompt in requests.prompts])[:, None]  # noqa: E731
    positions = column("place") + np.arange(requests.sampling.max_new_tokens)
    key = requests.iteration, column("id"), column("sample"), positions
    return torch.from_numpy(uniform(requests.seed, requests.purpose, *key))
