"""For which costs hybrid, turns or spatial plans win the published ManiSkill workload: a phase diagram, predicted.

python -m experiments.bench.planner.phases [gpus=8] [columns=61] [rows=25] [out=docs/results/phases.json]

Across    seconds that each chunk-step costs where both sides of the rollout share their devices: the simulator and the
          policy leave the memory for each other, or messages pass through another process.  Our executor has no such
          cost (both are resident, and the loop is one call), so that it is added to the planner's prediction.
Up, left  seconds of a chunk-step that the simulator takes however few rows it has; the rows' share stays
Up, right bytes of the policy's weights

All other numbers are those of configs/profiles/maniskill_openvla.json, which names their sources.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from experiments.bench.harness import Benchmark, Report, Run, Table
from experiments.bench.planner.published import frozen, h100
from rlinf_embodied.errors import ConfigError, PlanError
from rlinf_embodied.planning.plan import LoopNode, Node, nodes
from rlinf_embodied.planning.planner import Mode, find_plans
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import Profile, StageProfile, workflow_for
from rlinf_embodied.planning.sensitivity import MODES

PROFILE = "maniskill_openvla"
MARGINS = (1.52, 1.69)  # by which hybrid was ahead of turns, arXiv 2509.15965
MOST_S = 4.0  # of the axis across
FIXED_S = (0.02, 2.0)  # of the simulator; 0.1 to 0.4 is what its sources leave open
WEIGHTS = (0.5, 4.0)  # times the policy's 16 GB
COLOURS = {Mode.temporal: "#c7d9e8", Mode.hybrid: "#f0cfa8", Mode.spatial: "#cbe3c4"}
_ROW_S = 3  # digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    gpus: int = 8
    columns: int = 61
    rows: int = 25
    out: str = ""


@dataclass(frozen=True, slots=True)
class Lines:
    """A mode's seconds per iteration as a function of the cost c: the lower of `shared_s + steps * c` and `apart_s`.

    `shared_s` is of its best plan in which both sides of the loop share devices, `apart_s` of the best other one; inf
    where there is none.
    """

    shared_s: float
    apart_s: float
    steps: float  # chunk-steps per iteration, all rounds

    def at(self, cost_s: float) -> float:
        """Returns the seconds where each chunk-step on shared devices costs so much."""
        return min(self.shared_s + self.steps * cost_s, self.apart_s)


# --------------------------------------------------------------------------------------------------------- one profile
def shares(tree: Node) -> bool:
    """Returns whether the sides of a loop share a device."""
    sides = [[set(leaf.devices) for leaf in node.stages] for node in nodes(tree) if isinstance(node, LoopNode)]
    return any(first & second for first, second in sides)


def lines_of(profile: Profile, gpus: int) -> dict[Mode, Lines]:
    """Returns what the planner predicts for the best plans of each mode."""
    pricer = Pricer(workflow_for(profile), profile, h100(gpus))
    steps = sum(loop.chunk_steps * loop.expected_rounds for loop in pricer.workflow.loops.values())
    found = {}
    for mode in MODES:
        try:
            plans = find_plans(pricer, mode)
        except PlanError:
            plans = []
        best = {True: np.inf, False: np.inf}
        for plan in plans:
            best[shares(plan.tree)] = min(best[shares(plan.tree)], plan.iteration_s)
        found[mode] = Lines(best[True], best[False], steps)
    return found


def winner(lines: Mapping[Mode, Lines], cost_s: float) -> Mode:
    """Returns the fastest mode."""
    return min(lines, key=lambda mode: lines[mode].at(cost_s))


def cost_for(lines: Mapping[Mode, Lines], margin: float) -> float:
    """Returns the cost at which the best turns take `margin` times what the best hybrid takes; hybrids stay apart."""
    turns, hybrid = lines[Mode.temporal], lines[Mode.hybrid]
    return (margin * hybrid.apart_s - turns.shared_s) / turns.steps


# ------------------------------------------------------------------------------------------------------- its variations
def fixed_s(stage: StageProfile) -> float:
    """Returns the seconds of a call without items, by the line through the first two points."""
    (x0, x1), (y0, y1) = stage.items_per_device[:2], stage.seconds[:2, 0]
    return float(y0 - x0 * (y1 - y0) / (x1 - x0))


def with_fixed(profile: Profile, seconds: float) -> Profile:
    """Returns the profile with another fixed part of the simulator's seconds."""
    env = profile.stages["env"]
    changed = replace(env, seconds=env.seconds + (seconds - fixed_s(env)))
    return replace(profile, stages={**profile.stages, "env": changed})


def with_weights(profile: Profile, factor: float) -> Profile:
    """Returns the profile with so many times the policy's resident bytes."""
    policy = profile.stages["policy"]
    changed = replace(policy, resident_bytes=policy.resident_bytes * factor)
    return replace(profile, stages={**profile.stages, "policy": changed})


