"""A lasting drift plans again; a short one, a growing one within the limit, and other amounts of work do not."""

from __future__ import annotations

import pytest
from plan_cases import cluster, embodied, profile, stage

from rlinf_embodied.planning import drift
from rlinf_embodied.planning.drift import MARGIN, STREAK, DriftWatch, replan
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.plan import collocated
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate

pytestmark = pytest.mark.usefixtures("few_moves")

USUAL = {"env": 6.0, "policy": 2.0, "actor": 2.0}


def watched(*env_s: float, rounds: int | None = None) -> DriftWatch:
    watch = DriftWatch(USUAL, {"env": 1.0})
    for seconds in env_s:
        counted = None if rounds is None else {"env": rounds}
        watch.observe({"env": seconds, "policy": 2.0, "actor": 2.1}, counted)
    return watch


def test_five_iterations_above_the_threshold_are_a_drift() -> None:
    assert watched(*[7.2] * STREAK).drifted() == {"env": pytest.approx(1.2)}
    assert watched(*[4.0] * STREAK).drifted() == {"env": pytest.approx(4 / 6)}
    assert watched(6.0, 6.0, *[9.0] * STREAK).factors() == {
        "env": pytest.approx(1.5),
        "policy": pytest.approx(1.0),
        "actor": pytest.approx(1.05),
    }


@pytest.mark.parametrize(
    "env_s", [[7.2] * (STREAK - 1), [7.2, 7.2, 6.5, 7.2, 7.2], [6.8] * 9, [7.2, 4.0, 7.2, 4.0, 7.2], [9.0] * 4 + [6.0]]
)
def test_shorter_smaller_or_wavering_deviations_are_none(env_s: list[float]) -> None:
    assert watched(*env_s).drifted() == {}


def test_more_rounds_of_a_repeat_are_more_work_and_no_drift() -> None:
    assert watched(*[12.0] * STREAK, rounds=2).drifted() == {}
    assert watched(*[12.0] * STREAK).drifted() != {}


def test_a_stage_of_milliseconds_is_never_a_reason() -> None:
    watch = DriftWatch({"env": 0.001}, ratios={"env": [2.0] * STREAK})
    assert watch.drifted() == {}


def flat_env() -> Pricer:
    """Two devices; policy and actor lose by being spread, so that only a slow env makes the rollout use both."""
    grid = {"items_per_device": [4, 8], "devices": [1, 2]}
    stages = {
        "env": stage(0.01, 0.001, loop=True),
        "policy": grid | {"s_per_chunk_step": [[0.014, 0.08], [0.018, 0.12]]},
        "actor": grid | {"s_per_call": [[0.5, 1.5], [1.0, 3.0]]},
    }
    work, _ = embodied((0, 0), (0, 0), (0, 0), blocks=8, steps=4)
    return Pricer(work, profile(stages), cluster(2))


def test_a_slower_simulator_moves_the_rollout_to_both_devices_where_that_pays_in_the_iterations_left() -> None:
    pricer = flat_env()
    best, factors = rank(pricer).best, {"env": 60.0}
    assert len(best.plan.places()["env"].devices) == 1
    found = replan(pricer, best.plan, factors, 10, 1.0)
    assert found.plan is not None
    assert found.plan.places()["env"].devices == (0, 1)
    saves_s = found.stays_s - simulate(found.plan, found.pricer).iteration_s
    assert saves_s > MARGIN * found.stays_s
    assert replan(pricer, best.plan, factors, 1, 1.01 * saves_s).plan is None  # one iteration before the end
    assert replan(pricer, best.plan, factors, 2, 1.01 * saves_s).plan


def test_a_machine_that_became_slower_as_a_whole_keeps_its_plan_with_a_new_prediction() -> None:
    pricer = flat_env()
    best = rank(pricer).best
    found = replan(pricer, best.plan, {"env": 2.0, "policy": 2.0, "actor": 2.0}, 10, 1.0)
    assert found.plan is None
    assert found.stays_s == pytest.approx(2 * best.iteration_s)


def test_planning_again_keeps_to_the_limit_of_the_search(monkeypatch) -> None:
    pricer, limits = flat_env(), []
    monkeypatch.setattr(drift, "rank", lambda *asked, **options: limits.append(options["search_s"]) or rank(*asked))
    replan(pricer, collocated(pricer.workflow, 2), {}, 10, 1.0, 0.25)
    assert limits == [0.25]


def test_another_plan_has_to_win_by_a_margin(monkeypatch) -> None:
    pricer = flat_env()
    present, best = collocated(pricer.workflow, 2), rank(pricer).best
    saved = 1 - best.iteration_s / simulate(present, pricer).iteration_s
    for margin, wins in ((0.9 * saved, True), (1.1 * saved, False)):
        monkeypatch.setattr(drift, "MARGIN", margin)
        assert bool(replan(pricer, present, {}, 1000, 0.0).plan) is wins
