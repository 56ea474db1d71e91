"""The search: against every plan of small cases, its limits, memory, kinds of devices and large clusters."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import plan_cases as planning
import pytest
from any_plan import with_several_devices
from every_plan import Enumeration
from plan_cases import parse, with_memory
from random_cases import random_case

from rlinf_embodied.cluster.hardware import WAITING
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.explain import rank, rows
from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import Kind
from rlinf_embodied.planning.pricing import Pricer, Standing
from rlinf_embodied.planning.profile import Profile, WeightProfile
from rlinf_embodied.planning.search import Search
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.workflow.graph import Edge, Repeat, RepeatDecision, StageSpec, Workflow

SMALL = [*((seed, 2) for seed in range(10)), *(pytest.param(s, 3, marks=pytest.mark.slow) for s in range(7100, 7160))]


@pytest.mark.parametrize(("seed", "devices"), SMALL)
def test_no_plan_of_a_small_case_is_clearly_faster(seed: int, devices: int) -> None:
    pricer = random_case(seed, 3, devices)
    try:
        best = rank(pricer, search_s=60.0).best
    except PlanError:
        return
    check(best.plan, pricer.workflow)
    assert pricer.fits(best.plan)
    assert best.iteration_s == pytest.approx(simulate(best.plan, pricer).iteration_s)
    every = Enumeration(pricer, limit_s=20.0)
    every.run(best.iteration_s)
    assert best.iteration_s <= every.best_s * 1.01, every.best


@pytest.mark.parametrize("seed", range(8))
def test_workers_with_several_devices_are_placed_as_well_as_by_trying_all_plans(seed: int) -> None:
    pricer = with_memory(random_case(seed, 3, 2), 1e15)
    work = with_several_devices(pricer.workflow, random.Random(seed))
    pricer = pricer.with_(workflow=work, cluster=planning.cluster(4, node=2 if seed % 2 else 4))
    best = rank(pricer, search_s=60.0).best
    check(best.plan, work)
    every = Enumeration(pricer, limit_s=20.0)
    every.run(best.iteration_s)
    assert best.iteration_s <= every.best_s * 1.01, every.best


def test_workers_with_several_devices_stay_within_a_node_and_use_the_memory_of_each() -> None:
    work = planning.graph("ab", [("a", "b")])
    work = replace(work, stages=work.stages | {"a": replace(work.stages["a"], devices_per_worker=2)})
    stages = {"a": planning.stage(0, 4), "b": planning.stage(0, 1, resident=6e11)}
    pricer = Pricer(work, planning.profile(stages), planning.cluster(6, node=3))
    assert [device for device in range(6) if pricer.runs_on("a", device)] == [0, 1, 4, 5]  # 2 and 3 are in two nodes
    with pytest.raises(
        PlanError, match=r"each worker of a has 2 devices, but a node of test has 3, which is not a multi"
    ):
        rank(pricer)
    pricer = pricer.with_(cluster=planning.cluster(6, node=2))
    best = rank(pricer).best
    assert len(best.plan.places()["a"].devices) in (4, 6)
    simulated = simulate(parse("a on 0-3 > b on 4", 6, work), pricer)
    assert [simulated.busy_s.get(device, 0.0) for device in range(6)] == [16.0, 16.0, 16.0, 16.0, 8.0, 0.0]
    assert parse("a on 0-3 | b on 4-5 in chunks", 6, work).items[0].chunks == 4  # of two blocks, for two workers each
    full = pricer.with_(profile=planning.profile(stages | {"a": planning.stage(0, 4, resident=6e11)}))
    plan = parse("a on 0-1 > b on 1", 6, work)
    assert full.memory(plan) == {0: 6e11, 1: 12e11}
    assert not full.fits(plan)
    with pytest.raises(
        PlanError, match=r"\[1, 2\], but each of its workers has 2 neighbouring ones, the first a multiple"
    ):
        parse("a on 1-2 > b on 1", 6, work)


def test_the_same_number_of_moves_finds_the_same_plans(few_moves) -> None:
    found = [Search(random_case(3, 5, 6)) for _ in range(2)]
    for search in found:
        search.run()
    assert found[0].best == found[1].best


def test_the_time_limit_ends_the_search_with_a_plan_and_is_reported() -> None:
    pricer = random_case(3, 5, 6)
    ranking = rank(pricer, search_s=1e-6)
    assert "plan.search_s" in ranking.remarks[-1]
    check(ranking.best.plan, pricer.workflow)


NAMES = [f"s{i}" for i in range(40)]
SHAPES = {
    "a chain of 40": (NAMES, list(itertools.pairwise(NAMES))),
    "12 in parallel": (NAMES[:12], []),
    "a diamond of 8": (NAMES[:8], [(a, b) for s in NAMES[1:7] for a, b in (("s0", s), (s, "s7"))]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_workflows_of_any_shape_are_planned_in_seconds(shape: str) -> None:
    names, edges = SHAPES[shape]
    stages = {name: planning.stage(0.5 * (i % 3), 1.0 + i % 2) for i, name in enumerate(names)}
    work = planning.graph(names, edges)
    start = time.process_time()
    best = rank(Pricer(work, planning.profile(stages), planning.cluster(4))).best
    assert time.process_time() - start < 8
    check(best.plan, work)


# -------------------------------------------------------------------------------------------------------------- memory
def test_a_fused_loop_holds_what_all_its_rows_need_however_many_shards() -> None:
    work, profile = planning.embodied((1, 0), (1, 0), (1, 0), policy={"working_bytes": [[1e9], [2e9], [64e9]]})
    pricer = Pricer(work, profile, planning.cluster(2))
    held = {n: pricer.memory(parse(f"env+policy on 0-1 in {n} shards > actor on 0", 2, work))[0] for n in (1, 2)}
    assert held[1] == held[2] == pytest.approx(4e9)


def test_devices_with_fewer_blocks_hold_less() -> None:
    work = planning.graph(["a"], [], blocks=5)
    entry = planning.stage(1, 0) | {"resident_bytes": [[1e9], [2e9], [64e9]]}
    pricer = Pricer(work, planning.profile({"a": entry}), planning.cluster(2))
    assert pricer.memory(parse("a on 0-1", 2, work)) == pytest.approx({0: 3e9, 1: 2e9})
    assert pricer.memory(parse("a on 0-1 (3:2)", 2, work)) == pytest.approx({0: 3e9, 1: 2e9})


def test_the_weights_that_two_stages_share_are_held_once() -> None:
    shares = {"resident_bytes": 10e9, "shared_bytes": 4e9}
    work, profile = planning.embodied((1, 0), (1, 0), (1, 0), policy=shares, actor={"resident_bytes": 20e9})
    pricer = Pricer(work, profile, planning.cluster(2))
    assert pricer.memory(parse("env+policy on 0 > actor on 0", 2, work))[0] == pytest.approx(26e9)
    assert pricer.memory(parse("env+policy on 0 > actor on 1", 2, work)) == pytest.approx({0: 10e9, 1: 20e9})


def test_stages_of_evaluations_take_memory_from_plans(few_moves) -> None:
    work, profile = planning.embodied((1, 0), (1, 0), (1, 0), policy={"resident_bytes": 10e9})
    known = planning.cluster(2, 15e9)
    assert Pricer(work, profile, known).fits(parse("env+policy on 0 > actor on 1", 2, work))
    standing = Pricer(work, profile, known, standing=[Standing("policy", 4, 2)])
    assert not standing.fits(parse("env+policy on 0 > actor on 1", 2, work))
    with pytest.raises(
        PlanError, match=r"even .* needs 10.00 GB .* which has 5.00 GB next to evaluations, 5.00 GB short"
    ):
        rank(standing)


def test_what_does_not_fit_together_is_exclusive(few_moves) -> None:
    work = planning.graph("abc", [("a", "b"), ("b", "c")], whole=True)
    stages = {n: planning.stage(1, 1, resident=6e9, offload_s=1.0, onload_s=1.0) for n in "abc"}
    stages["b"]["resident_bytes"] = 1e9
    best = rank(Pricer(work, planning.profile(stages), planning.cluster(1, 10e9))).best
    assert best.plan.exclusive == (("a", "c"),)
    with pytest.raises(PlanError, match="fits into the memory"):
        rank(Pricer(work, planning.profile(stages), planning.cluster(1, 5e9)))


# ------------------------------------------------------------------------------------------------------------- devices
def kinds(*names: str) -> Profile:
    return planning.profile({"a": planning.stage(1, 1) | {"kind_factors": dict.fromkeys(names, 2.0)}})


def test_a_stage_is_never_on_a_kind_of_device_without_a_time(few_moves) -> None:
    one = replace(planning.cluster(2).node_groups()[0], devices_per_node=1)
    mixed = replace(planning.cluster(2), groups=(one, replace(one, kind="other", beside=0)))
    work = planning.graph(["a"], [])
    assert rank(Pricer(work, kinds(), mixed)).best.plan.devices() == (0,)
    assert rank(Pricer(work, kinds("other"), mixed)).best.plan.devices() == (0, 1)
    for text in ("a on 0-1", "a on 0-1 (7:1)"):
        assert simulate(parse(text, 2, work), Pricer(work, kinds(), mixed)).iteration_s == float("inf")
    only = replace(mixed, groups=(replace(one, kind="other"), replace(one, kind="other", beside=0)))
    with pytest.raises(PlanError, match=r"its devices \(other\) or their cores do not suit a"):
        rank(Pricer(work, kinds(), only))


def test_a_stage_that_waits_uses_a_worker_without_a_core(few_moves) -> None:
    one = replace(planning.cluster(2).node_groups()[0], devices_per_node=1)
    places = replace(planning.cluster(2), groups=(one, replace(one, kind=WAITING, beside=0)))
    stages = {n: StageSpec(n, "x", None, waits=n == "b") for n in "abc"}
    work = Workflow("w", 4, stages, (Edge("a", "b", whole=False), Edge("b", "c", whole=False)))
    entries = {n: planning.stage(0, 1) for n in "abc"} | {"b": planning.stage(0, 1) | {"kind_factors": {WAITING: 1.0}}}
    best = rank(Pricer(work, planning.profile(entries), places)).best
    assert best.plan.places()["b"].devices == (1,)
    assert best.iteration_s < 12.0


def test_alike_devices_get_unequal_blocks_where_another_stage_keeps_one_busy(few_moves) -> None:
    work = planning.graph("abc", [("a", "b"), ("a", "c")], whole=True)
    stages = {"a": planning.stage(0, 1), "b": planning.stage(0, 1), "c": planning.stage(4, 0, stays=True)}
    best = rank(Pricer(work, planning.profile(stages), planning.cluster(2))).best
    assert best.iteration_s == pytest.approx(4 + 6)  # c takes 4 s of one device, which gets 2 of the 8 blocks of b
    assert sorted(best.plan.places()["b"].blocks) == [2, 6]


def test_large_clusters_are_planned_in_groups() -> None:
    devices = 1024
    work, measured = planning.embodied((0, 1), (0, 0.1), (8, 0.1), blocks=2 * devices, steps=20)
    pricer = Pricer(work, measured, planning.cluster(devices, node=8, cores=8))
    start = time.process_time()
    best = rank(pricer).best
    assert time.process_time() - start < 8
    check(best.plan, work)
    together = simulate(parse("env+policy on all > actor on all", devices, work), pricer)
    assert best.iteration_s <= 1.001 * together.iteration_s
    assert len(to_text(best.plan)) < 200


def test_large_clusters_have_workers_with_several_devices() -> None:
    work = planning.graph("abc", [("a", "b"), ("b", "c")], blocks=256)
    several = replace(work, stages=work.stages | {"a": replace(work.stages["a"], devices_per_worker=4)})
    measured = planning.profile({"a": planning.stage(0, 1), "b": planning.stage(0, 0.1), "c": planning.stage(0, 1)})
    for devices in (64, 96):
        best = rank(Pricer(several, measured, planning.cluster(devices, node=8))).best
        check(best.plan, several)
        together_s = math.ceil(4 * 256 / devices) + math.ceil(256 / devices) * (0.1 + 1)  # everything on all devices
        assert best.iteration_s <= 1.001 * together_s


def test_what_a_search_in_groups_has_found_is_refined_on_the_devices() -> None:
    work = planning.graph("abc", [("a", "b"), ("a", "c")], blocks=60, whole=True)
    stages = {"a": planning.stage(0, 0.001), "b": planning.stage(10, 1), "c": planning.stage(10, 3)}
    pricer = Pricer(work, planning.profile(stages), planning.cluster(20))  # in pairs of devices
    assert rank(pricer).best.iteration_s == pytest.approx(22, abs=0.1)  # b on 5 devices beside c on 15; 25 on 4 or 6


# --------------------------------------------------------------------------------------------------- price, and reasons
def test_calls_and_rounds_and_distant_weights_have_a_price() -> None:
    work, measured = planning.embodied((1, 0), (1, 0), (1, 0), blocks=4, steps=10)
    plan = parse("env+policy on 0-3 > actor on 0-3", 4, work)
    cluster = planning.cluster(4)
    slow = replace(cluster, links=replace(cluster.links, submit_s=0.5))
    seconds = [simulate(plan, Pricer(work, measured, place)).iteration_s for place in (cluster, slow)]
    assert seconds[1] == pytest.approx(seconds[0] + 4 * 0.5)  # the last worker waits for four submissions
    known = replace(measured, weights={("actor", "policy"): WeightProfile(1e9)})
    apart = parse("env+policy on 0 > actor on 1", 2, work)
    near, far = (simulate(apart, Pricer(work, known, planning.cluster(2, node=n))).iteration_s for n in (2, 1))
    assert (near, far) == (pytest.approx(21 + 1), pytest.approx(21 + 10))
    repeat = Repeat("resample", "actor", "env", lambda rounds: RepeatDecision(True), 3, 3.0)
    whole = {**work.stages, "actor": replace(work.stages["actor"], whole=True)}
    again = replace(work, stages=whole, repeat=repeat, edges=(Edge("policy", "actor"), Edge("env", "actor")))
    sent = replace(measured, edge_bytes_per_item={("policy", "actor"): 1e9})
    once, thrice = (
        simulate(apart, Pricer(w, sent, planning.cluster(2))).iteration_s for w in (replace(again, repeat=None), again)
    )
    assert thrice - once == pytest.approx(2 * 20 + 2 * 4)  # rounds of 20 s, and the data of each: 4 blocks of 1 s


def test_the_table_has_the_best_of_each_kind_and_true_reasons(few_moves) -> None:
    work, measured = planning.embodied((0, 1), (0, 1), (0, 4))
    ranking = rank(Pricer(work, measured, planning.cluster(4)))
    assert {entry.kind for entry in ranking.plans} == set(Kind)
    for entry, row in zip(ranking.plans, rows(ranking.plans), strict=True):
        assert row["plan"] == to_text(entry.plan)
        if not entry.plan.exclusive:
            assert "switches" not in row["why not"]
    assert rows(ranking.plans)[0]["why not"] == "the best"
    one = rank(Pricer(planning.graph(["a"], []), planning.profile({"a": planning.stage(1, 1)}), planning.cluster(2)))
    assert set(one.remarks) == {"disaggregated: none", "hybrid: none"}
