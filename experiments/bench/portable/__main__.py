"""What portable bits cost: the same small runs with run.exact=exact and run.exact=portable, alternating.

python -m experiments.bench.portable [rounds=3] [repeats=5] [parts=clone,ppo,language] [out=portable.json]

    clone      an epoch of cloning the whole policy (convolutions forward and backward) from random pictures
    ppo        the policy's side of an iteration: act on every chunk-step, then the epochs of the update
    language   an iteration of GRPO on the default tiny model (generation, rewards, update)

Each arm is a process of its own, since what is pinned cannot be undone; seconds are CPU seconds of that process,
medians of `repeats` after one that is not counted.  Ratios are of neighbouring rounds: portable over exact.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import cast

from experiments.bench.harness import Benchmark, Report, Run, Spread, Worker, alternate, chosen, ratios
from experiments.bench.portable.arm import Arm

PARTS = ("clone", "ppo", "language")
ARMS = ("exact", "portable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    rounds: int = 3
    repeats: int = 5
    parts: str = ",".join(PARTS)
    out: str = ""


def seconds(arm: str, part: str, repeats: int) -> float:
    """Returns the CPU seconds of a part in a fresh process."""
    worker = Worker(Arm, arm)
    try:
        return cast(float, worker.ask("seconds", part, repeats).answer())
    finally:
        worker.close()


def measure(run: Run[Options]) -> Report:
    """Measures part by part."""
    own, content = run.options, {}
    for part in chosen(own.parts, dict.fromkeys(PARTS), "parts"):
        found = alternate({arm: partial(seconds, arm, part, own.repeats) for arm in ARMS}, own.rounds, quiet=True)
        ratio, (exact, portable) = ratios(found["portable"], found["exact"]), map(Spread.of, found.values())
        content[part] = found | {"ratio": ratio}
        print(f"{part}: exact {exact.median:.3f} s, portable {portable.median:.3f} s, ratio {ratio:.2f}", flush=True)
    return Report(content=content)


BENCHMARK = Benchmark("portable", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
