"""The problems that a config names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        return _own_source(config, config._target_, seed)
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


def _own_source(config: DataConfig, target: str, seed: int) -> ProblemSource:
    make = load_plug_in(target, "data._target_", "data", "seed")
    made = _asked(target, "making it", lambda: make(config, seed))
    if not isinstance(made, ProblemSource):
        raise ConfigError(
            f"data._target_ is {target!r}, but it returned a {type(made).__name__}: return an object with the methods "
            "size and batch of ProblemSource (rlinf_embodied/data/problems.py)"
        )
    return OwnSource(target, cast(ProblemSource, made))


class OwnSource:
    """A source of the user's, whose answers are looked at."""

    def __init__(self, target: str, source: ProblemSource) -> None:
        """`target` is data._target_, for errors."""
        self._target, self._source = target, source

    def size(self, split: Split) -> int | None:
        """Returns what the source says.

        Raises:
            ConfigError: it raised, or returned something other than a number or None.
        """
        found = _asked(self._target, f"size({split.value})", lambda: self._source.size(split))
        if found is not None and not (isinstance(found, int) and found > 0):
            rule = f"size({split.value}) is {found!r}, but a split has some problems"
            raise ConfigError(
                f"data._target_ is {self._target!r}, whose {rule}: return their number, or None without end"
            )
        return found

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        """Returns the problems of the source.

        Raises:
            ConfigError: it raised, or returned something other than `count` problems with unique ids.
        """
        call = f"batch({split.value}, {start}, {count})"
        found = _asked(self._target, call, lambda: list(self._source.batch(split, start, count)))
        wrong = next((type(problem).__name__ for problem in found if not isinstance(problem, Problem)), None)
        came = f"{len(found)} problems" if wrong is None else f"a {wrong} among them"
        if wrong is None and len(found) == count and len({problem.id for problem in found}) < count:
            came = "problems of which two have one id"
        elif wrong is None and len(found) == count:
            return found
        raise ConfigError(
            f"data._target_ is {self._target!r}, but {call} returned {came}: return {count} Problem, one for each "
            "position from start on, with problem_id(split, position) as id (rlinf_embodied/data/problems.py)"
        )


def require_laws(target: str, first: Problem, trained: Sequence[Problem], held_out: Sequence[Problem]) -> None:
    """Checks what a source of the user's promises: no problem moves, and no question is in two splits.

    Args:
        target: data._target_.
        first: the first problem of training, asked for alone.
        trained: the first ones, asked for together.
        held_out: the first ones of the tests.

    Raises:
        ConfigError: it does not keep one of the two.
    """
    if trained[0] != first:
        raise ConfigError(
            f"data._target_ is {target!r}, but its first problem is {first.question[:80]!r} at one time and another at "
            "the next: position i of a split is always the same problem, so draw it from (seed, split, position), as "
            "with rlinf_embodied.randomness.words"
        )
    tests = {problem.question for problem in held_out}
    twice = next((problem.question for problem in trained if problem.question in tests), None)
    if twice is not None:
        raise ConfigError(
            f"data._target_ is {target!r}, but {twice[:80]!r} is in the splits train and test: let a question be in "
            "one of them, as rlinf_embodied.data.problems.split_of decides"
        )


def _asked(target: str, call: str, ask: Callable[[], _Answer]) -> _Answer:
    refusal = lambda raised: ConfigError(f"data._target_ is {target!r}, but {call} raised {raised}\nCorrect it there")  # noqa: E731
    with named_when_raised(refusal):
        return ask()
