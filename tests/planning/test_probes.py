"""Which runs measure a workflow, and how what they show becomes a profile."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from plan_cases import cluster, embodied

from rlinf_embodied.cluster.hardware import Cluster, with_waiting
from rlinf_embodied.execution.profiler import Effort
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.plan import collocated
from rlinf_embodied.planning.probes import (
    Iteration,
    Measurements,
    Probe,
    Shown,
    disaggregated,
    fill,
    fill_bytes,
    grid,
    probes,
    profile_of,
    sample,
    shortened,
    switching,
    with_blocks,
)
from rlinf_embodied.planning.profile import Profile, WeightProfile, parse_profile
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import Edge, Repeat, RepeatDecision, StageSpec, Workflow


def workflow(blocks: int = 8, steps: int = 20, episode: int = 0) -> Workflow:
    work = embodied((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), blocks=blocks, steps=steps)[0]
    return replace(work, loops={n: replace(o, typical_steps=episode) for n, o in work.loops.items()})


def chain(blocks: int = 8, whole: bool = True, **stages: StageSpec) -> Workflow:
    specs = {name: StageSpec(name, f"fakes.{name}", None) for name in "ba"} | stages
    return Workflow("chain", blocks, specs, (Edge("a", "b", whole=whole),))


def unlike(kind: str = "gpu", speed: float = 1.0, node: int | None = None) -> Cluster:
    one = replace(cluster(2).node_groups()[0], devices_per_node=1)
    return replace(cluster(2), groups=(one, replace(one, kind=kind, speed=speed, beside=node)))


def on(graph: Workflow, devices: int) -> Probe:
    return Probe("x", graph, collocated(graph, devices), cluster(2))


def cells(blocks: int, devices: int, stage: str) -> set[tuple[int, int]]:
    return {p.cell(stage) for p in probes(workflow(blocks), cluster(devices))}


# ----------------------------------------------------------------------------------------------------------- the probes
@pytest.mark.parametrize("devices", [1, 2, 8, 64, 1024])
@pytest.mark.parametrize("per_device", [1, 4, 32])
def test_no_probe_puts_more_than_a_few_blocks_on_a_device(devices: int, per_device: int) -> None:
    for graph in (workflow(per_device * devices), chain(per_device * devices)):
        found = probes(graph, cluster(devices, node=min(devices, 8)))
        assert max(probe.most_blocks for probe in found) <= min(4, max(2, per_device if devices > 1 else 4))
        assert len(found) <= 4


def test_two_devices_are_measured_collocated_and_disaggregated() -> None:
    assert cells(4, 2, "env") == cells(4, 2, "policy") == {(2, 2), (1, 1)}
    assert cells(4, 2, "actor") == {(2, 2), (2, 1)}
    assert cells(64, 2, "env") == {(4, 2), (2, 1)}
    assert cells(2, 8, "env") == {(1, 2), (1, 1)}  # never more devices than blocks
    assert cells(8, 1, "env") == {(4, 1), (2, 1)}
    assert cells(1, 2, "env") == {(1, 1)}
    several = probes(workflow(64), cluster(16, node=8))
    assert [probe.name for probe in several] == ["collocated on 16", "disaggregated", "collocated on a node"]
    last = probes(workflow(16), unlike(speed=0.5, node=0))[-1]  # what few blocks cost on unlike devices
    assert (last.name, last.cell("env")) == ("one block", (1, 1))


def test_a_chain_has_no_disaggregated_probe() -> None:
    names = ["collocated on 2", "few on 2", "collocated on 1"]
    assert [probe.name for probe in probes(chain(), cluster(2))] == names
    assert [probe.name for probe in probes(chain(whole=False), cluster(2))] == [*names, "one block"]  # may stream
    waiting = chain(b=StageSpec("b", "fakes.b", None, waits=True))
    last = probes(waiting, with_waiting(cluster(2), 1))[-1]  # while it waits the others continue block by block
    assert (last.name, last.workflow.num_blocks, last.plan.devices()) == ("one block", 1, (0,))


def test_few_blocks_are_whole_batches() -> None:
    batched = chain(32, a=StageSpec("a", "fakes.a", None, blocks_per_batch=8))
    assert {probe.cell("a")[0] for probe in probes(batched, cluster(2))} == {8, 16}
    assert with_blocks(batched, 3).stages["a"].blocks_per_batch == 1
    assert with_blocks(chain(whole=False), 3).edges[0].whole


@pytest.mark.parametrize(("blocks", "devices"), [(8, 2), (3, 2), (1, 4), (7, 5), (2, 2), (100, 7)])
def test_every_probe_is_a_plan_that_could_run(blocks: int, devices: int) -> None:
    for probe in probes(workflow(blocks), cluster(devices)):
        check(probe.plan, probe.workflow)


def test_a_probe_whose_stages_switch_has_one_part_in_memory_at_a_time() -> None:
    probe = on(workflow(4), 2)
    assert switching(probe).plan.excluded() == {"env": {"actor"}, "policy": {"actor"}, "actor": {"env", "policy"}}
    assert not probe.plan.exclusive
    assert switching(probe).name == "x, switching"


# ------------------------------------------------------------------------------------------------------- what they show
def span(name: str, worker: int, seconds: float) -> Span:
    return Span(name, name.split(".")[0], worker, "cpu", 0.0, seconds)


def shown(probe: Probe, run: Workflow, spans: list[Span], rounds: dict[str, int] | None = None) -> dict[str, float]:
    return sample(probe, probe.workflow, Iteration(run, spans, 1.0, rounds or {}))


def test_the_worker_that_took_longest_counts_for_both_sides_of_a_loop() -> None:
    probe = on(workflow(), 2)
    spans = [span("env.open", 0, 2.0), span("env.step", 0, 6.0), span("policy.step", 0, 2.0)]  # 10 s
    spans += [span("env.step", 1, 4.0), span("policy.step", 1, 4.5), span("actor.run", 0, 3.0)]  # 8.5 s
    found = shown(probe, workflow(), spans)
    assert found == pytest.approx({"env": 8.0 / 20, "policy": 2.0 / 20, "actor": 3.0})
    switches = [span("actor.offload", 0, 7.0), span("policy.install_weights", 0, 7.0), span("env.onload", 0, 7.0)]
    assert shown(probe, workflow(), spans + switches) == found  # no work


def test_disaggregated_each_side_counts_by_itself_and_a_call_is_a_shard() -> None:
    probe = Probe("x", workflow(), disaggregated(workflow(), 2), cluster(2))
    spans = [span("env.step", 0, 8.0), span("policy.step", 1, 4.0), span("actor.run", 1, 3.0), span("actor.run", 0, 2)]
    found = shown(probe, workflow(), spans, {"env": 2, "policy": 2})
    # steps, shards, rounds
    assert found == pytest.approx({"env": 8.0 / (20 * 2 * 2), "policy": 4.0 / 80, "actor": 3.0})


def test_behind_a_shortened_rollout_a_stage_has_less_to_do_than_behind_a_whole_one() -> None:
    probe, run = on(workflow(), 1), shortened(workflow(), 10)
    spans = [span("env.step", 0, 5.0), span("policy.step", 0, 1.0), span("actor.run", 0, 3.0)]
    assert shown(probe, run, spans) == pytest.approx({"env": 0.5, "policy": 0.1, "actor": 6.0})
    opened = shown(probe, run, [*spans, span("env.open", 0, 2.0)])["env"]
    assert opened == pytest.approx((2.0 + 10.0) / 20)  # once per rollout, however short it is


@pytest.mark.parametrize(("short_s", "whole_s"), [(2.0, 5.0), (1.5, 6.0), (1.0, 6.0), (4.0, 4.0)])
def test_the_time_of_a_stage_behind_a_rollout_is_a_line_through_two_lengths(short_s: float, whole_s: float) -> None:
    """10 of 20 chunk-steps take 3 s: whole ones a third more at least, and at most twice as many."""
    probe, both = on(workflow(), 1), []
    for steps, seconds in ((10, 3.0), (5, short_s)):
        spans = [span("env.step", 0, 5.0), span("policy.step", 0, 1.0), span("actor.run", 0, seconds)]
        both.append(Iteration(shortened(workflow(), steps), spans, 1.0))
    assert sample(probe, workflow(), *both)["actor"] == pytest.approx(whole_s)


def test_a_shortened_rollout_is_not_repeated() -> None:
    repeat = Repeat("resample", "actor", "env", lambda rounds: RepeatDecision(True), 3, 2.0)
    actor = replace(workflow().stages["actor"], whole=True)
    whole = replace(workflow(), stages={**workflow().stages, "actor": actor}, repeat=repeat)
    assert shortened(whole, 20) == whole
    shorter = shortened(whole, 5)
    assert (shorter.loops["rollout"].chunk_steps, shorter.expected_rounds()["env"]) == (5, 1.0)
    assert shorter.repeat == replace(repeat, max_rounds=1, expected_rounds=1.0)


def test_resets_that_a_short_rollout_does_not_reach_are_counted() -> None:
    """Episodes of 5 chunk-steps: 4 resets in 20, of which 4 steps show the first alone, and 10 steps all."""
    whole = workflow(episode=5)
    probe = on(whole, 1)
    spans = [span("env.open", 0, 2.0), span("env.step", 0, 1.0), span("policy.step", 0, 1.0)]
    spans.append(span("actor.run", 0, 1.0))
    assert shown(probe, shortened(whole, 4), spans)["env"] == pytest.approx((4 * 2.0 + 5.0) / 20)
    assert shown(probe, shortened(whole, 10), spans)["env"] == pytest.approx((2.0 + 2.0) / 20)


# ------------------------------------------------------------------------------------------------------------ the cells
def test_cells_are_kept_and_the_others_filled() -> None:
    # on one device 4 s at 4 items and 6 s at 8; two at once are a quarter slower
    assert np.allclose(fill({(4, 1): 4.0, (8, 1): 6.0, (4, 2): 5.0}, [4, 8], [1, 2]), [[4.0, 5.0], [6.0, 7.5]])
    # the curve may be that of two devices: one is a fifth faster at 8 items
    assert np.allclose(fill({(4, 2): 4.0, (8, 2): 5.0, (8, 1): 4.0}, [4, 8], [1, 2]), [[3.2, 4.0], [4.0, 5.0]])
    # where no number of devices has two points all are on one line
    assert np.allclose(fill({(8, 2): 10.0, (4, 1): 6.0}, [4, 8], [1, 2]), [[6.0, 6.0], [10.0, 10.0]])
    # linear, but never less than in proportion: the line would be below zero at 1
    table = fill({(4, 1): 4.0, (8, 1): 12.0, (6, 2): 9.0, (1, 2): 1.0}, [1, 4, 6, 8], [1, 2])
    assert [row[0] for row in table] == pytest.approx([1.0, 4.0, 8.0, 12.0])


def test_what_has_one_point_grows_in_proportion_and_bytes_do_not() -> None:
    assert np.allclose(fill({(8, 1): 6.0, (8, 2): 6.6}, [4, 8], [1, 2]), [[3.0, 3.3], [6.0, 6.6]])
    assert np.allclose(fill_bytes({(8, 1): 6.0}, [4, 8], [1, 2]), 6.0)
    assert fill_bytes({}, [1, 2], [1]).tolist() == [[0.0], [0.0]]
    # next to nothing on one device and much on two is no ratio by which other cells grow
    assert fill_bytes({(4, 1): 1e-3, (8, 1): 5.0, (4, 2): 100.0}, [4, 8], [1, 2]).tolist() == [[1e-3, 100], [5, 5]]
    assert grid({(3, 1): 1.0}) == ([3, 6], [1])  # a slope needs two points


# ---------------------------------------------------------------------------------------------------------- the profile
def measurements(**actor: object) -> Measurements:
    measured = Measurements(workflow())
    for stage in measured.stages:
        measured.stages[stage] = Shown(seconds={(2, 1): [0.5, 0.4, 0.9], (4, 1): [1.0]})
    for key, value in actor.items():
        setattr(measured.stages["actor"], key, value)
    return measured


def made(measured: Measurements, machine: Cluster | None = None) -> Profile:
    return profile_of("x", machine or cluster(2), measured, {"config": "a"})


def test_a_profile_of_measurements_is_one_that_can_be_read() -> None:
    measured = measurements(offloaded_bytes=5.0, offload_s=0.25, onload_s=0.5)
    measured.stages["env"].resident, measured.stages["env"].working = {(4, 1): 100.0}, {(4, 1): 7.0}
    measured.rounds, measured.edge_bytes_per_item = [1, 2], {("env", "policy"): 12.0}
    measured.chunk_steps = 20
    profile = parse_profile(made(measured).to_dict())
    env, actor = profile.stages["env"], profile.stages["actor"]
    assert env.call_s(2, 1) == pytest.approx(0.5)  # the median
    assert (env.offloaded_bytes, env.stays) == (100.0, True)  # it has no offload
    assert (actor.stays, actor.offloaded_bytes, actor.onload_s) == (False, 5.0, 0.5)
    assert profile.workload is not None
    assert (profile.workload.expected_rounds, profile.workload.num_items) == (1.5, 8)


@pytest.mark.parametrize(("at_once", "seconds"), [(False, 1.0), (True, 2.0)])
def test_a_stage_with_long_tails_takes_the_mean_of_its_repetitions(at_once: bool, seconds: float) -> None:
    work = chain(a=StageSpec("a", "fakes.a", None, at_once=at_once))
    measured = Measurements(work)
    measured.stages = {name: Shown({(8, 1): [1.0, 1.0, 4.0]}) for name in "ab"}
    assert made(measured).stages["a"].call_s(8, 1) == seconds


@pytest.mark.parametrize(("seconds", "count"), [([1.0], 5), ([0.5, 1.5], 103), ([0.5, 0.5, 1.5], 35)])
def test_iterations_are_repeated_until_their_mean_is_certain_or_the_budget_is_spent(seconds, count: int) -> None:
    probe, took = on(chain(), 1), itertools.cycle(seconds)
    effort = Effort(probe.workflow, [probe], 30.0 if len(seconds) == 3 else 1000.0)
    numbers = []

    def iterate(run: Workflow, number: int, record: bool) -> Iteration:
        numbers.append(number)
        return Iteration(run, [], next(took))

    kept, _ = effort.measure(probe, iterate)
    assert len(kept) + 1 == count
    assert len(set(numbers)) == len(numbers)  # an engine with another process takes equal versions for equal weights


@pytest.mark.parametrize(("at_once", "seconds", "count"), [(True, 7.0, 3), (True, 60.0, 1), (False, 7.0, 1)])
def test_iterations_with_long_tails_are_repeated_beyond_the_budget_unless_they_take_very_long(at_once, seconds, count):
    probe, numbers = on(chain(a=StageSpec("a", "fakes.a", None, at_once=at_once)), 1), []
    iterate = lambda run, number, record: numbers.append(number) or Iteration(run, [], seconds)  # noqa: E731
    kept, _ = Effort(probe.workflow, [probe], 6.0).measure(probe, iterate)
    assert numbers == [*range(count)]  # with other problems in each
    assert len(kept) == max(1, count - 1)


def test_data_of_the_steps_that_were_left_out_takes_memory_too() -> None:
    measured = measurements(working={(2, 1): 1.0})
    measured.chunk_steps, measured.edge_bytes_per_item = 5, {("env", "actor"): 8.0, ("env", "policy"): 100.0}
    stages = made(measured).stages
    assert stages["actor"].working(4, 1) == 1.0 + 4 * 8.0 * 0.75
    assert stages["policy"].working(4, 1) == 0.0  # what it is shown does not wait


def test_what_an_actor_shares_with_the_policy_of_its_worker_is_distinguished() -> None:
    both = made(measurements(resident={(4, 1): 90.0}, sharing={(4, 1): 30.0})).stages["actor"]
    assert (both.resident(4, 1), both.shared_bytes) == (90.0, 60.0)
    measured = measurements(sharing={(4, 1): 30.0})  # never alone in a worker: it would hold the weights as well
    measured.weights["actor", "policy"] = WeightProfile(50.0)
    alone = made(measured).stages["actor"]
    assert (alone.resident(4, 1), alone.shared_bytes) == (80.0, 50.0)
    assert made(measurements(resident={(4, 1): 90.0})).stages["actor"].shared_bytes == 0.0


def test_every_kind_of_device_is_measured_and_one_that_is_not_is_named() -> None:
    machine = unlike(kind="h200")
    last = probes(workflow(16), machine)[-1]
    assert (last.name, last.kind, last.plan.devices()) == ("collocated on 1 h200", "h200", (1,))
    measured = measurements()
    assert made(measured, machine).unmeasured_kinds(machine) == ["h200"]
    spans = [span("env.step", 1, 60.0), span("policy.step", 1, 40.0), span("actor.run", 1, 0.75)]
    measured.add(last, sample(last, measured.workflow, Iteration(last.workflow, spans, 1.0)))
    profile = made(measured, machine)
    assert profile.unmeasured_kinds(machine) == []
    assert profile.stages["actor"].kind_factors == {"h200": pytest.approx(0.75)}  # 4 items take 1 s on the others
    assert profile.stages["actor"].items_per_device.tolist() == [2, 4]
