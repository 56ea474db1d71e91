"""The command line of every benchmark: `key=value` words, its options and overrides of a training config."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from experiments.bench.harness.report import machine, write_results
from rlinf_embodied import command_line
from rlinf_embodied.compose import compose, split
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import WorkerError

_Options = TypeVar("_Options")
_Case = TypeVar("_Case")
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")
PRIVATE = "folder="  # where a run's own files lie says nothing about its numbers


@dataclass(frozen=True, slots=True)
class Run(Generic[_Options]):
    """What a benchmark was asked for."""

    options: _Options
    overrides: list[str]  # of the training config
    known: Mapping[str, object]  # the head of its results: benchmark, arguments, machine

    def write(self, content: Mapping[str, object]) -> None:
        """Writes results to the file that the option `out` names, if it does; what was written before is replaced."""
        write_results(getattr(self.options, "out", ""), {**self.known, **content})


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[_Options]):
    """A command that measures: a module below experiments.bench."""

    name: str  # of the module
    options: type[_Options]  # a dataclass: the arguments with their defaults
    measure: Callable[[Run[_Options]], int | None]  # prints and writes results; returns an exit code, None for 0
    takes_overrides: bool = False
    one_thread: bool = True  # whether this process and those it starts compute with one thread each

    def main(self, words: Sequence[str] | None = None) -> NoReturn:
        """Measures and exits; see rlinf_embodied/command_line.py for the exit codes."""
        command_line.main(self._run, self.options, self._asked, words)

    def _asked(self, words: Sequence[str]) -> Run[_Options]:
        options, overrides = split(self.options, words) if self.takes_overrides else (compose(self.options, words), [])
        recorded = [word for word in words if not word.startswith(PRIVATE)]
        return Run(options, overrides, {"benchmark": self.name, "arguments": recorded, "machine": machine()})

    def _run(self, run: Run[_Options]) -> int | None:
        if self.one_thread:
            use_one_thread_per_process()
        try:
            return self.measure(run)
        except WorkerError as error:  # a process that a benchmark has started; its log is named
            print(f"error: {error}", file=sys.stderr)
            return 1


def names_of(text: str) -> list[str]:
    """Returns the names of a list such as "a,b"; none for an empty text."""
    return [name for name in text.split(",") if name]


def chosen(names: str, cases: Mapping[str, _Case], option: str = "cases") -> dict[str, _Case]:
    """Returns the cases of a list such as "serial,collocated-2", all of them for an empty one.

    Raises:
        ConfigError: there is no such case.
    """
    wanted = names_of(names) or list(cases)
    for name in wanted:
        require(name in cases, option, name, f"there are {', '.join(cases)}", "use some of these")
    return {name: cases[name] for name in wanted}


def use_one_thread_per_process() -> None:
    """Pins this process, and those it starts, to one thread each; call it before a renderer is opened."""
    for name in ONE_THREAD:
        os.environ[name] = "1"
    if "torch" in sys.modules:  # which has read the variables already
        sys.modules["torch"].set_num_threads(1)
