"""The problems that a config names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.jsonl import JsonlProblems
from rlinf_embodied.data.problems import Problem, ProblemSource, Split
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in, named_when_raised

_Answer = TypeVar("_Answer")


def problem_source(config: DataConfig, seed: int) -> ProblemSource:
    """Returns the streams of a config; `seed` decides what is drawn, or in which order files are gone through.

    Raises:
        ConfigError: there is no such level, or data._target_ makes no source.
        DataError: a file cannot be used.
    """
    if config._target_ is not None:
        make = load_plug_in(config._target_, "data._target_", "data", "seed")
        return CustomSource(config._target_, _asked(config._target_, "making it", lambda: make(config, seed)))
    if not config.files:
        return GeneratedProblems(config.level, seed)
    whole = config.files.get("all")
    return JsonlProblems(
        whole if whole is not None else {Split(name): file for name, file in config.files.items()},
        seed,
        question_column=config.question_column,
        answer_column=config.answer_column,
        columns=config.columns,
    )


class CustomSource:
    """A source of the user's, whose answers are checked."""

    def __init__(self, target: str, source: object) -> None:
        """`target` is data._target_, for errors.

        Raises:
            ConfigError: `source` is none.
        """
        if not isinstance(source, ProblemSource):
            raise ConfigError(
                f"data._target_ is {target!r}, but it returned a {type(source).__name__}: return an object with the "
                "methods size and batch of ProblemSource (rlinf_embodied/data/problems.py)"
            )
        self._target, self._source = target, cast(ProblemSource, source)

    def size(self, split: Split) -> int | None:
        """Returns the size that the source reports."""
        return _asked(self._target, f"size({split.value})", lambda: self._source.size(split))

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """Returns the problems of the source.

        Raises:
            ConfigError: it raised, or returned something other than `count` problems.
        """
        call = f"batch({split.value}, {start}, {count})"
        found = _asked(self._target, call, lambda: list(self._source.batch(split, start, count)))
        if len(found) == count and all(isinstance(problem, Problem) for problem in found):
            return found
        kinds = ", ".join(sorted({type(problem).__name__ for problem in found}))
        raise ConfigError(
            f"data._target_ is {self._target!r}, but {call} returned {len(found)} ({kinds}): return {count} Problem, "
            "one for each position from start on, with problem_id(split, position) as id "
            "(rlinf_embodied/data/problems.py)"
        )


def _asked(target: str, call: str, ask: Callable[[], _Answer]) -> _Answer:
    refusal = lambda raised: ConfigError(f"data._target_ is {target!r}, but {call} raised {raised}\nCorrect it there")  # noqa: E731
    with named_when_raised(refusal):
        return ask()
