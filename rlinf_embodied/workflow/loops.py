"""What is done over and over within an iteration: loops of two stages, and all that comes before a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RepeatDecision:
    """What a repeat decides after a round: stop or not, and what downstream stages are told."""

    enough: bool
    message: object = None


@dataclass(frozen=True, slots=True)
class Loop:
    """A cycle of two stages for `chunk_steps` turns: `opener` shows, `answerer` acts; at most `max_rounds` times over.

    After each round `decide` sees the opener's reports of all rounds so far (a list per round, in order of workers).
    """

    name: str
    opener: str
    answerer: str
    chunk_steps: int
    max_rounds: int = 1
    decide: Callable[[Sequence[Sequence[object]]], RepeatDecision] | None = None
    expected_rounds: float = 1.0  # what a planner counts with
    shards: tuple[int, ...] = (1, 2)  # parts of the blocks that may be in flight together
    typical_steps: int = 0  # of an episode, where rows whose episode ends are reset at once; 0: where they wait

    @property
    def sides(self) -> tuple[str, str]:
        """Both of its stages, the opener first."""
        return self.opener, self.answerer

    def hops(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Who sends messages to whom."""
        return (self.opener, self.answerer), (self.answerer, self.opener)


@dataclass(frozen=True, slots=True)
class Repeat:
    """All that comes before a stage, done again until there is enough for it; at most `max_rounds` times.

    After each round `decide` sees the reports of the stage `decided_by`, of all rounds so far (a list per round, in
    order of workers).  The stage `before` and those behind it get the data of all rounds, and the decision's message.
    """

    name: str
    before: str
    decided_by: str
    decide: Callable[[Sequence[Sequence[object]]], RepeatDecision]
    max_rounds: int
    expected_rounds: float = 1.0  # what a planner counts with
