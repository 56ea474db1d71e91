"""The protocol of engines, which generate tokens: requests are submitted at any time, and finished rows are polled.

    submit(requests) -> numbers of their rows        may be called while other rows decode
    poll() -> rows that have ended                   computes, or waits for, a few more tokens
    abort(rows) -> their tokens so far
    pause(), load(version, policy), resume()         unfinished rows stay, and continue with the new weights

Tokens in, tokens out.  Every token has its log-prob and the version of the weights that sampled it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.reasoning.batch import EngineLoad, GenerationBlock


@dataclass(slots=True)
class Generated:
    """A row of L tokens; a finished one has at least one."""

    row: int  # its number, from `submit`
    tokens: list[int] = field(default_factory=list)  # L, the end token included
    log_probs: list[float] = field(default_factory=list)  # L, of the distribution sampled from
    versions: list[int] = field(default_factory=list)  # L, of the weights that sampled each token
    ended: bool = False  # by the model; False: cut off at its length, aborted, or unfinished
    # the sets of tokens that top_k, top_p and min_p left: their sizes (L), and their ids, one set after the other.
    # Empty: not restricted, or not recorded; log-probs must then be those of the whole vocabulary
    support_sizes: list[int] = field(default_factory=list)
    support_ids: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """A turn of a block's episodes."""

    rows: Mapping[int, Generated]  # by number of the episode
    version: int  # of the weights
    load: EngineLoad


@runtime_checkable
class Engine(Protocol):
    """An engine in a worker; all calls come from one thread."""

    version: int  # of the weights that it samples with

    def submit(self, requests: GenerationBlock) -> list[int]:
        """Adds a row for each prompt; returns the numbers of the rows.

        Numbers are never used twice.
        """
        ...

    def poll(self) -> list[Generated]:
        """Returns the rows that have ended since the last call, in any order.

        It decodes some tokens, or waits a moment for them.  If no row is unfinished, or while paused, it returns
        immediately.

        Raises:
            ObjectiveError: the model's logits are not finite.
            WorkerError: the engine's process ended.
        """
        ...

    def abort(self, rows: Collection[int]) -> list[Generated]:
        """Ends unfinished rows and returns them; rows that have ended already are ignored."""
        ...

    def pause(self) -> None:
        """Stops decoding; unfinished rows stay."""
        ...

    def load(self, version: int, policy: LanguagePolicy) -> None:
        """Loads a policy's current weights; the engine is paused, or has no unfinished row."""
        ...

    def resume(self) -> None:
        """Continues decoding after `pause`."""
        ...

    def stats(self) -> tuple[int, int]:
        """Returns the numbers of rows that decode, and that wait for a slot."""
        ...

    def close(self) -> None:
        """Frees processes and memory."""
        ...


def update(engine: Engine, version: int, policy: LanguagePolicy) -> None:
    """Loads a policy's weights if the engine has another version of them; unfinished rows continue with them."""
    if engine.version != version:
        engine.pause()
        engine.load(version, policy)
        engine.resume()


def poll(engine: Engine, load: EngineLoad) -> list[Generated]:
    """Polls an engine, and adds the interval to `load`."""
    start, rows = time.perf_counter(), engine.poll()
    load.add(time.perf_counter() - start, *engine.stats(), len(rows))
    return rows


def generate(engine: Engine, requests: GenerationBlock, load: EngineLoad | None = None) -> list[Generated]:
    """Returns the finished row of each prompt; adds the polls to `load`."""
    numbers, finished, load = engine.submit(requests), dict[int, Generated](), load or EngineLoad()
    while not finished.keys() >= set(numbers):
        finished |= {row.row: row for row in poll(engine, load)}
    return [finished[number] for number in numbers]
