"""The command line of every benchmark: `key=value` words, its options and overrides of a training config."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from experiments.bench.harness.processes import ONE_THREAD
from experiments.bench.harness.report import Report, machine, write_results
from rlinf_embodied.command_line import help_text, print_only
from rlinf_embodied.compose import compose, split
from rlinf_embodied.errors import ConfigError, RlinfError

_Options = TypeVar("_Options")
_Case = TypeVar("_Case")
PRIVATE = "folder="  # where a run's own files lie says nothing about its numbers


@dataclass(frozen=True, slots=True)
class Run(Generic[_Options]):
    """What a benchmark was asked for."""

    options: _Options
    overrides: list[str]  # of the training config
    known: Mapping[str, object]  # the head of its results: benchmark, arguments, machine

    @property
    def out(self) -> str:
        """The file of results; "" where none is wanted."""
        return str(getattr(self.options, "out", ""))

    def keep(self, content: Mapping[str, object]) -> None:
        """Writes what is there before all of it is."""
        write_results(self.out, {**self.known, **content})


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[_Options]):
    """A command that measures: a module below experiments.bench."""

    name: str  # of the module
    options: type[_Options]  # a dataclass: the arguments with their defaults
    measure: Callable[[Run[_Options]], Report]
    takes_overrides: bool = False
    one_thread: bool = True  # whether this process and those it starts compute with one thread each

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Measures, prints and writes; returns the exit code, 2 for wrong input."""
        words = sys.argv[1:] if arguments is None else arguments
        try:
            if {"-h", "--help"} & set(words):
                print_only(help_text(self.options))
            return self._run(words)
        except RlinfError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    def _run(self, words: Sequence[str]) -> int:
        options, overrides = split(self.options, words) if self.takes_overrides else (compose(self.options, words), [])
        if self.one_thread:
            use_one_thread_per_process()
        recorded = [word for word in words if not word.startswith(PRIVATE)]
        run = Run(options, overrides, {"benchmark": self.name, "arguments": recorded, "machine": machine()})
        with _sigterm_exits():
            report = self.measure(run)
        if report.text:
            print(report.text)
        report.write(run.out, run.known)
        return report.exit_code


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Within it SIGTERM raises SystemExit, so that a benchmark ends the processes that it started."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
        if name not in cases:
            raise ConfigError(f"{option} has {name!r}, but there are {', '.join(cases)}: use some of these")
    return {name: cases[name] for name in wanted}


def use_one_thread_per_process() -> None:
    """Pins this process, and those it starts, to one thread each; call it before a renderer is opened."""
    for name in ONE_THREAD:
        os.environ[name] = "1"
    if "torch" in sys.modules:  # which has read the variables already
        sys.modules["torch"].set_num_threads(1)
