"""An engine that sleeps: lengths by keyed draws, seconds by a rule, tokens without meaning.

    a row      has exp(N(log(median), spread)) tokens, at most its room: by (seed, prompt, sample, place) alone
    a step     adds a token to each decoding row in step_s + row_s * rows seconds

Rows advance by the clock and not by calls of `poll`, so that a busy machine delays what is done with a row, but not the
rows.  It needs hardly any processor time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlinf_embodied.config import MathConfig
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.randomness import normal, words
from rlinf_embodied.reasoning.batch import GenerationBlock
from rlinf_embodied.reasoning.engine import Generated
from rlinf_embodied.telemetry.progress import report_progress

_MOMENT_S = 0.01  # that `poll` waits at most


@dataclass(slots=True, eq=False)
class _Row:
    number: int
    length: int
    ends: bool  # by itself; else it is cut off
    key: tuple[int, int, int]
    done: float = 0.0  # tokens
    versions: list[int] = field(default_factory=list)  # of its tokens before the last `load`


class EmulatedEngine:
    """Engine in reasoning/engine.py is the protocol; a class below this one has other numbers."""

    step_s: ClassVar[float] = 0.01
    row_s: ClassVar[float] = 0.0
    median: ClassVar[float] = 20.0  # tokens of a turn
    spread: ClassVar[float] = 0.5  # standard deviation of their logarithm

    def __init__(self, config: MathConfig, policy: LanguagePolicy, version: int, devices: Sequence[str]) -> None:
        self.version = version
        self._max_num_seqs = config.generation.max_num_seqs
        self._eos = policy.spec.eos_ids[0]
        self._alphabet = policy.codec.encode_chat(policy.codec.chat("0123456789"))[:10]
        self._live: list[_Row] = []
        self._waiting: deque[_Row] = deque()
        self._ended: list[Generated] = []
        self._paused, self._next, self._at = False, 0, 0.0

    def submit(self, requests: GenerationBlock) -> list[int]:
        self._advance()
        first, most = self._next, requests.sampling.max_new_tokens
        for prompt in requests.prompts:
            key = (prompt.id, prompt.sample, prompt.place)
            drawn = float(normal(requests.seed, f"length/{requests.purpose}", *key))
            wanted, room = math.ceil(self.median * math.exp(self.spread * drawn)), prompt.room or most
            row = _Row(self._next, min(wanted, room), wanted <= room, key)
            self._waiting.append(row)
            self._next += 1
        self._admit()
        return [*range(first, self._next)]

    def poll(self) -> list[Generated]:
        if self._live and not self._paused and not self._ended:
            first = min(row.length - row.done for row in self._live) * self._step_s()
            time.sleep(min(max(0.0, self._at + first - time.monotonic()), _MOMENT_S))
        self._advance()
        report_progress()
        ended, self._ended = self._ended, []
        return ended

    def abort(self, rows: Collection[int]) -> list[Generated]:
        self._advance()
        chosen = [row for row in (*self._live, *self._waiting) if row.number in rows]
        self._live = [row for row in self._live if row not in chosen]
        self._waiting = deque(row for row in self._waiting if row not in chosen)
        self._admit()
        return [self._generated(row, int(row.done), False) for row in chosen]

    def pause(self) -> None:
        self._advance()
        self._paused = True

    def resume(self) -> None:
        self._at, self._paused = time.monotonic(), False

    def load(self, version: int, policy: LanguagePolicy) -> None:
        self._advance()
        for row in self._live:
            row.versions += [self.version] * (int(row.done) - len(row.versions))
        self.version = version

    def stats(self) -> tuple[int, int]:
        return len(self._live), len(self._waiting)

    def close(self) -> None:
        self._live, self._waiting, self._ended = [], deque(), []

    def _step_s(self) -> float:
        return self.step_s + self.row_s * len(self._live)

    def _advance(self) -> None:
        """Adds the tokens that have been decoded since the last call."""
        now = time.monotonic()
        while self._live and not self._paused:
            steps = min(row.length - row.done for row in self._live)
            within = (now - self._at) / self._step_s()
            self._at, added = (self._at + steps * self._step_s(), steps) if steps <= within else (now, within)
            for row in self._live:
                row.done += added
            over = [row for row in self._live if row.done >= row.length - 1e-9]
            self._ended += [self._generated(row, row.length, row.ends) for row in over]
            self._live = [row for row in self._live if row not in over]
            self._admit()
            if not over:
                break
        if not self._live:
            self._at = now

    def _admit(self) -> None:
        """Gives free slots to waiting rows."""
        while self._waiting and len(self._live) < self._max_num_seqs:
            self._live.append(self._waiting.popleft())

    def _generated(self, row: _Row, length: int, ends: bool) -> Generated:
        drawn = words(0, "token", *row.key, range(length)) % len(self._alphabet) if length else ()
        tokens = [self._alphabet[int(k)] for k in drawn]
        if ends:
            tokens[-1] = self._eos
        versions = [*row.versions, *[self.version] * (length - len(row.versions))]
        return Generated(row.number, tokens, [-1.0] * length, versions, ends)
