"""Batched generation with continuous batching: a fixed block of prompts, S slots, groups handed out as they end.

    block   prompt 0 x G samples | prompt 1 x G samples | ...       rows, in the order in which they get a slot
    slots   at most S rows, one token each per step; a row that ends hands its slot to the next waiting row,
            and when nobody waits, the last row moves into the gap: every step computes live rows only
    out     a group is handed out when its last row has ended, while the others decode; nothing is decoded
            between two calls of the iterator, so a slow consumer holds the decoding up and nothing else

A prompt is read once and its keys and values are copied to its G samples.  A row's uniforms are keyed by (seed,
iteration, prompt id, sample, position), so neither other blocks nor the worker that decodes have any influence.  What a
row's *last bits* depend on is the number of rows and columns of each step (matrix products are summed in another order
for other shapes), which is a function of the block's content and of S.  Another S may thus change log-probs by some
1e-6, and a token where its uniform falls that close to the edge between two tokens.

Log-probs are those of the whole vocabulary at the temperature, as training computes them, also where top_k, top_p or
min_p leave tokens out.  A completion ends with the token that completes a stop string in its text: its tokens are the
sampled ones, never cut and never encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.log_probs import inverse_cdf, log_softmax, truncated
from rlinf_embodied.interfaces.language import Decoder, LanguagePolicy, Prefix
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import GenerationBlock, Group
from rlinf_embodied.telemetry.progress import report_progress


class Decoding:
    """One block under way: which row is in which slot, and the tokens of each so far.

    The policy's weights must stay as they are until it has ended.
    """

    def __init__(self, policy: LanguagePolicy, block: GenerationBlock) -> None:
        self.block = block
        rows, length = len(block.prompts) * block.group_size, block.sampling.max_new_tokens
        self.num_rows = rows
        self.max_num_seqs = min(block.sampling.max_num_seqs, rows)
        room = lambda prompt: length if prompt.room is None else prompt.room  # noqa: E731
        width = max(len(prompt.tokens) + room(prompt) for prompt in block.prompts)
        self.decoder: Decoder = policy.decoder(self.max_num_seqs, width)
        device = next(policy.module.parameters()).device
        self.eos = torch.tensor(policy.spec.eos_ids, device=device)
        self._decode = policy.decode
        # a token holds a byte at least; the further ones keep what the first tokens of a text decode to out of it
        self._window = max((len(text.encode()) for text in block.sampling.stop), default=0) + 4
        # made outside of inference mode, so that training may use them
        self.tokens = torch.full((rows, length), policy.spec.pad_id, device=device)
        self.log_probs = torch.zeros(rows, length, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(rows, length, device=device)
        rooms = [room(prompt) for prompt in block.prompts for _ in range(block.group_size)]
        self.room = torch.tensor(rooms, device=device)  # tokens that each row may have
        self.open = [block.group_size] * len(block.prompts)  # rows of each group that have not ended
        self.row_of = torch.zeros(0, dtype=torch.long, device=device)  # [n] of each slot
        self.last = torch.zeros(0, dtype=torch.long, device=device)  # [n] last token of each slot
        self.next_row = 0
        self.prefix: Prefix | None = None
        self.read_from, self.read_to = 0, 0  # prompts in `prefix`

    def run(self) -> Iterator[Group]:
        """Yields the groups in the order of the prompts, each as soon as it and those before it have ended.

        Raises:
            ObjectiveError: the model's logits are not finite.
        """
        finished, handed_out = self._admit(torch.arange(self.max_num_seqs, device=self.lengths.device)), 0
        while True:
            for row in finished:
                self.open[row // self.block.group_size] -= 1
            while handed_out < len(self.open) and self.open[handed_out] == 0:
                yield self._group(handed_out)
                handed_out += 1
            if len(self.row_of) == 0:
                return
            finished = self._step()
            report_progress()

    def _group(self, number: int) -> Group:
        size = self.block.group_size
        rows = slice(number * size, (number + 1) * size)
        lengths = self.lengths[rows].clone()
        cut = lambda table: table[rows, : int(lengths.max())].clone()  # noqa: E731
        prompt = self.block.prompts[number]
        return Group(prompt, cut(self.tokens), lengths, cut(self.log_probs), self.ended[rows].clone())

    # -------------------------------------------------------------------------------------------------------- one step
    @torch.inference_mode()
    def _step(self) -> list[int]:
        """Adds a token to every live row; returns the rows that ended."""
        self.last, over = self._sample(self.decoder.step(self.last), self.row_of)
        gaps = over.nonzero()[:, 0]
        if len(gaps) == 0:
            return []
        finished = self.row_of[gaps].tolist()
        return finished + self._admit(gaps)

    def _sample(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next token of each row and whether it was its last; all that is recorded is recorded here."""
        place, greedy, sampling = self.lengths[rows], self.block.greedy, self.block.sampling
        every = log_softmax(logits, 1.0 if greedy else sampling.temperature)
        if greedy:
            tokens = every.argmax(-1)
        else:
            possible = truncated(every, sampling.top_k, sampling.top_p, sampling.min_p)
            tokens = inverse_cdf(possible, self.uniforms[rows, place])
        self.tokens[rows, place] = tokens
        self.log_probs[rows, place] = every.gather(-1, tokens[:, None])[:, 0]
        self.lengths[rows] = place + 1
        ended = torch.isin(tokens, self.eos) if len(self.eos) > 1 else tokens == self.eos
        if sampling.stop:
            ended = ended | self._stopped(rows)
        self.ended[rows] = ended
        return tokens, ended | (place + 1 == self.room[rows])

    def _stopped(self, rows: Tensor) -> Tensor:
        """Returns whether the text of each row ends with a token that completes a stop string, bool [n]."""
        ends, stop = self.lengths[rows].tolist(), self.block.sampling.stop
        newest = [self.tokens[row, max(0, n - self._window) : n].tolist() for row, n in zip(rows, ends, strict=True)]
        texts = [self._decode(tokens) for tokens in newest]
        return torch.tensor([any(text in found for text in stop) for found in texts], device=rows.device)

    # ------------------------------------------------------------------------------------------------ who sits where
    @torch.inference_mode()
    def _admit(self, gaps: Tensor) -> list[int]:
        """Fills gaps with waiting rows, then with the last live ones; returns rows that ended at their first token."""
        finished: list[int] = []
        while len(gaps) > 0 and self.next_row < self.num_rows:
            prefix = self._read_ahead()
            end = min(self.next_row + len(gaps), self.read_to * self.block.group_size)
            rows = torch.arange(self.next_row, end, device=gaps.device)
            self.next_row = end
            prompts = rows // self.block.group_size - self.read_from
            tokens, over = self._sample(prefix.logits[prompts], rows)
            finished += rows[over].tolist()
            live = (~over).nonzero()[:, 0]
            slots, gaps = gaps[: len(live)], gaps[len(live) :]
            if len(live) > 0:
                self.decoder.join(prefix, prompts[live], slots)
                short = max(0, int(slots.max()) + 1 - len(self.row_of))
                self.row_of, self.last = (torch.cat([t, t.new_zeros(short)]) for t in (self.row_of, self.last))
                self.row_of[slots], self.last[slots] = rows[live], tokens[live]
        self._close(gaps)
        return finished

    def _read_ahead(self) -> Prefix:
        """The prefix that holds the next waiting row's prompt; prompts are read for about S rows at a time."""
        block, size = self.block, self.block.group_size
        prompt = self.next_row // size
        if self.prefix is None or prompt >= self.read_to:
            count = -(-self.max_num_seqs // size)
            self.read_from, self.read_to = prompt, min(prompt + count, len(block.prompts))
            prompts = block.prompts[self.read_from : self.read_to]
            self.prefix = self.decoder.prefill([p.tokens for p in prompts])
            column = lambda values: np.array(values)[:, None, None]  # noqa: E731
            ids, samples = (
                column([p.id for p in prompts]),
                column([p.sample for p in prompts]) + np.arange(size)[:, None],
            )
            places = column([p.place for p in prompts]) + np.arange(block.sampling.max_new_tokens)
            drawn = torch.from_numpy(uniform(block.seed, block.purpose, block.iteration, ids, samples, places))
            rows = slice(self.read_from * size, self.read_to * size)
            self.uniforms[rows] = drawn.flatten(0, 1).to(self.uniforms.device)
        return self.prefix

    def _close(self, gaps: Tensor) -> None:
        """Moves the last live rows into gaps, so that the live slots are 0..n-1."""
        gaps = gaps[gaps < len(self.row_of)]
        remaining = len(self.row_of) - len(gaps)
        live = torch.ones_like(self.row_of, dtype=torch.bool)
        live[gaps] = False
        sources = live[remaining:].nonzero()[:, 0] + remaining
        targets = gaps[gaps < remaining]
        if len(sources) > 0:
            self.decoder.move(sources, targets)
            self.row_of[targets], self.last[targets] = self.row_of[sources], self.last[sources]
        self.row_of, self.last = self.row_of[:remaining], self.last[:remaining]
