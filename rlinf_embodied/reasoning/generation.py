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

Log-probs are those of the distribution sampled from: at the temperature, over the tokens that top_k, top_p and min_p
leave.  Rows record these sets, and training renormalises the current policy over them.  A completion ends with the
token that completes a stop string in its text: its tokens are the sampled ones, never cut and never encoded again.

New weights, and requests that exceed the allocated cache, need a new cache: unfinished rows are prefilled again,
including the tokens that they have sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.log_probs import inverse_cdf, log_softmax, truncated
from rlinf_embodied.interfaces.language import Decoder, LanguagePolicy
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import GenerationBlock, Prompt
from rlinf_embodied.reasoning.engine import Generated
from rlinf_embodied.telemetry.progress import report_progress


@dataclass(slots=True, eq=False)
class _Row:
    """A prompt, and what has been sampled so far."""

    prompt: Prompt
    room: int  # largest number of tokens
    uniforms: np.ndarray  # float32, one for each token
    generated: Generated

    def sequence(self) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Returns a key and all tokens so far; samples of one problem have the same key in their first turn."""
        prompt = self.prompt
        return (prompt.id, prompt.sample if prompt.place else 0), (*prompt.tokens, *self.generated.tokens)


class ExactEngine:
    """Decodes in this process; Engine in engine.py is the protocol.

    The policy's weights must not change while rows are unfinished, except by `load`.
    """

    def __init__(self, policy: LanguagePolicy, version: int = 0) -> None:
        self.version = version
        self._policy = policy
        self._paused, self._next_number = False, 0
        self._waiting: deque[_Row] = deque()  # to be prefilled
        self._drop_cache()

    def _drop_cache(self) -> None:
        self._decoder: Decoder | None = None
        self._prefilled: deque[tuple[int, _Row]] = deque()  # numbers of the decoder's prompts, and rows without a slot
        self._decoding: list[_Row] = []  # by slot

    # ------------------------------------------------------------------------------------------------------- requests
    def submit(self, requests: GenerationBlock) -> list[int]:
        """Adds rows; unfinished ones must have the same sampling."""
        first, sampling, is_idle = self._next_number, requests.sampling, not any(self.stats())
        assert is_idle or (sampling, requests.greedy) == (self._requests.sampling, self._requests.greedy)
        self._requests = requests
        column = lambda name: np.array([getattr(prompt, name) for prompt in requests.prompts])[:, None]  # noqa: E731
        positions = column("place") + np.arange(sampling.max_new_tokens)
        key = requests.iteration, column("id"), column("sample"), positions
        table = uniform(requests.seed, requests.purpose, *key)  # [N, max_new_tokens]
        for prompt, uniforms in zip(requests.prompts, table, strict=True):
            room = sampling.max_new_tokens if prompt.room is None else prompt.room
            self._waiting.append(_Row(prompt, room, uniforms, Generated(self._next_number)))
            self._next_number += 1
        rows = self._unfinished()
        slots = min(sampling.max_num_seqs, len(rows))
        width = max(len(row.prompt.tokens) + row.room for row in rows)
        if self._decoder is not None and (slots > self._slots or width > self._width):
            self._prefill_again()
        if self._decoder is None:
            self._slots, self._width = slots, width
        return [*range(first, self._next_number)]

    def _unfinished(self) -> list[_Row]:
        return [*self._decoding, *(row for _, row in self._prefilled), *self._waiting]

    def abort(self, rows: Collection[int]) -> list[Generated]:
        aborted = [row for row in self._unfinished() if row.generated.row in rows]
        self._waiting = deque(row for row in self._waiting if row not in aborted)
        self._prefilled = deque((prompt, row) for prompt, row in self._prefilled if row not in aborted)
        with torch.inference_mode():
            self._compact([slot for slot, row in enumerate(self._decoding) if row in aborted])
        self._free_if_idle()
        return [row.generated for row in aborted]

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def load(self, version: int, policy: LanguagePolicy) -> None:
        self._policy, self.version = policy, version
        self._prefill_again()

    def stats(self) -> tuple[int, int]:
        return len(self._decoding), len(self._prefilled) + len(self._waiting)

    def close(self) -> None:
        self._waiting.clear()
        self._drop_cache()

    # -------------------------------------------------------------------------------------------------------- one step
    def poll(self) -> list[Generated]:
        """Adds a token to every decoding row, and gives free slots to waiting rows."""
        decoding, waiting = self.stats()
        finished: list[_Row] = []
        if self._paused or not (decoding or waiting):
            return []
        if decoding < self._slots and waiting:
            finished = self._admit([*range(decoding, self._slots)])
        if decoding:
            finished += self._step()
        report_progress()
        self._free_if_idle()
        return [row.generated for row in finished]

    def _free_if_idle(self) -> None:
        if not any(self.stats()):
            self._drop_cache()

    @torch.inference_mode()
    def _step(self) -> list[_Row]:
        """Adds a token to every decoding row; returns the rows that ended."""
        assert self._decoder is not None
        last = self._tensor([row.generated.tokens[-1] for row in self._decoding])
        gaps = self._sample(self._decoder.step(last), self._decoding)
        return [self._decoding[slot] for slot in gaps] + (self._admit(gaps) if gaps else [])

    def _sample(self, logits: Tensor, rows: Sequence[_Row]) -> list[int]:
        """Adds the next token to each row; returns the indices of the rows that end with it."""
        greedy, sampling = self._requests.greedy, self._requests.sampling
        log_probs = log_softmax(logits, 1.0 if greedy else sampling.temperature)
        if greedy:
            tokens = log_probs.argmax(-1)
        else:
            uniforms = np.array([row.uniforms.item(len(row.generated.tokens)) for row in rows])
            allowed = truncated(log_probs, sampling.top_k, sampling.top_p, sampling.min_p)
            tokens = inverse_cdf(allowed, torch.from_numpy(uniforms).to(logits.device))
            if allowed is not log_probs:
                log_probs = log_softmax(allowed, 1.0)
                if self._requests.records_support:
                    self._record(allowed.isfinite(), rows)
        chosen, over = log_probs.gather(-1, tokens[:, None])[:, 0].tolist(), list[int]()
        end_tokens, stop, version = self._policy.spec.eos_ids, sampling.stop, self.version
        for index, (row, token, log_prob) in enumerate(zip(rows, tokens.tolist(), chosen, strict=True)):
            generated = row.generated
            generated.tokens.append(token)
            generated.log_probs.append(log_prob)
            generated.versions.append(version)
            if token in end_tokens or (stop and self._completes_stop(generated.tokens, stop)):
                generated.ended = True
            if generated.ended or len(generated.tokens) == row.room:
                over.append(index)
        return over

    def _record(self, allowed: Tensor, rows: Sequence[_Row]) -> None:
        """Adds the set of each row's next token, bool [n, V]."""
        sizes, ids = allowed.sum(-1).tolist(), allowed.nonzero()[:, 1].int().cpu()
        for row, size, of_row in zip(rows, sizes, ids.split(sizes), strict=True):
            row.generated.support_sizes.append(size)
            row.generated.support_ids.frombytes(of_row.numpy().tobytes())

    def _completes_stop(self, tokens: list[int], stop: list[str]) -> bool:
        """Returns whether the last token completes a stop string."""
        # a window that begins within a character decodes differently there: up to four bytes
        num_bytes = window = max(len(text.encode()) for text in stop) + 4
        ending = self._policy.codec.decode(tokens[-window:])
        while window < len(tokens) and len(ending.encode()) < num_bytes:  # special tokens have no bytes
            window *= 2
            ending = self._policy.codec.decode(tokens[-window:])
        return any(text in ending for text in stop)

    # ----------------------------------------------------------------------------------------------------------- slots
    @torch.inference_mode()
    def _admit(self, gaps: list[int]) -> list[_Row]:
        """Fills gaps with waiting rows, then with the last rows; returns rows that ended at their first token."""
        finished: list[_Row] = []
        while gaps and (self._prefilled or self._waiting):
            if not self._prefilled:
                self._prefill()
            assert self._decoder is not None
            admitted = [self._prefilled.popleft() for _ in range(min(len(gaps), len(self._prefilled)))]
            over = self._sample(self._logits[[prompt for prompt, _ in admitted]], [row for _, row in admitted])
            finished += [admitted[index][1] for index in over]
            joining = [pair for index, pair in enumerate(admitted) if index not in over]
            slots, gaps = gaps[: len(joining)], gaps[len(joining) :]
            if joining:
                self._decoder.join(self._tensor([prompt for prompt, _ in joining]), self._tensor(slots))
            for slot, (_, row) in zip(slots, joining, strict=True):
                self._decoding[slot : slot + 1] = [row]  # or appends it
        self._compact(gaps)
        return finished

    def _prefill(self) -> None:
        """Prefills the prompts of about S rows."""
        if self._decoder is None:
            self._decoder = self._policy.decoder(self._slots, self._width)
            self._device = next(self._policy.module.parameters()).device
        numbers = dict[tuple[tuple[int, int], tuple[int, ...]], int]()  # of the prompts
        while self._waiting:
            sequence = self._waiting[0].sequence()
            if len(self._prefilled) >= self._slots and sequence not in numbers:
                break
            self._prefilled.append((numbers.setdefault(sequence, len(numbers)), self._waiting.popleft()))
        self._logits = self._decoder.prefill([tokens for _, tokens in numbers])

    def _prefill_again(self) -> None:
        """Drops the cache, and queues its rows in front of the waiting ones, those that decode first."""
        self._waiting = deque(self._unfinished())
        self._drop_cache()

    def _compact(self, gaps: list[int]) -> None:
        """Moves the last decoding rows into gaps, so that these rows have the slots 0..n-1."""
        rows = self._decoding
        remaining = len(rows) - sum(slot < len(rows) for slot in gaps)
        sources = [slot for slot in range(remaining, len(rows)) if slot not in gaps]
        targets = [slot for slot in gaps if slot < remaining]
        if sources:
            assert self._decoder is not None
            self._decoder.move(self._tensor(sources), self._tensor(targets))
            for source, target in zip(sources, targets, strict=True):
                rows[target] = rows[source]
        del rows[remaining:]

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)
