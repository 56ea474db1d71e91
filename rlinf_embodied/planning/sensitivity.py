"""How far the numbers of a profile can move before another kind of plan wins, and what coarse allocations cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.planner import Mode, find_plans
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import Profile, StageProfile
from rlinf_embodied.workflow.graph import Workflow

MODES = (Mode.temporal, Mode.hybrid, Mode.spatial)
FACTORS = (0.1, 0.33, 0.67, 0.8, 1.25, 1.5, 3.0, 10.0)


@dataclass(frozen=True, slots=True)
class TurningPoint:
    """A number of a profile, and the nearest factors (below and above 1) at which another mode wins, with that mode."""

    what: str
    below: tuple[float, Mode] | None
    above: tuple[float, Mode] | None


def times_by_mode(workflow: Workflow, profile: Profile, cluster: Cluster) -> dict[Mode, float]:
    """Returns the predicted seconds per iteration of the best plan of each mode; inf where there is none."""
    pricer = Pricer(workflow, profile, cluster)
    times = {}
    for mode in MODES:
        try:
            times[mode] = find_plans(pricer, mode, width=4)[0].iteration_s
        except PlanError:
            times[mode] = np.inf
    return times


def winner(times: dict[Mode, float]) -> Mode:
    """Returns the fastest mode."""
    return min(times, key=lambda mode: times[mode])


def turning_points(workflow: Workflow, profile: Profile, cluster: Cluster) -> list[TurningPoint]:
    """Returns, for every stage's seconds, fixed part and resident bytes, how far it can move until another wins."""
    now = winner(times_by_mode(workflow, profile, cluster))
    turns = []
    for name in profile.stages:
        for what, change in (("seconds", _slower), ("fixed seconds", _flatter), ("resident bytes", _larger)):
            ends = []
            for factors in (sorted((f for f in FACTORS if f < 1), reverse=True), [f for f in FACTORS if f > 1]):
                ends.append(_first_turn(workflow, profile, cluster, now, name, change, factors))
            turns.append(TurningPoint(f"{name}: {what}", *ends))
    return turns


def _first_turn(workflow, profile, cluster, now, name, change, factors: Sequence[float]) -> tuple[float, Mode] | None:
    """Returns the first factor at which another mode than `now` wins."""
    for factor in factors:
        stages = {**profile.stages, name: change(profile.stages[name], factor)}
        times = times_by_mode(workflow, replace(profile, stages=stages), cluster)
        if np.isfinite(min(times.values())) and winner(times) is not now:
            return factor, winner(times)
    return None


def _slower(stage: StageProfile, factor: float) -> StageProfile:
    return replace(stage, seconds=stage.seconds * factor)


def _flatter(stage: StageProfile, factor: float) -> StageProfile:
    """Scales what a call costs however few items it has: where the line through the first two points meets no items."""
    if len(stage.items_per_device) == 1:
        return replace(stage, seconds=stage.seconds * factor)
    (x0, x1), (y0, y1) = stage.items_per_device[:2], stage.seconds[:2]
    fixed = np.maximum(y0 - x0 * (y1 - y0) / (x1 - x0), 0.0)
    return replace(stage, seconds=stage.seconds + (factor - 1.0) * fixed)


def _larger(stage: StageProfile, factor: float) -> StageProfile:
    return replace(stage, resident_bytes=stage.resident_bytes * factor)
