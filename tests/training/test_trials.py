"""Plans that a disturbed profile cannot tell apart: who is tried, in which order, and who stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlinf_embodied.planning.explain import Ranked
from rlinf_embodied.planning.plan import Item, Kind, Place, Plan
from rlinf_embodied.training.trials import Trials, doubted


def ranked(**seconds: float) -> list[Ranked]:
    plan = Plan("p", 1, (Item((Place("env", (0,)),)),))
    return [
        Ranked(replace(plan, name=name), Kind.collocated, value, {}, {}, 0.0, "env", 0.0, 0.0, 0.0)
        for name, value in seconds.items()
    ]


def run(trials: Trials, seconds: dict[str, list[float]]) -> list[str]:
    """Returns the plans in the order in which they run, until the trial is over and the winner goes on."""
    taken, name, ran = {plan: iter(values) for plan, values in seconds.items()}, trials.names[0], []
    while not trials.is_over:
        ran.append(name)
        name = trials.observe(name, next(taken[name]))
    return [*ran, name]


def test_plans_that_the_disturbance_may_have_put_behind_are_tried_and_others_are_not() -> None:
    plans = ranked(best=1.0, near=1.3, far=2.1)
    assert [entry.plan.name for entry in doubted(plans, 0.1)] == []  # 1.3 s less a tenth are 1.17 s
    assert [entry.plan.name for entry in doubted(plans, 0.25)] == ["near"]
    assert [entry.plan.name for entry in doubted(plans, 0.6)] == ["near", "far"]
    assert len(doubted(ranked(a=1.0, b=1.0, c=1.0, d=1.0), 0.5)) == 2


def test_each_of_two_plans_runs_twice_and_the_faster_one_stays() -> None:
    trials = Trials(("picked", "other"))
    assert trials.num_iterations == 4
    order = run(trials, {"picked": [1.7, 1.6], "other": [3.0, 1.0]})  # its first iteration does what is done once
    assert order == ["picked", "picked", "other", "other", "other"]
    assert trials.told() == "picked 1.60 s, other 1.00 s"


def test_of_three_plans_each_runs_once_so_that_the_fourth_iteration_is_the_fastest_plans() -> None:
    order = run(Trials(("a", "b", "c")), {"a": [1.0], "b": [0.9], "c": [1.1]})
    assert order == ["a", "b", "c", "b"]


@pytest.mark.parametrize("others", [1, 2])
def test_the_fastest_plan_runs_from_the_fifth_iteration_on_at_the_latest(others: int) -> None:
    assert Trials(tuple("abc"[: 1 + others])).num_iterations <= 4
