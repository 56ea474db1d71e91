"""What the benchmarks share: arguments, medians with spread, ratios, goals, the machine, JSON, earlier runs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlinf_embodied.cluster.hardware import gpu_names, num_cores, processor
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.run_folder import git_revision, library_versions

_Case = TypeVar("_Case")
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")


def use_one_thread_per_process() -> None:
    """Pins this process, and those it starts, to one thread each; call it before torch or a renderer is imported."""
    for name in ONE_THREAD:
        os.environ[name] = "1"


def split_arguments(arguments: Sequence[str], own: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Returns (the benchmark's own `key=value` pairs over their defaults, the overrides of the training config).

    Raises:
        ConfigError: a value has not the type of its default.
    """
    values, overrides = dict(own), []
    for text in arguments:
        key, _, value = text.partition("=")
        if key not in own:
            overrides.append(text)
            continue
        kind = type(own[key])
        try:
            values[key] = int(value) if kind is int else value
        except ValueError:
            raise ConfigError(f"{key} is {value!r}, but it must be a {kind.__name__}: use {key}={own[key]}") from None
    return values, overrides


def chosen(names: str, cases: Mapping[str, _Case]) -> dict[str, _Case]:
    """Returns the cases of a list such as "serial,collocated-2", all of them for an empty one.

    Raises:
        ConfigError: there is no such case.
    """
    wanted = [name for name in names.split(",") if name] or list(cases)
    for name in wanted:
        if name not in cases:
            raise ConfigError(f"cases has {name!r}, but there are {', '.join(cases)}: use some of these")
    return {name: cases[name] for name in wanted}


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Returns median, smallest and largest."""
        numbers = list(values)
        return Spread(statistics.median(numbers), min(numbers), max(numbers), len(numbers))

    def __format__(self, form: str) -> str:
        """Formats each number, for example "12.0 (11.5-13.1)"."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio, and what it should reach."""

    name: str
    ratio: Spread  # of the rounds, each numerator over its own round's denominator
    goal: float
    floor: float | None = None

    def __str__(self) -> str:
        """Returns, for example, "(b) / (a): 31.20 (30.10-33.00), goal 20: reached"."""
        reached = self.ratio.median >= self.goal
        verdict = "reached" if reached else "missed"
        if not reached and self.floor is not None:
            verdict += f" (floor {self.floor:g}: {'held' if self.ratio.median >= self.floor else 'missed'})"
        return f"{self.name}: {self.ratio:.2f}, goal {self.goal:g}: {verdict}"

    def to_json(self) -> dict[str, object]:
        """Returns plain values."""
        return {**asdict(self), "reached": self.ratio.median >= self.goal}


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Returns the spread of the quotients round by round, which shares whatever slowed a round as a whole."""
    return Spread.of(a / b for a, b in zip(above, below, strict=True))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns; the first one flushes left."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([aligned[0], "-" * len(aligned[0]), *aligned[1:]])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def machine() -> dict[str, object]:
    """Returns what the numbers were measured on, and how busy it was."""
    return {
        "processor": processor() or platform.machine(),
        "cores": num_cores(),
        "gpus": gpu_names(),
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "load_average": list(os.getloadavg()),
        "versions": library_versions(),
        "git_revision": git_revision(),
    }


def write_results(out: str, content: Mapping[str, object]) -> None:
    """Writes JSON to `out` (.json where it has no suffix), unless it is empty, and says so."""
    if not out:
        return
    path = Path(out) if Path(out).suffix else Path(out).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, default=_plain) + "\n", encoding="utf-8")
    print(f"written to {path}")


def earlier_results(path: str, benchmark: str) -> dict[str, Any]:
    """Returns what an earlier run of a benchmark wrote, to be joined with this one's; {} for an empty path.

    Raises:
        ConfigError: it cannot be read, or is another benchmark's.
    """
    if not path:
        return {}
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"join is {path!r}, which cannot be read ({error}): give an earlier out=<file>") from error
    if not isinstance(found, dict) or found.get("benchmark") != benchmark:
        raise ConfigError(f"join is {path!r}, which benchmark {benchmark!r} did not write: give an earlier out=<file>")
    return found


def joined(own: Mapping[str, object], earlier: Mapping[str, Any], kept: Sequence[str]) -> dict[str, object]:
    """Returns what is known of this run, and under "joined" the same of the run that the results `kept` are from."""
    known = {key: earlier[key] for key in ("arguments", "machine", "joined") if key in earlier}
    return {**own, "joined": known | {"kept": list(kept)}} if kept else dict(own)


def commands(script: str, run: Mapping[str, Any]) -> str:
    """Returns the commands of a run, and of those that it was joined with, as a paragraph of Markdown."""
    words = " ".join(["python", f"experiments/{script}", *run["arguments"]]) if "arguments" in run else ""
    text = (f"`{words}`" if words else "a run whose command is not recorded") + (
        f" ({', '.join(run['kept'])})" if "kept" in run else ""
    )
    return f"{text}, joined with {commands(script, run['joined'])}" if "joined" in run else text


def _plain(value: object) -> object:
    if isinstance(value, Goal):
        return value.to_json()
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
