"""Decides when to replan: when measured seconds stay away from the predicted ones.

A stage drifts when it takes over 15 % more (or less) than predicted in five iterations in a row.  Then every stage's
times are scaled by what was measured, and the planner is asked again; another plan has to win by a margin, since
predictions are a few per cent off, and to save more in the iterations that remain than the switch itself takes.
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
MARGIN = 0.05  # of the present plan's time, that another one has to save
_LEAST_S = 0.02  # a stage that takes less per iteration is never a reason


@dataclass(slots=True)
class DriftWatch:
    """Compares each iteration with the prediction and remembers the ratios since the last plan."""

    predicted_s: Mapping[str, float]  # by stage, on its busiest device
    expected_rounds: Mapping[str, float] = field(default_factory=dict)  # by loop stage, of its repeat
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def observe(self, measured_s: Mapping[str, float], rounds: Mapping[str, int] | None = None) -> None:
        """Takes the seconds of an iteration: of the busiest worker of each stage, and the rounds of repeated ones.

        A repeat that took more rounds than usual does not make its stages slower.
        """
        for stage, expected_s in self.predicted_s.items():
            if stage not in measured_s or expected_s <= 0:
                continue
            usual = self.expected_rounds.get(stage, 1.0)
            share = usual / rounds[stage] if rounds and rounds.get(stage) else 1.0
            self.ratios.setdefault(stage, []).append(measured_s[stage] * share / expected_s)

    def drifted(self) -> dict[str, float]:
        """Returns the stages whose last STREAK ratios all left the threshold on the same side, with the median one."""
        found = {}
        for stage, ratios in self.ratios.items():
            last = ratios[-STREAK:]
            apart = all(r > 1 + THRESHOLD for r in last) or all(r < 1 - THRESHOLD for r in last)
            weighs = self.predicted_s[stage] * max(1.0, statistics.median(last)) >= _LEAST_S
            if len(last) == STREAK and apart and weighs:
                found[stage] = statistics.median(last)
        return found

    def factors(self) -> dict[str, float]:
        return {stage: statistics.median(ratios[-STREAK:]) for stage, ratios in self.ratios.items()}


@dataclass(frozen=True, slots=True)
class Replanned:
    """What planning again has found."""

    pricer: Pricer  # with the scaled profile
    stays_s: float  # what the old plan would take by it
    plan: Plan | None  # a better one


def replan(
    pricer: Pricer, plan: Plan, factors: Mapping[str, float], remaining: int, switch_s: float, limit_s: float = SEARCH_S
) -> Replanned:
    """Plans again with a profile scaled by what was measured; keeps the plan unless another one pays.

    The staleness stays what it is.  `factors` say by stage how much longer than predicted it took, 1 where none is
    given; `limit_s` is the search's.

    Raises:
        PlanError: nothing fits any more (memory is not scaled, so a plan that ran still does).
    """
    stages = {n: replace(s, seconds=s.seconds * factors.get(n, 1.0)) for n, s in pricer.profile.stages.items()}
    again = pricer.with_(profile=replace(pricer.profile, stages=stages))
    stays_s = simulate(plan, again).iteration_s
    best = rank(again, min_staleness=plan.staleness, max_staleness=plan.staleness, search_s=limit_s).best
    saves_s = stays_s - best.iteration_s
    pays = saves_s > MARGIN * stays_s and saves_s * remaining > switch_s
    return Replanned(again, stays_s, replace(best.plan, name=f"auto: {best.label}") if pays else None)
