"""Decides when to replan: when measured seconds differ lastingly from the predicted ones.

A stage drifts when it takes over 15 % more (or less) than predicted in five iterations in a row.  Then the times of
all stages are scaled by the measurements, and the planner runs again.  Another plan must win by a margin, since
predictions are off by a few per cent, and must save more time in the remaining iterations than the switch takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlinf_embodied.planning.explain import SEARCH_S, rank
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate

THRESHOLD = 0.15  # of the prediction
STREAK = 5  # iterations in a row
MARGIN = 0.05  # smallest saving for which the plan changes, as a fraction of the present plan's time
_LEAST_S = 0.02  # drift of a stage that takes less per iteration is ignored


@dataclass(slots=True)
class DriftWatch:
    """Compares each iteration with the prediction and keeps the ratios since the last change of plan."""

    predicted_s: Mapping[str, float]  # by stage, on its busiest device
    expected_rounds: Mapping[str, float] = field(default_factory=dict)  # by loop stage, of its repeat
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def observe(self, measured_s: Mapping[str, float], rounds: Mapping[str, int] | None = None) -> None:
        """Records the seconds of an iteration, of each stage's busiest worker, and the rounds of repeated stages.

        Seconds are scaled to the expected number of rounds, so that additional rounds do not count as drift.
        """
        for stage, expected_s in self.predicted_s.items():
            if stage not in measured_s or expected_s <= 0:
                continue
            usual = self.expected_rounds.get(stage, 1.0)
            share = usual / rounds[stage] if rounds and rounds.get(stage) else 1.0
            self.ratios.setdefault(stage, []).append(measured_s[stage] * share / expected_s)

    def drifted(self) -> dict[str, float]:
        """Returns the median ratio of each stage whose last STREAK ratios are beyond the threshold on one side."""
        drifted = {}
        for stage, ratios in self.ratios.items():
            last = ratios[-STREAK:]
            differs = all(r > 1 + THRESHOLD for r in last) or all(r < 1 - THRESHOLD for r in last)
            matters = self.predicted_s[stage] * max(1.0, statistics.median(last)) >= _LEAST_S
            if len(last) == STREAK and differs and matters:
                drifted[stage] = statistics.median(last)
        return drifted

    def factors(self) -> dict[str, float]:
        return {stage: statistics.median(ratios[-STREAK:]) for stage, ratios in self.ratios.items()}


@dataclass(frozen=True, slots=True)
class Replanned:
    """The result of replanning."""

    pricer: Pricer  # with the scaled profile
    stays_s: float  # predicted seconds per iteration of the old plan, with that profile
    plan: Plan | None  # a better plan; None: keep the old one


def replan(
    pricer: Pricer, plan: Plan, factors: Mapping[str, float], remaining: int, switch_s: float, limit_s: float = SEARCH_S
) -> Replanned:
    """Plans again with a profile scaled by the measurements; keeps the plan unless another one pays.

    The staleness does not change.  `factors` are measured over predicted seconds by stage, 1 for stages without one;
    `limit_s` limits the search.

    Raises:
        PlanError: no plan fits (memory is not scaled, so a plan that has run still fits).
    """
    stages = {n: replace(s, seconds=s.seconds * factors.get(n, 1.0)) for n, s in pricer.profile.stages.items()}
    scaled = pricer.with_(profile=replace(pricer.profile, stages=stages))
    stays_s = simulate(plan, scaled).iteration_s
    best = rank(scaled, min_staleness=plan.staleness, max_staleness=plan.staleness, search_s=limit_s).best
    saves_s = stays_s - best.iteration_s
    pays = saves_s > MARGIN * stays_s and saves_s * remaining > switch_s
    return Replanned(scaled, stays_s, replace(best.plan, name=f"auto: {best.label}") if pays else None)