def switch_s(profile: Profile) -> float:
    """Returns the seconds in which simulator and policy leave a device for each other and come back."""
    return sum(profile.stages[name].offload_s + profile.stages[name].onload_s for name in ("env", "policy"))


# ----------------------------------------------------------------------------------------------------------- the report
@dataclass(frozen=True, slots=True)
class Panel:
    """A diagram: winners [rows, columns]."""

    title: str
    values: tuple[float, ...]  # up
    costs_s: tuple[float, ...]  # across
    winners: tuple[tuple[str, ...], ...]
    lines: tuple[dict[str, Lines], ...]  # by mode, for each value


def panel(title: str, profiles: Mapping[float, Profile], gpus: int, columns: int) -> Panel:
    """Returns who wins for each value of `profiles` and each cost."""
    costs = tuple(np.linspace(0.0, MOST_S, columns).tolist())
    lines = [lines_of(profile, gpus) for profile in profiles.values()]
    won = tuple(tuple(str(winner(row, cost)) for cost in costs) for row in lines)
    return Panel(title, tuple(profiles), costs, won, tuple({str(m): line for m, line in row.items()} for row in lines))


def measure(run: Run[Options]) -> Report:
    """Plans every row.

    Raises:
        ConfigError: gpus is no number of whole nodes.
    """
    own, profile = run.options, frozen(PROFILE)
    if own.gpus < 8 or own.gpus % 8:
        raise ConfigError(f"gpus is {own.gpus}, but nodes have 8 each: use a multiple of 8")
    fixed = np.geomspace(*FIXED_S, own.rows).tolist()
    weights = np.linspace(*WEIGHTS, own.rows).tolist()
    panels = [
        panel("fixed seconds of the simulator", {f: with_fixed(profile, f) for f in fixed}, own.gpus, own.columns),
        panel("bytes of the policy, x 16 GB", {w: with_weights(profile, w) for w in weights}, own.gpus, own.columns),
    ]
    here = lines_of(profile, own.gpus)
    margins = {margin: cost_for(here, margin) for margin in (1.0, *MARGINS)}
    rows = [
        (f"hybrid is {margin:.2f} times as fast as turns", f"{cost:.{_ROW_S}g}") for margin, cost in margins.items()
    ]
    rows.append(
        ("simulator and policy leave for each other and come back, by the profile", f"{switch_s(profile):.{_ROW_S}g}")
    )
    table = Table((f"on {own.gpus} GPUs", "seconds per chunk-step"), rows)
    content = {
        "profile": PROFILE,
        "cost_s_by_margin": {str(margin): cost for margin, cost in margins.items()},
        "switch_s": switch_s(profile),
        "lines": {str(mode): asdict(line) for mode, line in here.items()},
        "rows": {
            one.title: [
                {"value": value, **{mode: asdict(line) for mode, line in lines.items()}}
                for value, lines in zip(one.values, one.lines, strict=True)
            ]
            for one in panels
        },
    }
    return Report(content=content, text=str(table), draw=partial(draw, panels, profile, margins))


def draw(panels: Sequence[Panel], profile: Profile, margins: Mapping[float, float], path: Path) -> None:
    """Draws who wins, the frozen profile, and where the published margin lies."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 4.4))
    modes, places = list(COLOURS), (fixed_s(profile.stages["env"]), 1.0)
    low, high = (margins[margin] for margin in MARGINS)
    for number, (one, place) in enumerate(zip(panels, places, strict=True)):
        axes = figure.add_subplot(1, 2, number + 1)
        grid = [[modes.index(Mode(name)) for name in row] for row in one.winners]
        colours, steps = ListedColormap([COLOURS[mode] for mode in modes]), BoundaryNorm(range(4), 3)
        axes.pcolormesh(one.costs_s, one.values, grid, cmap=colours, norm=steps, shading="nearest")
        axes.plot([low, high], [place, place], "k-", lw=4, solid_capstyle="butt")
        axes.plot([0.0], [place], "ko", clip_on=False, ms=7)
        axes.axvline(switch_s(profile), color="0.35", ls=":", lw=1)
        axes.set(xlabel="cost of a chunk-step on shared devices, s", ylabel=one.title)
        if number == 0:
            axes.set_yscale("log")
            axes.axhspan(0.1, 0.4, color="0.2", alpha=0.07)
    marks = [Patch(color=COLOURS[mode], label=f"{mode} wins") for mode in modes]
    (dot,) = axes.plot([], [], "ko", label="our executor, frozen profile")
    (bar,) = axes.plot([], [], "k-", lw=4, label="published: hybrid 1.52 to 1.69 x turns")
    (dotted,) = axes.plot([], [], color="0.35", ls=":", label="a switch of both by the profile")
    figure.legend(handles=[*marks, dot, bar, dotted], loc="upper center", ncol=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.87))
    figure.savefig(path, dpi=120)


BENCHMARK = Benchmark("planner.phases", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
