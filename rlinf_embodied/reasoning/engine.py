"""What generates tokens: an engine takes requests at any time, and rows are polled from it as they end.

    submit(requests) -> numbers of their rows        may be called while others decode
    poll() -> rows that have ended                   computes, or waits for, a little more
    abort(rows) -> what they have so far
    pause(), load(version, policy), resume()         rows under way stay, and continue with the new weights

Tokens in, tokens out.  Every token has its log-prob and the version of the weights that sampled it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from torch import Tensor

from rlinf_embodied.config import MathConfig
from rlinf_embodied.interfaces.language import LanguagePolicy
from rlinf_embodied.plug_ins import load_plug_in
from rlinf_embodied.reasoning.batch import EngineLoad, GenerationBlock

_ENGINES = {  # generation.engine, by name
    "exact": "rlinf_embodied.reasoning.generation.ExactEngine",
    "vllm": "rlinf_embodied.reasoning.vllm_engine.VllmEngine",
}


@dataclass(frozen=True, slots=True)
class Generated:
    """A row as it left its engine, with L tokens; L is 0 only if it was aborted before its first token."""

    row: int  # its number, from `submit`
    tokens: Tensor  # int64 [L], the ending one included
    log_probs: Tensor  # float32 [L], of the whole vocabulary at the temperature
    ended: bool  # by the model; False: cut off at its length, or aborted
    versions: Tensor  # int64 [L], of the weights that sampled each


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine does at the moment, and has done."""

    decoding: int  # rows
    waiting: int  # rows that have not got a slot yet
    tokens: int  # sampled so far, since it was made


@runtime_checkable
class Engine(Protocol):
    """One engine in one worker; it is called from one thread."""

    version: int  # of the weights that it samples with

    def submit(self, requests: GenerationBlock) -> list[int]:
        """Begins K prompts with G samples each; returns the numbers of the rows, prompt by prompt.

        No two rows ever have the same number.
        """
        ...

    def poll(self) -> list[Generated]:
        """Returns the rows that have ended since the last call, in any order.

        It decodes some tokens, or waits a moment for them; without a row under way, or paused, it returns at once.

        Raises:
            ObjectiveError: the model's logits are not finite.
            WorkerError: the engine is gone.
        """
        ...

    def abort(self, rows: Collection[int]) -> list[Generated]:
        """Ends rows and returns them as they are; those that have ended already are left out."""
        ...

    def pause(self) -> None:
        """Stops decoding; rows under way stay."""
        ...

    def load(self, version: int, policy: LanguagePolicy) -> None:
        """Takes the weights that a policy has now, while paused or without a row under way."""
        ...

    def resume(self) -> None:
        """Continues after `pause`, each row where it was."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Gives back processes and memory."""
        ...

    @classmethod
    def from_config(cls, config: MathConfig, policy: LanguagePolicy, version: int) -> Engine:
        """Returns an engine with the weights of a policy.

        Raises:
            ConfigError: settings that it does not know, or software that is missing.
        """
        ...


def engine_of(config: MathConfig, policy: LanguagePolicy, version: int) -> Engine:
    """Returns a new engine of the class that generation.engine names."""
    name = config.generation.engine
    kind = cast(type[Engine], load_plug_in(_ENGINES.get(name, name), "generation.engine"))
    return kind.from_config(config, policy, version)


def update(engine: Engine, version: int, policy: LanguagePolicy) -> None:
    """Has an engine sample with weights of this version; rows under way continue with them."""
    if engine.version != version:
        engine.pause()
        engine.load(version, policy)
        engine.resume()


def poll(engine: Engine, load: EngineLoad) -> list[Generated]:
    """Polls an engine, and adds to `load` how busy it was."""
    start, rows = time.perf_counter(), engine.poll()
    stats = engine.stats()
    load.add(time.perf_counter() - start, stats.decoding, stats.waiting, len(rows))
    return rows


def generate(engine: Engine, requests: GenerationBlock) -> list[Generated]:
    """Returns the rows of requests, prompt by prompt, when all of them have ended."""
    numbers, found = engine.submit(requests), dict[int, Generated]()
    while not found.keys() >= set(numbers):
        found |= {row.row: row for row in engine.poll()}
    return [found[number] for number in numbers]
