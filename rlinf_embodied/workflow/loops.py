"""What is done over and over within an iteration: cycles of stages, and all that comes before a stage.

env <==> policy               a loop of two stages: the opener shows, the answerer acts

env --> high --> low          a loop with a stage in between, which takes part in every k-th chunk-step only
 ^ `-----------> |
 `---------------'

chunk-step t of any loop: the opener's message goes to each stage in between whose turn it is, and to the answerer;
with it goes what the stages before said last.  The answerer's message goes to the opener.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RepeatDecision:
    """What a repeat decides after a round: stop or not, and what downstream stages are told."""

    enough: bool
    message: object = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A stage between a loop's opener and its answerer, as Turn("high_policy", 5).

    It takes part in every `every`-th chunk-step, the first one of a round included.  In the others what it said last
    still holds.
    """

    stage: str
    every: int = 1


@dataclass(frozen=True, slots=True)
class Loop:
    """A cycle of two stages for `chunk_steps` turns: `opener` shows, `answerer` acts; at most `max_rounds` times over.

    Stages in `between` have their turn after the opener, in this order.  After each round `decide` sees the opener's
    reports of all rounds so far (a list per round, in order of workers).
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
    between: tuple[Turn, ...] = ()  # stages of a loop of three and more

    @property
    def sides(self) -> tuple[str, ...]:
        """All of its stages, in the order of their turns: the opener, those in between, the answerer."""
        return (self.opener, *(turn.stage for turn in self.between), self.answerer)

    @property
    def period(self) -> int:
        """After how many chunk-steps the same stages take part again."""
        return math.lcm(*(turn.every for turn in self.between))

    def num_calls(self, stage: str) -> int:
        """Returns in how many chunk-steps of a round a side takes part."""
        every = next((turn.every for turn in self.between if turn.stage == stage), 1)
        return -(-self.chunk_steps // every)

    def hops(self) -> list[tuple[str, str]]:
        """Returns who is shown or told something by whom: the opener's messages go to all, the others' to those behind.

        Of two sides: opener to answerer, and back.
        """
        told = [(a, b) for a, b in itertools.combinations(self.sides, 2)]
        return [*told, (self.answerer, self.opener)]


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


def groups_of(loops: Sequence[Loop]) -> list[tuple[Loop, ...]]:
    """Returns the loops, those that share a stage (if only through others) together; all in their order."""
    groups: list[tuple[Loop, ...]] = []
    for loop in loops:
        met = [group for group in groups if any(not set(loop.sides).isdisjoint(other.sides) for other in group)]
        joined = [one for group in met for one in group]
        groups = [*(group for group in groups if group not in met), (*joined, loop)]
    place = {loop.name: number for number, loop in enumerate(loops)}
    ordered = [tuple(sorted(group, key=lambda loop: place[loop.name])) for group in groups]
    return sorted(ordered, key=lambda group: place[group[0].name])
