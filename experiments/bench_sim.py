"""Env steps per second of ManiSkill's CPU env and of the batched one, and the physics and pictures they cannot beat.

python experiments/bench_sim.py [rounds=6] [sizes=1,8,32,128] [task=PickCube-v1] [out=docs/results/simulator.json]

One run, alternating rounds, one thread per process, the same random actions, resets included (every 50 steps):

    state   observation, reward and info in every step, through ManiSkillVectorEnv (envs.vector.make_vec)
    rgb     stock renders 64 x 64 in every step, original meshes; batched as in training: decimated meshes, one
            observation per 5 steps (envs.maniskill.make_env)

for two control modes and N rows.  "PhysX" is the time within the same run's calls of SAPIEN's step; "pictures" that of
its renderer; the rest is Python.  Then one observation, one row's reset, two processes, and two threads in one process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench_report import (
    Goal,
    Spread,
    machine,
    ratios,
    split_arguments,
    table,
    use_one_thread_per_process,
    write_results,
)

from rlinf_embodied.errors import ConfigError, RlinfError, WorkerError

if TYPE_CHECKING:
    from bench_sim_parts import Timing

OWN = {"rounds": 6, "sizes": "1,8,32,128", "task": "PickCube-v1", "out": ""}
CONTROLS = ("pd_joint_delta_pos", "pd_ee_delta_pose")
MODES = ("state", "rgb")
SIZE = 32  # rows that the goals speak of
PHYSX_GOALS = {"pd_joint_delta_pos": (0.8, 0.77), "pd_ee_delta_pose": (0.7, 0.58)}
RGB_GOALS = {"pd_joint_delta_pos": (45.0, 39.0), "pd_ee_delta_pose": (45.0, 33.0)}
OBSERVATION_MS = (1.2, 1.9)
Rounds = dict[str, list["Timing"]]


class Process:
    """A process that measures pieces by name; see bench_sim_parts.serve."""

    def __init__(self, task: str) -> None:
        from bench_sim_parts import serve

        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, task), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *piece: object) -> Process:
        """Starts a measurement."""
        self._pipe.send(piece)
        return self

    def answer(self) -> Timing:
        """Waits for it."""
        try:
            return self._pipe.recv()
        except EOFError:
            raise WorkerError("a process of the benchmark died: its error stands above") from None

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join()


def measure(task: str, rounds: int, sizes: Sequence[int]) -> Rounds:
    """Returns the timings of every piece by round."""
    first, second = Process(task), Process(task)
    timings: Rounds = {}

    def keep(name: str, timing: Timing) -> None:
        timings.setdefault(name, []).append(timing)

    try:
        for number in range(-1, rounds):  # the first round builds the envs and is not kept
            for mode in MODES:
                for control in CONTROLS:
                    for n in (0, *sizes):
                        keep(f"{mode} {control} {n}", first.ask("steps", mode, control, n).answer())
            for what in ("pictures", "rgb observation", "reset one", "reset all"):
                keep(what, first.ask(what, CONTROLS[0], SIZE).answer())
            keep("two threads", first.ask("steps", "state", CONTROLS[0], SIZE, 2).answer())
            for mode in MODES:
                several = [process.ask("steps", mode, CONTROLS[0], SIZE) for process in (first, second)]
                keep(f"{mode} two processes", _together([process.answer() for process in several]))
            if number < 0:
                timings.clear()
            else:
                print(f"round {number + 1}/{rounds}", flush=True)
    finally:
        first.close()
        second.close()
    return timings


def _together(timings: Sequence[Timing]) -> Timing:
    from bench_sim_parts import Timing

    return Timing(max(t.seconds for t in timings), sum(t.env_steps for t in timings))


def rates(timings: Sequence[Timing]) -> list[float]:
    """Returns env steps per second by round."""
    return [t.env_steps / t.seconds for t in timings]


def share(timings: Sequence[Timing], *parts: str) -> Spread:
    """Returns the share of these parts of the time."""
    return Spread.of(sum(t.parts[part] for part in parts) / t.seconds for t in timings)


def goals(timings: Rounds) -> list[Goal]:
    """Returns what was to be reached at 32 rows, and whether it is."""
    found = []
    for control, (goal, floor) in PHYSX_GOALS.items():
        name = f"state {control} {SIZE}"
        found.append(Goal(f"{name}: of the rate of PhysX alone", share(timings[name], "physx"), goal, floor))
    for control, (goal, floor) in RGB_GOALS.items():
        fast, stock = timings[f"rgb {control} {SIZE}"], timings[f"rgb {control} 0"]
        found.append(Goal(f"rgb {control} {SIZE}: times stock", ratios(rates(fast), rates(stock)), goal, floor))
    limit, floor = OBSERVATION_MS
    for what in ("pictures", "rgb observation"):
        per_s = rates(timings[what])
        name = f"{what}: {limit} ms over one observation"
        found.append(Goal(name, Spread.of(limit * rate / 1e3 for rate in per_s), 1.0, limit / floor))
    for mode in MODES:
        one, two = timings[f"{mode} {CONTROLS[0]} {SIZE}"], timings[f"{mode} two processes"]
        found.append(Goal(f"{mode}: two processes over one", ratios(rates(two), rates(one)), 1.85))
    return found


def report(timings: Rounds, sizes: Sequence[int]) -> Mapping[str, object]:
    """Prints what was measured and returns it."""
    rows, shares = [], {}
    for mode in MODES:
        for control in CONTROLS:
            stock = rates(timings[f"{mode} {control} 0"])
            rows.append((f"{mode} {control}, stock", f"{Spread.of(stock):.0f}", "1", "", "", ""))
            for n in sizes:
                name = f"{mode} {control} {n}"
                several = timings[name]
                parts = {part: share(several, part) for part in ("physx", "pictures")}
                shares[name] = {**parts, "limit": share(several, "physx", "pictures")}
                times = ratios(rates(several), stock)
                cells = (
                    f"{Spread.of(rates(several)):.0f}",
                    f"{times:.1f}",
                    *(f"{s.median:.2f}" for s in parts.values()),
                )
                rows.append((f"{mode} {control}, N = {n}", *cells, f"{shares[name]['limit']:.2f}"))
    header = ("env steps/s, one core", "median (min-max)", "times stock", "PhysX", "pictures", "of the limit")
    print(table(header, rows), end="\n\n")
    each = {name: Spread.of(1e3 / rate for rate in rates(timings[name])) for name in ("pictures", "rgb observation")}
    each |= {name: Spread.of(1e3 / rate for rate in rates(timings[name])) for name in ("reset one", "reset all")}
    print(table(("ms per env", "median (min-max)"), [(name, f"{s:.2f}") for name, s in each.items()]), end="\n\n")
    one, two = (rates(timings[name]) for name in (f"state {CONTROLS[0]} {SIZE}", "two threads"))
    threads = ratios(two, one)
    print(f"two threads in one process over one, state {CONTROLS[0]} {SIZE}: {threads:.2f}")
    reached = goals(timings)
    print("\n".join(str(goal) for goal in reached))
    speed = {name: Spread.of(rates(several)) for name, several in timings.items()}
    return {"per_s": speed, "shares": shares, "ms_per_env": each, "two_threads": threads, "goals": reached}


def main(arguments: Sequence[str]) -> int:
    try:
        own, unknown = split_arguments(arguments, OWN)
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no argument of this script: use {', '.join(OWN)}")
        sizes = sorted({SIZE, *(int(size) for size in str(own["sizes"]).split(","))})
        use_one_thread_per_process()
        before = machine()
        timings = measure(str(own["task"]), int(str(own["rounds"])), sizes)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    content = {"benchmark": "simulator", "arguments": list(arguments), "machine": before}
    write_results(str(own["out"]), content | dict(report(timings, sizes)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
