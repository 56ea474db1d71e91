"""Env steps per second of ManiSkill's CPU env and of the batched one, and the physics and pictures they cannot beat.

python -m experiments.bench.simulator [rounds=6] [sizes=1,8,32,128] [task=PickCube-v1] [out=docs/results/simulator.json]

One run, alternating rounds, one thread per process, the same random actions, resets included (every 50 steps):

    state   observation, reward and info in every step, through ManiSkillVectorEnv (envs.vector.make_vec)
    rgb     stock renders 64 x 64 in every step, original meshes; batched as in training: decimated meshes, one
            observation per 5 steps (envs.maniskill.make_env)

for two control modes and N rows.  "PhysX" is the time within the same run's calls of SAPIEN's step; "pictures" that of
its renderer; the rest is Python.  Then two processes at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from experiments.bench.harness import (
    Benchmark,
    Goal,
    Report,
    Run,
    Spread,
    Table,
    Timing,
    Worker,
    alternate,
    names_of,
    ratios,
)
from experiments.bench.simulator.parts import Bench

CONTROLS = ("pd_joint_delta_pos", "pd_ee_delta_pose")
MODES = ("state", "rgb")
SIZE = 32  # rows that the goals speak of
PHYSX_GOALS = {"pd_joint_delta_pos": (0.8, 0.77), "pd_ee_delta_pose": (0.7, 0.58)}
RGB_GOALS = {"pd_joint_delta_pos": (45.0, 39.0), "pd_ee_delta_pose": (45.0, 33.0)}
Rounds = Mapping[str, Sequence[Timing]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    rounds: int = 6
    sizes: str = "1,8,32,128"
    task: str = "PickCube-v1"
    out: str = ""


def measure(run: Run[Options]) -> Report:
    """Lets every piece take its turn in each round; the first round builds the envs and is not kept."""
    own = run.options
    sizes = sorted({SIZE, *(int(size) for size in names_of(own.sizes))})
    workers = [Worker(Bench, own.task), Worker(Bench, own.task)]

    def ask(number: int, piece: str, *arguments: object) -> Timing:
        asked = [worker.ask(piece, *arguments) for worker in workers[:number]]
        return Timing.together(cast(Timing, worker.answer()) for worker in asked)

    arms = {
        f"{mode} {control} {n}": partial(ask, 1, "steps", mode, control, n)
        for mode in MODES
        for control in CONTROLS
        for n in (0, *sizes)
    }
    arms |= {f"{mode} two processes": partial(ask, 2, "steps", mode, CONTROLS[0], SIZE) for mode in MODES}
    try:
        return report(alternate(arms, own.rounds, warm_up=1), sizes)
    finally:
        for worker in workers:
            worker.close()


def rates(timings: Sequence[Timing]) -> list[float]:
    """Returns env steps per second by round."""
    return [timing.rate for timing in timings]


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
    for mode in MODES:
        one, two = timings[f"{mode} {CONTROLS[0]} {SIZE}"], timings[f"{mode} two processes"]
        found.append(Goal(f"{mode}: two processes over one", ratios(rates(two), rates(one)), 1.85))
    return found


def report(timings: Rounds, sizes: Sequence[int]) -> Report:
    """Returns speeds with their shares, and goals."""
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
                cells = [f"{s.median:.2f}" for s in shares[name].values()]
                times = f"{ratios(rates(several), stock):.1f}"
                rows.append((f"{mode} {control}, N = {n}", f"{Spread.of(rates(several)):.0f}", times, *cells))
    header = ("env steps/s, one core", "median (min-max)", "times stock", "PhysX", "pictures", "of the limit")
    reached = goals(timings)
    speed = {name: Spread.of(rates(several)) for name, several in timings.items()}
    return Report(
        content={"per_s": speed, "shares": shares, "goals": reached},
        text="\n".join([f"{Table(header, rows)}\n", *map(str, reached)]),
    )


BENCHMARK = Benchmark("simulator", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
