"""Episodes of which each continues as soon as its tool has answered, and is carried over an update where it is long.

    units     what is begun together: the prompts of a block; with partial rollouts a prompt (G episodes)
    engine    decodes turns of all of them, whichever have been asked for; tools run in threads in the meantime
    take      a block is handed on when its unit is over; with partial rollouts when any K units are, the oldest first:
              the others stay in the engine, and continue with the next weights

Which rows decode together depends on when tools answer, and so do the last bits of log-probs; the noise does not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlinf_embodied.config import Late, MathConfig
from rlinf_embodied.interfaces.language import PromptCodec
from rlinf_embodied.reasoning.batch import Asked, Completions, EngineLoad, GenerationBlock, Turn
from rlinf_embodied.reasoning.engine import Engine, Generated, poll
from rlinf_embodied.reasoning.episodes import Episodes, Said, episodes_of
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


class FreeRunning:
    """The episodes of one worker."""

    def __init__(self, config: MathConfig, codec: PromptCodec, engine: Engine, load: EngineLoad | None = None) -> None:
        """Begins without an episode; `load` counts how busy the engine is."""
        self._config, self._codec, self._engine = config, codec, engine
        self._load = load or EngineLoad()
        self._carries = config.carried_per_block > 0
        self._calls = ToolCalls.of(config.tool)
        self._units: list[Unit] = []  # in the order in which they were begun
        self._rows: dict[int, tuple[Unit, int]] = {}  # by number in the engine: the episode's unit and its number there
        self._begun = set[int]()  # blocks that have not been taken yet
        self._ahead = set[int]()  # ids of prompts that were begun before their iteration

    def begin(self, block: int, asked: Sequence[Asked], iteration: int) -> None:
        """Begins the episodes of a block, if it has not been begun; those behind the first K are begun ahead."""
        if block in self._begun:
            return
        self._begun.add(block)
        new = [one for one in asked if one[1].id not in self._ahead]
        ids = [prompt.id for _, prompt in asked]
        own = ids[: self._config.prompts_per_block]
        self._ahead = (self._ahead - set(own)) | set(ids[len(own) :])
        for part in [(one,) for one in new] if self._carries else [tuple(new)] if new else []:
            self._units.append(self._unit(block, part, iteration))

    def _unit(self, block: int, asked: tuple[Asked, ...], iteration: int) -> Unit:
        config = self._config
        limits = self._codec, self._calls, config.algorithm.tokens_per_microbatch
        episodes = episodes_of(asked, config.rl.group_size, config, *limits)
        return Unit(block, asked, iteration, self._engine.version, episodes)

    def renew(self, iteration: int) -> int:
        """Begins those again that are too old (episodes.late=drop); returns how many."""
        settings = self._config.episodes
        drops = settings.late is Late.drop
        old = [unit for unit in self._units if drops and self._behind(unit) > settings.max_behind]
        self._give_up(old)
        self._units += [self._unit(unit.block, unit.asked, iteration) for unit in old]
        return len(old)

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
        made = [unit.episodes.completions(self._engine.version) for unit in over]
        for unit in over:
            self._units.remove(unit)
            unit.episodes.close()
        return _joined(made)

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
        rows = poll(self._engine, self._load)
        said: dict[int, tuple[Unit, dict[int, Said]]] = {}
        for row in rows:
            if (found := self._rows.pop(row.row, None)) is not None:
                unit, number = found
                said.setdefault(id(unit), (unit, {}))[1][number] = _said(row)
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


def _said(row: Generated) -> Said:
    versions = [version for version, count in row.versions for _ in range(count)]
    return row.tokens.tolist(), row.log_probs.tolist(), row.ended, versions


def _joined(parts: Sequence[Completions]) -> Completions:
    """Returns the completions of several units as one block's."""
    earned = tuple(one for part in parts for one in part.earned or (None,) * len(part.texts))
    return replace(
        parts[0],
        problems=tuple(problem for part in parts for problem in part.problems),
        groups=tuple(group for part in parts for group in part.groups),
        texts=tuple(text for part in parts for text in part.texts),
        turns=sum(part.turns for part in parts),
        earned=earned if any(part.earned for part in parts) else None,
    )
