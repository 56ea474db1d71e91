"""Each edge's transport follows from where its ends are, and what is used is what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placements import leaves, looped

from rlinf_embodied.cluster.hardware import Cluster, NodeGroup
from rlinf_embodied.config import ClusterConfig, TransportMode
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.plan import Plan
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.runtime.transport import (
    Route,
    handover,
    lines,
    routes,
    with_bytes,
)
from rlinf_embodied.workflow.graph import Edge, Loop, StageSpec, WeightEdge, Workflow

CORES = Cluster("test", "cpu", 2, 2, 0)
EVERYTHING_STORED = replace(CORES, transport="object_store")


def nodes(kind: str, num_nodes: int, devices: int) -> NodeGroup:
    return NodeGroup(kind=kind, num_nodes=num_nodes, devices_per_node=devices, memory_bytes=8e9, cores_per_node=8)


MIXED = Cluster("mixed", "h100+cpu", 6, 24, 0, groups=(nodes("h100", 2, 2), nodes("cpu", 1, 2)))
NEAR_AND_FAR = Cluster("cores", "cpu", 3, 3, 0, groups=(nodes("cpu", 1, 2), nodes("cpu", 1, 1)))


def graph() -> Workflow:
    stages = {
        "maker": StageSpec("maker", "fakes.Maker", None),
        "taker": StageSpec("taker", "fakes.Taker", None),
    }
    return Workflow("pair", 4, stages, (Edge("maker", "taker", bytes_per_item=24.0),))


def routes_of(workflow: Workflow, plan: Plan, cluster: Cluster) -> list[Route]:
    return routes(workflow, plan, cluster, handover(workflow, plan, cluster))


def plan_for(workflow: Workflow, num_devices: int, **devices: list[int]) -> Plan:
    return resolve("test", leaves(**devices), num_devices, workflow)


def ways(found: list[Route]) -> dict[str, dict[str, int]]:
    return {route.edge: {str(way): number for way, number in route.blocks.items()} for route in found}


def test_a_transport_follows_from_the_two_places_and_all_is_stored_where_that_is_asked_for() -> None:
    workflow = graph()
    plan = plan_for(workflow, 3, maker=[0], taker=[0, 1, 2])
    expected = {"in_process": 2, "shared_memory": 1, "network": 1}
    assert ways(routes_of(workflow, plan, NEAR_AND_FAR)) == {"maker -> taker": expected}
    stored = routes_of(workflow, plan, replace(NEAR_AND_FAR, transport="object_store"))
    assert ways(stored) == {"maker -> taker": {"shared_memory": 3, "network": 1}}
    one = routes(workflow, plan, NEAR_AND_FAR, handover(workflow, plan, NEAR_AND_FAR), one_process=True)
    assert ways(one) == {"maker -> taker": {"in_process": 4}}


def test_loops_go_both_ways_and_weights_from_one_worker_to_those_without() -> None:
    stages = {name: StageSpec(name, "fakes.Counter", None) for name in ("env", "policy", "actor")}
    loop = Loop("rollout", "env", "policy", 3)
    edges = (Edge("policy", "actor"), Edge("env", "actor"))
    workflow = Workflow("fake", 4, stages, edges, (WeightEdge("actor", "policy"),), {"rollout": loop})
    found = routes_of(workflow, resolve("p", looped([4, 5], [2], actor=[2, 3]), 6, workflow), MIXED)
    assert ways(found) == {
        "env -> policy": {"network": 4},
        "policy -> env": {"network": 4},
        "policy -> actor": {"in_process": 2, "shared_memory": 2},
        "env -> actor": {"network": 4},
        "actor ~> policy": {"in_process": 1},
    }
    assert lines(with_bytes(found, {("env", "actor"): 8.0})).splitlines()[2:] == [
        "policy -> actor: 2 blocks in_process, 2 blocks shared_memory",
        "env -> actor: 4 blocks network, 8 bytes per item",
        "actor ~> policy: 1 workers in_process",
    ]


def test_one_process_cannot_be_told_to_use_a_store() -> None:
    with pytest.raises(ConfigError, match=r"cluster.transport is 'object_store', but one process .*session=ray"):
        ClusterConfig(session="serial", transport=TransportMode.object_store)


# -------------------------------------------------------------------------------------------------- the real thing
def received(session: Session, cluster: Cluster, **devices: list[int]) -> tuple[dict, dict[str, int]]:
    """Returns what the taker reports, and how many blocks were to go each way."""
    workflow = graph()
    executor = Executor(workflow, plan_for(workflow, 2, **devices), session, cluster)
    reports = executor.run(StepContext(5)).all_of("taker", dict)
    return {block: value for report in reports for block, value in report.items()}, ways(executor.routes)[
        "maker -> taker"
    ]


CONSUMERS = {"maker": "Maker", "taker": "Taker", "other": "Taker"}
PLACEMENTS = {
    "together": ({"maker": [0, 1], "taker": [0, 1]}, {0, 1, 2, 3}),
    "apart": ({"maker": [0], "taker": [1]}, set()),
    "half of the blocks together": ({"maker": [1], "taker": [0, 1]}, {2, 3}),
}


def test_what_one_of_two_consumers_needs_elsewhere_leaves_for_both_and_the_route_says_so() -> None:
    stages = {name: StageSpec(name, f"fakes.{target}", None) for name, target in CONSUMERS.items()}
    workflow = Workflow("pair", 4, stages, (Edge("maker", "taker"), Edge("maker", "other")))
    plan = plan_for(workflow, 2, maker=[0], taker=[0], other=[1])
    assert list(ways(routes_of(workflow, plan, CORES)).values()) == [{"shared_memory": 4}] * 2


def test_messages_of_a_loop_that_is_called_step_by_step_leave_their_worker() -> None:
    stages = {name: StageSpec(name, "fakes.Counter", None) for name in ("env", "policy")}
    workflow = Workflow("fake", 4, stages, loops={"rollout": Loop("rollout", "env", "policy", 3)})
    found = routes_of(workflow, resolve("p", looped([0, 1], [1]), 2, workflow), CORES)
    assert list(ways(found).values()) == [{"shared_memory": 4}] * 2


@pytest.mark.ray
def test_a_block_that_leaves_its_worker_is_a_copy_for_all_of_its_consumers(ray_session) -> None:
    stages = {name: StageSpec(name, f"fakes.{target}", None) for name, target in CONSUMERS.items()}
    workflow = Workflow("pair", 4, stages, (Edge("maker", "taker"), Edge("maker", "other")))
    executor = Executor(workflow, plan_for(workflow, 2, maker=[0], taker=[0], other=[1]), ray_session, CORES)
    result = executor.run(StepContext(5))
    for stage in ("taker", "other"):
        assert [report[0] for report in result.all_of(stage, dict)] == [(False, [0, 5])]


@pytest.mark.ray
def test_exactly_what_is_said_to_stay_in_its_process_is_the_object_that_was_made(ray_session) -> None:
    for devices, together in PLACEMENTS.values():
        got, said = received(ray_session, CORES, **devices)
        assert got == {block: (block in together, [block, 5]) for block in range(4)}
        assert said.get("in_process", 0) == len(together)
    got, said = received(ray_session, EVERYTHING_STORED, **PLACEMENTS["together"][0])
    assert got == {block: (False, [block, 5]) for block in range(4)}
    assert said == {"shared_memory": 4}
