"""Emulated clusters: clocks, wires and memory by hand; whole plans against the simulation; real workers on Ray."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import any_plan
import plan_cases as planning
import pytest
from plan_cases import parse
from random_cases import random_case

from rlinf_embodied.errors import WorkerError
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.planning.check import never_ahead
from rlinf_embodied.planning.notation import to_text
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.tools.emulated_stage import EmulatedStage, EmulatedStageConfig, Finish, Parcel, Start
from rlinf_embodied.tools.emulation import decided, emulate

NOW = 1e-12  # a time scale at which nobody sleeps: only the deadlines count
STALE = [seed for seed in range(60) if not never_ahead(random_case(seed, 5, 6).workflow)]


def emulated(pricer: Pricer) -> Pricer:
    cluster = planning.replace_cluster(pricer.cluster, emulated=True)
    return Pricer(pricer.workflow, pricer.profile, cluster)


def one_stage(entry: dict, blocks: int = 4, devices: int = 2, **more) -> EmulatedStage:
    profile = planning.profile({"s": entry})
    cluster = planning.replace_cluster(planning.cluster(devices, node=1), emulated=True)
    config = EmulatedStageConfig("run", profile.stages["s"], 1, cluster, (1.0,) * devices, **more)
    stage = EmulatedStage(config)
    chosen = tuple(range(blocks))
    stage.setup(StageContext(0, "emulated", chosen, (chosen,), blocks, (0,) * blocks, SoloGroup(), {}))
    return stage


def step_context(**more) -> StepContext:
    return StepContext(0, message=Start(0, 0.0, NOW), **more)


def end_of(output: Output) -> float:
    assert isinstance(output.report, Finish)
    return output.report.end_s


# ------------------------------------------------------------------------------------------------------ clock and wires
def test_a_call_waits_for_its_inputs_and_for_the_device():
    stage = one_stage(planning.stage(1.0, 0.5))
    assert end_of(stage.run(step_context(), {0: [Parcel("a", 0, 7.0)]})) == pytest.approx(7.0 + 1.5)
    assert end_of(stage.run(step_context(), {1: [Parcel("a", 0, 2.0)]})) == pytest.approx(8.5 + 1.5)
    again = StepContext(1, message=Start(1, 0.0, NOW, begin_s=20.0))  # nothing of a later iteration begins before it
    assert end_of(stage.run(again, {1: [Parcel("a", 0, 2.0)]})) == pytest.approx(20.0 + 1.5)


def test_parcels_of_other_devices_come_over_the_wire_one_after_the_other():
    stage = one_stage(planning.stage(1.0, 0.0), bytes_per_block={"a": 1e8})  # 1e8 bytes/s between nodes: 1 s each
    parcels = {block: [Parcel("a", 1, 3.0, block)] for block in range(3)}
    assert end_of(stage.run(step_context(), parcels)) == pytest.approx(3.0 + 3 * 1.0 + 1.0)
    here = {block: [Parcel("a", 0, 3.0, block)] for block in range(3)}
    assert end_of(
        one_stage(planning.stage(1.0, 0.0), bytes_per_block={"a": 1e8}).run(step_context(), here)
    ) == pytest.approx(4)


def test_a_long_tailed_stage_hands_on_what_is_finished():
    tail = planning.stage(0.0, 10.0, finish_quantiles=[[0.0, 0.0], [0.5, 0.1], [1.0, 1.0]])
    stage = one_stage(tail)  # 4 items: 40 s in all
    first = stage.run(step_context(chunk=0, num_chunks=2), {0: [], 1: []})
    second = stage.run(step_context(chunk=1, num_chunks=2), {2: [], 3: []})
    assert (end_of(first), end_of(second)) == (pytest.approx(4.0), pytest.approx(40.0))
    # of four chunks of a block this device owns the first two: its second one is its last
    stage = one_stage(tail, blocks=2)
    ends = [end_of(stage.run(step_context(chunk=k, num_chunks=4), {k: []})) for k in range(2)]
    assert ends == [pytest.approx(2.0), pytest.approx(20.0)]


def test_switches_come_before_the_next_call_and_free_memory():
    entry = planning.stage(1.0, 0.0, resident=8e11, working=4e11, offloaded_bytes=1e11, offload_s=2.0, onload_s=3.0)
    stage = one_stage(entry)
    with pytest.raises(AssertionError, match=r"device 0 has 1000.00 GB, but a call of s needs 1200.00"):
        stage.run(step_context(), {0: []})
    stage.offload(step_context())
    assert end_of(stage.run(step_context(), {0: [Parcel("a", 0, 5.0)]})) == pytest.approx(
        5.0 + 1.0
    )  # the switch was over before the input came
    stage.onload(step_context())
    with pytest.raises(AssertionError, match=r"held are s 800.00"):
        stage.run(step_context(), {0: []})


def test_repeats_take_their_expected_rounds_on_average():
    decide = partial(decided, 1.5)
    taken = []
    for iteration in range(8):
        finish = Finish(0.0, 0.0, Start(iteration, 0.0, NOW))
        rounds: list[list[object]] = [[finish]]
        while not decide(rounds).enough:
            rounds.append([finish])
        taken.append(len(rounds))
    assert set(taken) == {1, 2}
    assert sum(taken) == 12


# ---------------------------------------------------------------------------------------------------------- whole plans
def case(seed: int, staleness: int = 0, several: bool = False) -> tuple[Pricer, Plan]:
    """A random plan; of an odd seed on devices of different speeds, where they are of one kind.

    Of every third seed the last stage, from which weights go, is collective.
    """
    pricer, draw = planning.with_memory(random_case(seed, 5, 6), 1e15), random.Random(seed)
    if seed % 3 == 0:
        stages = pricer.workflow.stages
        last = next(name for name in reversed([*stages]) if name not in ("env", "policy"))
        gang = {**stages, last: replace(stages[last], collective=True)}
        pricer = pricer.with_(workflow=replace(pricer.workflow, stages=gang))
    if several:
        work = any_plan.with_several_devices(pricer.workflow, draw)
        pricer = pricer.with_(workflow=work, cluster=planning.cluster(4))
    elif seed % 2 and len(pricer.cluster.groups) == 1:
        speeds = [draw.choice([1.0, 0.5, 0.8]) for _ in range(pricer.cluster.num_devices)]
        pricer = planning.with_speeds(pricer, speeds)
    while True:
        plan = any_plan.random_plan(pricer.workflow, pricer.cluster.num_devices, draw, staleness)
        if plan is not None and simulate(plan, pricer).iteration_s < math.inf:
            return pricer, plan


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_takes_what_its_simulation_says_and_no_more_memory_than_is_priced(seed: int):
    pricer, plan = case(seed)
    result = emulate(emulated(pricer), SerialSession(), plan, 1, NOW)
    assert result.due_s[0] == pytest.approx(simulate(plan, pricer).iteration_s, rel=1e-6), to_text(plan)
    assert result.peak_bytes <= max(pricer.memory(plan).values()) * (1 + 1e-9), to_text(plan)


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_whose_workers_have_several_devices_takes_what_its_simulation_says(seed: int):
    pricer, plan = case(seed, several=True)
    result = emulate(emulated(pricer), SerialSession(), plan, 1, NOW)
    assert result.due_s[0] == pytest.approx(simulate(plan, pricer).iteration_s, rel=1e-6), to_text(plan)
    assert result.peak_bytes <= max(pricer.memory(plan).values()) * (1 + 1e-9), to_text(plan)


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("seed", STALE)
def test_a_plan_whose_rollouts_run_ahead_takes_what_its_simulation_says(seed: int, staleness: int):
    pricer, plan = case(seed, staleness)
    due_s = emulate(emulated(pricer), SerialSession(), plan, 24, NOW).due_s
    steady_s = sum(due_s[-12:]) / 12  # of whole periods
    assert steady_s == pytest.approx(simulate(plan, pricer).iteration_s, rel=1e-6)


def test_a_plan_that_does_not_fit_is_found_out():
    work, profile = planning.embodied((1, 0), (1, 0), (1, 0), actor={"resident_bytes": 2e12})
    pricer = Pricer(work, profile, planning.cluster(2))
    with pytest.raises(WorkerError, match=r"but a call of env needs 2000.00"):
        emulate(emulated(pricer), SerialSession(), parse("env+policy on 0-1 > actor on 0-1", 2, work), 1, NOW)


@pytest.mark.ray
def test_real_workers_keep_the_deadlines_of_the_simulation(new_ray_session):
    work, profile = planning.embodied((1, 0.25), (0.5, 0.5), (2, 1), policy={"bootstrap_fraction": 0.5})
    pricer = emulated(Pricer(work, profile, planning.cluster(3)))
    for text in ("env+policy on all > actor on all", "env on 0 | policy on 1-2 in 2 shards > actor on 0-2"):
        plan = parse(text, 3, work)
        result = emulate(pricer, new_ray_session, plan, 1, 0.01)
        assert result.due_s[0] == pytest.approx(simulate(plan, pricer).iteration_s, rel=0.01)
        assert result.measured_s[0] >= result.due_s[0]  # nobody answers early
        assert result.wall_s >= 0.01 * result.due_s[0]
