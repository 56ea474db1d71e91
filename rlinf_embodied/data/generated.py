"""Generated problems: a problem is a pure function of (level, seed, split, position)."""

from __future__ import annotations

import numpy as np

from rlinf_embodied.data.families import Draft, Draws, Level, parse_level
from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.randomness import words

_MOST_DRAWS = 20_000  # for one problem; a test problem takes some ten times as many as its level refuses


class GeneratedProblems:
    """Endless streams of problems of some levels; a problem's level is drawn with it.

    With few small numbers a level has few questions, and a stream meets them again.  Splits share none of them.
    """

    def __init__(self, levels: str, seed: int) -> None:
        """Makes the streams; nothing is drawn yet.

        Args:
            levels: one level ("sum4-6-9"), or several joined by commas, drawn with equal shares.
            seed: data seed.

        Raises:
            ConfigError: there is no such level.
        """
        self._levels = [parse_level(name.strip()) for name in levels.split(",")]
        self._seed = seed

    def size(self, split: Split) -> None:
        """Returns None: there is always a next problem."""
        return None

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """Returns the problems at positions start .. start + count - 1; see ProblemSource.

        Raises:
            ConfigError: a level has no question in this split.
        """
        positions = np.arange(start, start + count)
        keys = words(self._seed, f"problem/{split}", positions).tolist()
        return [self._problem(split, position, key) for position, key in zip(positions.tolist(), keys, strict=True)]

    def _problem(self, split: Split, position: int, key: int) -> Problem:
        draws = Draws(key)
        level = self._levels[draws.integer(0, len(self._levels) - 1)]
        draft = _draft(level, split, draws)
        return Problem(
            id=problem_id(split, position),
            question=draft.question,
            answer=draft.answer,
            solution=draft.solution,
            family=level.family,
            level=level.name,
            rule=draft.rule,
        )


def _draft(level: Level, split: Split, draws: Draws) -> Draft:
    """Draws until a problem keeps its family's bounds and its question belongs to the split."""
    for _ in range(_MOST_DRAWS):
        draft = level.draw(draws)
        if draft is not None and split_of(draft.question) is split:
            return draft
    raise ConfigError(
        f"data.level is {level.name!r}, but {_MOST_DRAWS} draws gave no question for the split {split.value!r}: "
        "choose larger sizes, so that there are more questions"
    )
