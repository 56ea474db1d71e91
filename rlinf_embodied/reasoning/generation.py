"""The exact engine: batched generation with continuous batching in the worker itself.

    requests   prompt 0 x G samples | prompt 1 x G samples | ...       rows, in the order in which they get a slot
    slots      at most S rows, one token each per step; a row that ends hands its slot to the next waiting row,
               and when nobody waits, the last row moves into the gap: every step computes live rows only
    poll       makes a step

A prompt is read once and its keys and values are copied to its G samples.  A row's uniforms are keyed by (seed,
iteration, prompt id, sample, position), so neither other rows nor the worker that decodes have any influence.  What a
row's *last bits* depend on is the number of rows and columns of each step (matrix products are summed in another order
for other shapes).  Of requests that are submitted to an idle engine that is a function of their content and of S.
Another S, or requests that join others, may thus change log-probs by some 1e-6, and a token where its uniform falls
that close to the edge between two tokens.

Log-probs are those of the whole vocabulary at the temperature, as training computes them, also where top_k, top_p or
min_p leave tokens out.  A completion ends with the token that completes a stop string in its text: its tokens are the
sampled ones, never cut and never encoded again.

New weights, and requests that are longer than those under way, make a new memory: rows under way are read again, what
they have sampled included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.log_probs import inverse_cdf, log_softmax, truncated
from rlinf_embodied.config import MathConfig
from rlinf_embodied.interfaces.language import Decoder, LanguagePolicy, Prefix
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import GenerationBlock
from rlinf_embodied.reasoning.engine import EngineStats, Generated
from rlinf_embodied.telemetry.progress import report_progress


class ExactEngine:
    """Which row is in which slot, and the tokens of each so far; Engine in engine.py is the protocol.

    The policy's weights must stay as they are while it decodes; between idle times they may change without `load`.
    """

    def __init__(self, policy: LanguagePolicy, version: int = 0) -> None:
        self.version = version
        self._policy = policy
        self._paused, self._sampled, self._next = False, 0, 0
        self._clear()

    @classmethod
    def from_config(cls, config: MathConfig, policy: LanguagePolicy, version: int) -> ExactEngine:
        return cls(policy, version)

    def _clear(self) -> None:
        self._device = next(self._policy.module.parameters()).device
        self._numbers: list[int] = []  # of each row of the tables
        self._prompts: list[tuple[int, ...]] = []
        self._waiting: deque[tuple[tuple[int, ...], list[int]]] = deque()  # what is to be read, for which rows
        self._drop_memory()

    def _drop_memory(self) -> None:
        self._decoder: Decoder | None = None
        self._prefix: Prefix | None = None
        self._read: deque[tuple[int, int]] = deque()  # (prompt in the prefix, row) without a slot
        self._row_of = torch.zeros(0, dtype=torch.long, device=self._device)  # [n] of each slot
        self._last = torch.zeros(0, dtype=torch.long, device=self._device)  # [n] last token of each slot

    # ------------------------------------------------------------------------------------------------------- requests
    def submit(self, requests: GenerationBlock) -> list[int]:
        """Begins rows; those under way must have the same sampling."""
        under_way = self._under_way()
        if not under_way:
            self._clear()
            self.block = requests
        self._extend(requests, under_way)
        return self._numbers[len(under_way) :]

    def _extend(self, requests: GenerationBlock, kept: Sequence[int]) -> None:
        """Adds rows to the tables, in which these rows stay."""
        size, sampling, device = requests.group_size, requests.sampling, self._device
        prompts = [prompt for prompt in requests.prompts for _ in range(size)]
        rows, length = len(prompts), sampling.max_new_tokens
        # made outside of inference mode, so that training may use them
        new = {
            "tokens": torch.full((rows, length), self._policy.spec.pad_id, device=device),
            "log_probs": torch.zeros(rows, length, device=device),
            "versions": torch.zeros(rows, length, dtype=torch.long, device=device),
            "uniforms": _uniforms(requests).to(device),
            "lengths": torch.zeros(rows, dtype=torch.long, device=device),
            "ended": torch.zeros(rows, dtype=torch.bool, device=device),
            "room": torch.tensor([length if p.room is None else p.room for p in prompts], device=device),
        }
        if kept:
            assert (requests.sampling, requests.greedy) == (self.block.sampling, self.block.greedy), "another sampling"
            places = torch.tensor(kept, device=device)
            new = {name: torch.cat([getattr(self, f"_{name}")[places], table]) for name, table in new.items()}
            at = {row: place for place, row in enumerate(kept)}
            self._waiting = deque((said, [at[row] for row in rows]) for said, rows in self._waiting)
            self._read = deque((place, at[row]) for place, row in self._read)
            self._row_of = torch.tensor([at[row] for row in self._row_of.tolist()], dtype=torch.long, device=device)
        self._tokens, self._log_probs, self._versions = new["tokens"], new["log_probs"], new["versions"]
        self._uniforms, self._lengths, self._ended, self._room = (
            new[name] for name in ("uniforms", "lengths", "ended", "room")
        )
        self._numbers = [self._numbers[row] for row in kept] + [*range(self._next, self._next + rows)]
        self._prompts = [self._prompts[row] for row in kept] + [prompt.tokens for prompt in prompts]
        self._next += rows
        first, every = len(kept), len(kept) + rows
        self._waiting += [
            (p.tokens, [*range(first + k * size, first + (k + 1) * size)]) for k, p in enumerate(requests.prompts)
        ]
        widths = [len(said) + room for said, room in zip(self._prompts, self._room.tolist(), strict=True)]
        slots, width = min(sampling.max_num_seqs, every), max(widths)
        if self._decoder is not None and (slots > self._slots or width > self._width):
            self._read_again()
        if self._decoder is None:
            self._slots, self._width = slots, width

    def _under_way(self) -> list[int]:
        """Returns the rows that have not ended, in ascending order."""
        waiting = [row for _, rows in self._waiting for row in rows]
        return sorted([*self._row_of.tolist(), *(row for _, row in self._read), *waiting])

    def abort(self, rows: Collection[int]) -> list[Generated]:
        chosen = {row for row in self._under_way() if self._numbers[row] in rows}
        self._waiting = deque(
            (said, left) for said, of in self._waiting if (left := [row for row in of if row not in chosen])
        )
        self._read = deque(entry for entry in self._read if entry[1] not in chosen)
        gaps = [slot for slot, row in enumerate(self._row_of.tolist()) if row in chosen]
        with torch.inference_mode():
            self._close(torch.tensor(gaps, dtype=torch.long, device=self._device))
        self._free_if_idle()
        return [self._generated(row) for row in sorted(chosen)]

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def load(self, version: int, policy: LanguagePolicy) -> None:
        self._policy, self.version = policy, version
        self._read_again()

    def stats(self) -> EngineStats:
        waiting = len(self._read) + sum(len(rows) for _, rows in self._waiting)
        return EngineStats(len(self._row_of), waiting, self._sampled)

    def close(self) -> None:
        self._clear()

    def _generated(self, row: int) -> Generated:
        length, tables = int(self._lengths[row]), (self._tokens, self._log_probs, self._versions)
        tokens, log_probs, versions = (table[row, :length].clone() for table in tables)
        return Generated(self._numbers[row], tokens, log_probs, bool(self._ended[row]), versions)

    # -------------------------------------------------------------------------------------------------------- one step
    def poll(self) -> list[Generated]:
        """Adds a token to every live row, and gives free slots to waiting rows."""
        live = len(self._row_of)
        finished: list[int] = []
        if self._paused or not (live or self._read or self._waiting):
            return []
        if live < self._slots and (self._read or self._waiting):
            finished = self._admit(torch.arange(live, self._slots, device=self._device))
        if live:
            finished += self._step()
        report_progress()
        self._free_if_idle()
        return [self._generated(row) for row in finished]

    def _free_if_idle(self) -> None:
        if not (len(self._row_of) or self._read or self._waiting):
            self._drop_memory()

    @torch.inference_mode()
    def _step(self) -> list[int]:
        """Adds a token to every live row; returns the rows that ended."""
        assert self._decoder is not None
        self._last, over = self._sample(self._decoder.step(self._last), self._row_of)
        gaps = over.nonzero()[:, 0]
        if len(gaps) == 0:
            return []
        finished = self._row_of[gaps].tolist()
        return finished + self._admit(gaps)

    def _sample(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next token of each row and whether it was its last; all that is recorded is recorded here."""
        place, greedy, sampling = self._lengths[rows], self.block.greedy, self.block.sampling
        every = log_softmax(logits, 1.0 if greedy else sampling.temperature)
        if greedy:
            tokens = every.argmax(-1)
        else:
            possible = truncated(every, sampling.top_k, sampling.top_p, sampling.min_p)
            tokens = inverse_cdf(possible, self._uniforms[rows, place])
        self._tokens[rows, place] = tokens
        self._log_probs[rows, place] = every.gather(-1, tokens[:, None])[:, 0]
        self._versions[rows, place] = self.version
        self._lengths[rows] = place + 1
        self._sampled += len(rows)
        ended = torch.isin(tokens, self._eos) if len(self._eos) > 1 else tokens == self._eos
        if sampling.stop:
            ended = ended | self._stopped(rows)
        self._ended[rows] = ended
        return tokens, ended | (place + 1 == self._room[rows])

    def _stopped(self, rows: Tensor) -> Tensor:
        """Returns whether the text of each row ends with a token that completes a stop string, bool [n]."""
        ends, stop = self._lengths[rows].tolist(), self.block.sampling.stop
        # a token holds a byte at least; the further ones keep what the first tokens of a text decode to out of it
        window = max(len(text.encode()) for text in stop) + 4
        newest = [self._tokens[row, max(0, n - window) : n].tolist() for row, n in zip(rows, ends, strict=True)]
        texts = [self._policy.codec.decode(tokens) for tokens in newest]
        return torch.tensor([any(text in found for text in stop) for found in texts], device=rows.device)

    # ------------------------------------------------------------------------------------------------ who sits where
    @torch.inference_mode()
    def _admit(self, gaps: Tensor) -> list[int]:
        """Fills gaps with waiting rows, then with the last live ones; returns rows that ended at their first token."""
        finished: list[int] = []
        while len(gaps) > 0 and (self._read or self._waiting):
            if not self._read:
                self._read_ahead()
            assert self._decoder is not None
            assert self._prefix is not None
            taken = [self._read.popleft() for _ in range(min(len(gaps), len(self._read)))]
            prompts, rows = (torch.tensor(part, device=gaps.device) for part in zip(*taken, strict=True))
            tokens, over = self._sample(self._prefix.logits[prompts], rows)
            finished += rows[over].tolist()
            live = (~over).nonzero()[:, 0]
            slots, gaps = gaps[: len(live)], gaps[len(live) :]
            if len(live) > 0:
                self._decoder.join(self._prefix, prompts[live], slots)
                short = max(0, int(slots.max()) + 1 - len(self._row_of))
                self._row_of, self._last = (torch.cat([t, t.new_zeros(short)]) for t in (self._row_of, self._last))
                self._row_of[slots], self._last[slots] = rows[live], tokens[live]
        self._close(gaps)
        return finished

    def _read_ahead(self) -> None:
        """Reads prompts for about S rows."""
        if self._decoder is None:
            self._decoder = self._policy.decoder(self._slots, self._width)
            self._eos = torch.tensor(self._policy.spec.eos_ids, device=self._device)
        prompts: list[tuple[int, ...]] = []
        while self._waiting and len(self._read) < self._slots:
            said, rows = self._waiting.popleft()
            self._read += [(len(prompts), row) for row in rows]
            prompts.append(said)
        self._prefix = self._decoder.prefill(prompts)

    def _read_again(self) -> None:
        """Has all rows under way read anew, those that decode first."""
        live, read = self._row_of.tolist(), [row for _, row in self._read]
        if live or read:
            tokens, lengths = self._tokens, self._lengths.tolist()
            said = lambda row: (*self._prompts[row], *tokens[row, : lengths[row]].tolist())  # noqa: E731
            self._waiting = deque([*((said(row), [row]) for row in [*live, *read]), *self._waiting])
        self._drop_memory()

    def _close(self, gaps: Tensor) -> None:
        """Moves the last live rows into gaps, so that the live slots are 0..n-1."""
        gaps = gaps[gaps < len(self._row_of)]
        remaining = len(self._row_of) - len(gaps)
        live = torch.ones_like(self._row_of, dtype=torch.bool)
        live[gaps] = False
        sources = live[remaining:].nonzero()[:, 0] + remaining
        targets = gaps[gaps < remaining]
        if len(sources) > 0:
            assert self._decoder is not None
            self._decoder.move(sources, targets)
            self._row_of[targets], self._last[targets] = self._row_of[sources], self._last[sources]
        self._row_of, self._last = self._row_of[:remaining], self._last[:remaining]


def _uniforms(requests: GenerationBlock) -> Tensor:
    """Returns the uniforms of each row's tokens, float32 [K x G, max_new_tokens]."""
    prompts, length = requests.prompts, requests.sampling.max_new_tokens
    column = lambda values: np.array(values)[:, None, None]  # noqa: E731
    samples = column([p.sample for p in prompts]) + np.arange(requests.group_size)[:, None]
    places = column([p.place for p in prompts]) + np.arange(length)
    drawn = uniform(
        requests.seed, requests.purpose, requests.iteration, column([p.id for p in prompts]), samples, places
    )
    return torch.from_numpy(drawn).flatten(0, 1)
