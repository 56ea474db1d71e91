"""The runs that measure a workflow cover the grid that its plans need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import cluster, embodied, replace_cluster

from rlinf_embodied.cluster.hardware import with_waiting
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.notation import parse
from rlinf_embodied.planning.plan import collocated
from rlinf_embodied.planning.probes import Probe, probes, shortened, switching, with_blocks
from rlinf_embodied.workflow.graph import Edge, StageSpec, Workflow


def workflow(blocks: int = 8, steps: int = 20) -> Workflow:
    return embodied((0.0, 1.0), (0.0, 1.0), (0.0, 1.0), blocks=blocks, steps=steps)[0]


def cells(blocks: int, devices: int, stage: str) -> set[tuple[int, int]]:
    return {(p.blocks_per_call(stage), p.devices(stage)) for p in probes(workflow(blocks), cluster(devices))}


def test_two_devices_are_measured_together_apart_and_one_alone() -> None:
    assert cells(8, 2, "env") == {(4, 2), (4, 1), (8, 1)}
    assert cells(8, 2, "policy") == {(4, 2), (4, 1), (8, 1)}
    assert cells(8, 2, "actor") == {(4, 2), (8, 1)}


def test_many_devices_are_measured_with_the_few_blocks_that_each_has_too() -> None:
    assert cells(8, 4, "env") == {(2, 4), (2, 1), (4, 1), (8, 1)}
    assert cells(3, 8, "env") == {(1, 3), (1, 1), (2, 1), (3, 1)}  # never more devices than blocks


def test_one_device_needs_one_run_and_one_block_no_second_device() -> None:
    assert [probe.name for probe in probes(workflow(8), cluster(1))] == ["collocated on 1"]
    assert cells(1, 2, "env") == {(1, 1)}


@pytest.mark.parametrize(("blocks", "devices"), [(8, 2), (3, 2), (1, 4), (7, 5), (2, 2)])
def test_every_probe_is_a_plan_that_could_run(blocks: int, devices: int) -> None:
    for probe in probes(workflow(blocks), cluster(devices)):
        check(probe.plan, probe.workflow)


def test_calls_are_as_large_as_the_executor_makes_them_where_everything_goes_through_the_store() -> None:
    stored = replace_cluster(cluster(2), transport="object_store")
    plan = parse("env+policy on 0-1 in 2 shards > actor on 0-1", 2, workflow(8))
    sizes = {
        where.transport: Probe("x", workflow(8), plan, where).blocks_per_call("env") for where in (cluster(2), stored)
    }
    assert sizes == {"adaptive": 4, "object_store": 2}


def test_a_chain_without_loops_is_measured_together_only() -> None:
    stages = {name: StageSpec(name, f"fakes.{name}", None) for name in ("b", "a")}
    chain = Workflow("chain", 4, stages, (Edge("a", "b", granularities=()),))
    names = ["collocated on 2", "collocated on 1", "few on 1"]
    assert [probe.name for probe in probes(chain, cluster(2))] == [*names, "one block"]  # they may stream
    whole = Workflow("chain", 4, stages, (Edge("a", "b"),))
    assert [probe.name for probe in probes(whole, cluster(2))] == names
    assert [*collocated(chain, 2).places()] == ["a", "b"]
    waiting = Workflow("chain", 4, stages | {"b": StageSpec("b", "fakes.b", None, waits=True)}, whole.edges)
    last = probes(waiting, with_waiting(cluster(2), 1))[-1]  # while it waits the others go on block by block
    assert (last.name, last.workflow.num_blocks, last.plan.devices()) == ("one block", 1, (0,))


def test_unlike_devices_need_to_know_what_few_blocks_cost() -> None:
    one = replace(cluster(2).node_groups()[0], devices_per_node=1)
    unlike = replace(cluster(2), groups=(one, replace(one, beside=0, speed=0.5)))
    assert "one block" not in [probe.name for probe in probes(workflow(8), cluster(2))]
    last = probes(workflow(8), unlike)[-1]
    assert (last.name, last.blocks_per_call("env")) == ("one block", 1)


def test_rollouts_are_shortened_only_as_far_as_they_stand_for_whole_ones() -> None:
    whole = workflow(steps=20)
    assert shortened(whole, 0.1).loops["rollout"].chunk_steps == 20  # it does not say how many would do
    (loop,) = whole.loops.values()
    object.__setattr__(loop, "typical_steps", 8)
    assert [shortened(whole, share).loops["rollout"].chunk_steps for share in (0.1, 0.6, 1.0)] == [8, 12, 20]


def test_fewer_blocks_flow_at_once() -> None:
    chain = Workflow("chain", 8, {n: StageSpec(n, "x.y", None) for n in "ab"}, (Edge("a", "b", granularities=(4, 0)),))
    assert with_blocks(chain, 3).edges[0].granularities == (0,)


def test_a_probe_whose_stages_switch_has_one_part_in_memory_at_a_time() -> None:
    probe = Probe("x", workflow(4), collocated(workflow(4), 2), cluster(2))
    assert switching(probe).plan.excluded() == {"env": {"actor"}, "policy": {"actor"}, "actor": {"env", "policy"}}
    assert not probe.plan.exclusive
    assert switching(probe).name == "x, switching"
