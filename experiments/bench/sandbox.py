"""How many programs the sandbox runs per second of processor time, of itself, its servers and the programs.

python -m experiments.bench.sandbox [programs=200] [threads=2]

The program reads numbers, sorts and sums them, as most solutions to code problems do.  Processor time does not contain
other work on the machine, nor what the kernel does later to remove namespaces.
"""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlinf_embodied.command_line import main
from rlinf_embodied.reasoning.sandbox import Sandbox

PROGRAM = """
import sys
from collections import Counter
rows = [tuple(map(int, line.split())) for line in sys.stdin]
print(sum(sorted(a * b for a, b in rows)), Counter(a for a, _ in rows).most_common(1)[0][0])
"""
NUMBERS = "".join(f"{k % 17} {k}\n" for k in range(500))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    programs: int = 200
    threads: int = 2


def cpu_s() -> float:
    """Returns the processor seconds of this process and of all that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(own: Options) -> None:
    """Prints programs per second of processor time and of the clock."""
    before_s, start_s, sandbox = cpu_s(), time.monotonic(), Sandbox()
    with ThreadPoolExecutor(own.threads) as threads:
        found = list(threads.map(lambda _: sandbox.run(PROGRAM, NUMBERS), range(own.programs)))
    wall_s = time.monotonic() - start_s
    sandbox.close()  # so that the servers are counted
    used_s = cpu_s() - before_s
    right = sum(one.status == "ok" and one.stdout.split()[1] == "0" for one in found)
    print(
        f"{right} of {own.programs} programs right; {own.programs / used_s:.0f} per second of processor time, "
        f"{1e3 * used_s / own.programs:.1f} ms each; {own.programs / wall_s:.0f} per second with {own.threads} threads"
    )


if __name__ == "__main__":
    main(measure, Options)
