"""Runs the episodes of one worker concurrently; an episode without a tool or an agent has one turn.

    unit      episodes that begin together: those of a block's prompts; with partial rollouts those of one prompt
    engine    decodes the turns of all units; tools run in threads meanwhile
    take      returns a block when its unit has ended; with partial rollouts when any K units have, the oldest first.
              The other units stay in the engine, and continue with the next weights

If tools answer, the time of their answers decides which rows decode together, and thereby the last bits of log-probs;
the noise does not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_embodied.config import MathConfig
from rlinf_embodied.interfaces.language import PromptCodec
from rlinf_embodied.reasoning.batch import Completions, EngineLoad, GenerationBlock, Prompt, PromptedProblem
from rlinf_embodied.reasoning.engine import Engine, Generated, poll
from rlinf_embodied.reasoning.episodes import Episodes, completions_of, episodes_of
from rlinf_embodied.reasoning.tool_calls import ToolCalls
from rlinf_embodied.telemetry.progress import report_progress

_IDLE_S = 0.002  # between two polls for tools' answers while the engine has nothing to do


@dataclass(slots=True, eq=False)
class Unit:
    """Episodes that began together."""

    block: int
    problems: tuple[PromptedProblem, ...]
    iteration: int  # in which they began: it keys their noise
    version: int  # of the weights at that time
    episodes: Episodes


class EpisodeRunner:
    """The unfinished episodes of a worker, and the ended ones that have not been taken."""

    def __init__(self, config: MathConfig, codec: PromptCodec, engine: Engine) -> None:
        self._config, self._codec, self._engine = config, codec, engine
        self.load = EngineLoad()
        self._round = (0, 0, 0)  # attempt, iteration and round
        self._carries = config.carried_per_block > 0
        self._calls = ToolCalls(config.tool)
        self._units: list[Unit] = []  # the oldest first
        self._rows: dict[int, tuple[Unit, int]] = {}  # unit and episode number, by the engine's number of the row
        self._begun = set[int]()  # blocks that have not been taken
        self._begun_early = set[int]()  # ids of prompts that began before their iteration

    def enter(self, attempt: int, iteration: int, round: int) -> None:
        """Begins or continues a round; abandons episodes of another attempt, and of earlier rounds unless carried over.

        With episodes.drop_late, episodes that have been unfinished for too long are restarted.
        """
        previous, self._round = self._round, (attempt, iteration, round)
        if previous[0] != attempt or (previous != self._round and not self._carries):
            self.clear()
        settings = self._config.episodes
        if previous != self._round and settings.drop_late:
            late = [unit for unit in self._units if self._behind(unit) > settings.max_behind]
            self._abandon(late)
            self._units += [self._unit(unit.block, unit.problems) for unit in late]

    def begin(self, first: int, batch: Sequence[Sequence[PromptedProblem]]) -> None:
        """Begins the episodes of neighbouring blocks, from block `first` on, unless they have begun.

        The problems of a block after the first K begin early: they belong to the next iteration.
        """
        blocks = range(first, first + len(batch))
        if not self._begun.isdisjoint(blocks):
            return
        self._begun.update(blocks)
        for block, problems in zip(blocks, batch, strict=True):
            new = tuple(prompted for prompted in problems if prompted[1].id not in self._begun_early)
            ids, count = [prompt.id for _, prompt in problems], self._config.prompts_per_block
            self._begun_early = (self._begun_early - set(ids[:count])) | set(ids[count:])
            for part in [(prompted,) for prompted in new] if self._carries else [new]:
                self._units.append(self._unit(block, part))

    def _unit(self, block: int, problems: tuple[PromptedProblem, ...]) -> Unit:
        config = self._config
        limits = self._codec, self._calls, config.algorithm.tokens_per_microbatch
        episodes = episodes_of(problems, config.rl.group_size, config, *limits)
        return Unit(block, problems, self._round[1], self._engine.version, episodes)

    def take(self, block: int) -> Completions | None:
        """Returns the completions of a block, or with partial rollouts of any K prompts; None if too few have ended."""
        count, settings = self._config.prompts_per_block, self._config.episodes
        if self._carries:
            ended = [unit for unit in self._units if unit.episodes.over][:count]
            late = [unit for unit in self._units if self._behind(unit) >= settings.max_behind][:count]
            waits = not settings.drop_late and any(unit not in ended for unit in late)
            if len(ended) < count or waits:
                return None
        else:
            ended = [unit for unit in self._units if unit.block == block]
            if not all(unit.episodes.over for unit in ended):
                return None
        self._begun.discard(block)
        episodes = [episode for unit in ended for episode in unit.episodes.finished()]
        completions = completions_of(episodes, self._config.rl.group_size, self._engine.version)
        for unit in ended:
            self._units.remove(unit)
            unit.episodes.close()
        return completions

    def _behind(self, unit: Unit) -> int:
        return self._engine.version - unit.version

    def advance(self) -> None:
        """Submits the turns that are ready, and polls the engine once."""
        ready: dict[int, dict[tuple[Unit, int], Prompt]] = {}
        for unit in self._units:
            if turn := unit.episodes.turn(wait=False):
                ready.setdefault(unit.iteration, {}).update({(unit, k): prompt for k, prompt in turn.items()})
        for iteration, prompts in ready.items():
            settings = self._config.generation, self._config.run.seed, iteration
            numbers = self._engine.submit(GenerationBlock(tuple(prompts.values()), *settings))
            self._rows |= zip(numbers, prompts, strict=True)
        finished = poll(self._engine, self.load)
        generated: dict[Unit, dict[int, Generated]] = {}
        for row in finished:
            if row.row in self._rows:
                unit, number = self._rows.pop(row.row)
                generated.setdefault(unit, {})[number] = row
        for unit, rows in generated.items():
            unit.episodes.take(rows)
        if not self._rows and not finished:
            time.sleep(_IDLE_S)
            report_progress()  # calls of tools have separate time limits

    def _abandon(self, units: Sequence[Unit]) -> None:
        rows = [row for row, (unit, _) in self._rows.items() if unit in units]
        self._engine.abort(rows)
        for row in rows:
            del self._rows[row]
        for unit in units:
            self._units.remove(unit)
            unit.episodes.close()

    def clear(self) -> None:
        """Abandons all episodes."""
        self._abandon(tuple(self._units))
        self._begun.clear()
        self._begun_early.clear()

    def close(self) -> None:
        self.clear()
        self._calls.close()
