"""Rollouts that run ahead: prices with arithmetic, the search, and rules; tools/test_emulation.py compares any plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import plan_cases as planning
import pytest
from plan_cases import parse

from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.drift import replan
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.workflow.graph import Edge, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow


def seconds_of(plan: Plan, pricer: Pricer, staleness: int = 0) -> float:
    return simulate(replace(plan, staleness=staleness), pricer).iteration_s


# ----------------------------------------------------------------------------------------------- prices with arithmetic
def halves() -> tuple[Pricer, Plan]:
    """Four devices.  Rollout on two of them: 8 blocks, 4 steps of 1 s per block and side: 4 * (4 + 4) = 32 s.

    Actor on the other two: 12 s per block: 48 s.
    """
    work, measured = planning.embodied((0, 1), (0, 1), (0, 12))
    return Pricer(work, measured, planning.cluster(4)), parse("env+policy on 0-1 > actor on 2-3", 4, work)


def test_apart_front_and_back_take_as_long_as_the_slower_of_them() -> None:
    pricer, plan = halves()
    assert [seconds_of(plan, pricer, k) for k in (0, 1, 2)] == pytest.approx([80.0, 48.0, 48.0])
    run = simulate(replace(plan, staleness=1), pricer, traced=True)
    assert run.idle_share(0) == pytest.approx(1 - 32 / 48)
    assert {(s.stage, s.start_s, s.end_s) for s in run.spans} >= {("actor", 0.0, 48.0)}


def test_a_stage_between_that_takes_no_weights_gains_by_a_second_iteration(few_moves) -> None:
    """Generation, reward and actor of 10 s on a device each.

    Fresh: 30 s.  One ahead: generation i + 1 and then reward i + 1 go beside actor i, but a run ends with actor and
    generation: actor i + 1 waits for what is left of reward i + 1, r s, a run takes 10 + r, and r is 10 - r of the run
    before: 15 s on average.  Two ahead: reward i + 1 has a separate run: 10 s.
    """
    chain = [("generation", "reward"), ("reward", "actor")]
    names = ("generation", "reward", "actor")
    work = planning.graph(names, chain, whole=True, weight_edges=(WeightEdge("actor", "generation"),))
    pricer = Pricer(work, planning.profile({name: planning.stage(10, 0) for name in names}), planning.cluster(3))
    plan = parse("generation on 0 > reward on 1 > actor on 2", 3, work)
    assert [seconds_of(plan, pricer, k) for k in range(4)] == pytest.approx([30.0, 15.0, 10.0, 10.0])
    assert rank(pricer, max_staleness=3).best.plan.staleness == 2


def test_data_that_waits_is_held() -> None:
    """8 blocks; the policy's data: 1e9 bytes per item on each of 2 devices with 4 blocks; 2e9 for a stage behind it."""
    pricer, plan = halves()
    edges = {("policy", "actor"): 1e9, ("env", "actor"): 2e9}
    pricer = pricer.with_(profile=replace(pricer.profile, edge_bytes_per_item=edges))
    held = [pricer.memory(replace(plan, staleness=k)) for k in (0, 1, 2)]
    assert [after[0] - before[0] for before, after in itertools.pairwise(held)] == pytest.approx([12e9, 12e9])
    assert [memory[2] for memory in held] == [held[0][2]] * 3


# ----------------------------------------------------------------------------------------------------------- the search
def flat(actor_s: float = 40.0) -> Pricer:
    """Every stage takes as long on one device as on two: only running ahead makes use of the other."""
    work, measured = planning.embodied((5, 0), (5, 0), (actor_s, 0))
    return Pricer(work, measured, planning.cluster(2))


def test_a_plan_that_runs_ahead_is_found_where_it_pays(few_moves) -> None:
    # rollout: 4 * (5 + 5) = 40 s, actor 40 s; one after the other 80 s, ahead of each other 40 s
    fresh, stale = rank(flat()).best, rank(flat(), max_staleness=1).best
    assert (fresh.plan.staleness, fresh.iteration_s) == (0, pytest.approx(80.0))
    assert (stale.plan.staleness, stale.iteration_s) == (1, pytest.approx(40.0))
    assert rank(flat(), max_staleness=2).best.plan.staleness == 1  # more gains nothing


def test_a_larger_staleness_has_to_save_a_twentieth(few_moves) -> None:
    # the actor takes 2 s beside 40: 42 s fresh, 40 s ahead: 4.8 %; 2.2 s: 5.2 %
    plans = rank(flat(2.0), max_staleness=1).plans
    assert (plans[0].plan.staleness, plans[0].iteration_s) == (0, pytest.approx(42.0))
    assert (plans[1].plan.staleness, plans[1].iteration_s) == (1, pytest.approx(40.0))
    assert plans[1].why_not.startswith("saves 4.8%, but a larger staleness has to save 5%")
    assert plans[1].label.endswith("; staleness 1")
    assert rank(flat(2.2), max_staleness=1).best.plan.staleness == 1


def test_memory_bounds_how_far_a_front_runs_ahead(few_moves) -> None:
    # 8 items of 1 GB wait on the policy's device; 10 GB hold one set of them, not two
    work, measured = planning.embodied((5, 0), (5, 0), (40, 0))
    measured = replace(measured, edge_bytes_per_item={("policy", "actor"): 1e9})
    pricer = Pricer(work, measured, planning.cluster(2, 10e9))
    for entry in rank(pricer, min_staleness=1, max_staleness=1).plans:
        assert entry.peak_bytes <= 10e9
    with pytest.raises(PlanError, match=r"GB short: .* or a smaller staleness"):
        rank(pricer, min_staleness=3, max_staleness=3)


def test_a_better_plan_keeps_the_staleness(few_moves) -> None:
    pricer = flat()
    worst = rank(pricer, min_staleness=1, max_staleness=1).plans[-1].plan
    better = replan(pricer, worst, {}, 1000, 0.0).plan
    assert better is not None
    assert better.staleness == worst.staleness == 1
    assert better.items != worst.items


# ---------------------------------------------------------------------------------------------------------------- rules
def test_rounds_that_need_new_weights_cannot_run_ahead() -> None:
    stages = {n: StageSpec(n, "fake", None, whole=True) for n in "abc"}
    decide = lambda rounds: RepeatDecision(True)  # noqa: E731
    again = Repeat("r", "c", "b", decide, 2)
    work = Workflow("w", 2, stages, (Edge("a", "b"), Edge("b", "c")), (WeightEdge("b", "a"),), repeat=again)
    with pytest.raises(PlanError, match=r"repeats \['a', 'b'\] .* \['b'\] cannot run ahead"):
        parse("a+b+c on 0; staleness 1", 1, work)
    later = replace(work, weight_edges=(WeightEdge("c", "a"),))
    assert parse("a+b+c on 0; staleness 1", 1, later).staleness == 1
