"""Runs the episodes of one worker, many at a time; one without a tool or an agent has a single turn.

    units     what is begun together: the prompts of a block; with partial rollouts a prompt (G episodes)
    engine    decodes turns of all units, whichever have been asked for; tools run in threads in the meantime
    take      a block is handed on when its unit is over; with partial rollouts when any K units are, the oldest first:
              the others stay in the engine, and continue with the next weights

Where tools answer, it depends on when they do which rows decode together, and so do the last bits of log-probs; the
noise does not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_embodied.config import Late, MathConfig
from rlinf_embodied.interfaces.language import PromptCodec
from rlinf_embodied.reasoning.batch import Asked, Completions, EngineLoad, GenerationBlock, Turn
from rlinf_embodied.reasoning.engine import Engine, Generated, poll
from rlinf_embodied.reasoning.episodes import Episodes, completions_of, episodes_of
from rlinf_embodied.reasoning.tool_calls import ToolCalls
from rlinf_embodied.telemetry.progress import report_progress

_IDLE_S = 0.002  # between two looks for answers while the engine has nothing to do


@dataclass(slots=True, eq=False)
class Unit:
    """Episodes that were begun together."""

    block: int
    asked: tuple[Asked, ...]
    iteration: int  # in which they were begun: it keys their noise
    version: int  # of the weights at that time
    episodes: Episodes


class EpisodeRunner:
    """The episodes that are under way."""

    def __init__(self, config: MathConfig, codec: PromptCodec, engine: Engine) -> None:
        self._config, self._codec, self._engine = config, codec, engine
        self.load = EngineLoad()
        self._at = (0, 0, 0)  # attempt, iteration and round
        self._carries = config.carried_per_block > 0
        self._calls = ToolCalls.of(config.tool)
        self._units: list[Unit] = []  # in the order in which they were begun
        self._rows: dict[int, tuple[Unit, int]] = {}  # by number in the engine: the episode's unit and its number there
        self._begun = set[int]()  # blocks that have not been taken yet
        self._ahead = set[int]()  # ids of prompts that were begun before their iteration

    def enter(self, attempt: int, iteration: int, round: int) -> None:
        """Begins or continues a round: gives up what is of another attempt, or of a round before and not carried over.

        With episodes.late=drop, episodes that have been under way for too long begin again.
        """
        before, self._at = self._at, (attempt, iteration, round)
        if before[0] != attempt or (before != self._at and not self._carries):
            self.clear()
        settings = self._config.episodes
        if before != self._at and settings.late is Late.drop:
            old = [unit for unit in self._units if self._behind(unit) > settings.max_behind]
            self._give_up(old)
            self._units += [self._unit(unit.block, unit.asked) for unit in old]

    def begin(self, first: int, parts: Sequence[Sequence[Asked]]) -> None:
        """Begins the episodes of neighbouring blocks, unless they have been begun.

        Those of a block's problems that are behind the first K are begun ahead.
        """
        blocks = range(first, first + len(parts))
        if not self._begun.isdisjoint(blocks):
            return
        self._begun.update(blocks)
        for block, asked in zip(blocks, parts, strict=True):
            new = [one for one in asked if one[1].id not in self._ahead]
            ids = [prompt.id for _, prompt in asked]
            own = ids[: self._config.prompts_per_block]
            self._ahead = (self._ahead - set(own)) | set(ids[len(own) :])
            for part in [(one,) for one in new] if self._carries else [tuple(new)]:
                self._units.append(self._unit(block, part))

    def _unit(self, block: int, asked: tuple[Asked, ...]) -> Unit:
        config = self._config
        limits = self._codec, self._calls, config.algorithm.tokens_per_microbatch
        episodes = episodes_of(asked, config.rl.group_size, config, *limits)
        return Unit(block, asked, self._at[1], self._engine.version, episodes)

    def take(self, block: int) -> Completions | None:
        """Returns the episodes of a block, or as many prompts of any; None while there are too few that are over."""
        count, settings = self._config.prompts_per_block, self._config.episodes
        if self._carries:
            over = [unit for unit in self._units if unit.episodes.over][:count]
            waits = settings.late is Late.wait
            late = [u for u in self._units if waits and self._behind(u) >= settings.max_behind][:count]
            if len(over) < count or any(unit not in over for unit in late):
                return None
        else:
            over = [unit for unit in self._units if unit.block == block]
            if not all(unit.episodes.over for unit in over):
                return None
        self._begun.discard(block)
        episodes = [episode for unit in over for episode in unit.episodes.finished()]
        made = completions_of(episodes, self._config.rl.group_size, self._engine.version)
        for unit in over:
            self._units.remove(unit)
            unit.episodes.close()
        return made

    def _behind(self, unit: Unit) -> int:
        return self._engine.version - unit.version

    def advance(self) -> None:
        """Asks for the turns that can be continued now, and has the engine decode a little."""
        asked: dict[tuple[int, int], list[tuple[Unit, Turn]]] = {}
        for unit in self._units:
            if (turn := unit.episodes.turn(wait=False)) is not None:
                asked.setdefault((unit.iteration, turn.group_size), []).append((unit, turn))
        for (iteration, size), turns in asked.items():
            self._submit(turns, iteration, size)
        rows = poll(self._engine, self.load)
        said: dict[int, tuple[Unit, dict[int, Generated]]] = {}
        for row in rows:
            if (found := self._rows.pop(row.row, None)) is not None:
                unit, number = found
                said.setdefault(id(unit), (unit, {}))[1][number] = row
        for unit, of in said.values():
            unit.episodes.take(of)
        if not self._rows and not rows:
            time.sleep(_IDLE_S)
            report_progress()  # the calls of tools have limits of their own

    def _submit(self, turns: Sequence[tuple[Unit, Turn]], iteration: int, size: int) -> None:
        prompts = tuple(prompt for _, turn in turns for prompt in turn.prompts)
        requests = GenerationBlock(prompts, size, self._config.generation, self._config.run.seed, iteration)
        owners = [(unit, number) for unit, turn in turns for number in turn.numbers]
        self._rows |= zip(self._engine.submit(requests), owners, strict=True)

    def _give_up(self, units: Sequence[Unit]) -> None:
        rows = [row for row, (unit, _) in self._rows.items() if unit in units]
        self._engine.abort(rows)
        for row in rows:
            del self._rows[row]
        for unit in units:
            self._units.remove(unit)
            unit.episodes.close()

    def clear(self) -> None:
        """Gives up everything."""
        self._give_up(tuple(self._units))
        self._begun.clear()
        self._ahead.clear()

    def close(self) -> None:
        self.clear()
        if self._calls is not None:
            self._calls.close()
