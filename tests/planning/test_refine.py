"""Plans beyond whole regions: what refining finds, and how sketches become trees; the arithmetic stands beside."""

import random
from dataclasses import replace

import pytest
from plan_cases import cluster, embodied, graph, profile, random_case, stage, wide_tree

from rlinf_embodied.cluster.hardware import Cluster, Links, NodeGroup
from rlinf_embodied.planning.moves import Moves
from rlinf_embodied.planning.plan import Leaf, LoopNode, Plan, Spatial, Temporal, leaves, nodes
from rlinf_embodied.planning.plan_check import require_runnable
from rlinf_embodied.planning.planner import find_plans, shape
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.planning.sketch import nestings, sketch_of, trees
from rlinf_embodied.workflow.graph import StageSpec

KINDS = ("gpu", "cpu")


def devices_of(tree) -> dict[str, tuple[int, ...]]:
    return {leaf.stage: leaf.devices for leaf in leaves(tree)}


def on_one_or_two(one_s: float, two_s: float) -> dict:
    """A stage that takes so long on one device, and on two, whatever its items."""
    return stage(0, 0) | {"items_per_device": [1, 8], "devices": [1, 2], "s_per_call": [[one_s, two_s]] * 2}


def test_a_stage_may_use_a_part_of_the_devices() -> None:
    # a: 8 blocks of 1 s, 4 s on both devices; b takes 2 s on one device and 5 s on two, which must agree: 6 s, not 9
    pricer = Pricer(
        graph("ab", (("a", "b"),), whole=True), profile({"a": stage(0, 1), "b": on_one_or_two(2, 5)}), cluster(2)
    )
    best = find_plans(pricer)[0]
    assert best.iteration_s == pytest.approx(6.0)
    placed = devices_of(best.tree)
    assert (len(placed["a"]), len(placed["b"])) == (2, 1)


def test_a_device_may_idle() -> None:
    pricer = Pricer(graph("a", ()), profile({"a": on_one_or_two(2, 5)}), cluster(2))
    best = find_plans(pricer)[0]
    assert len(devices_of(best.tree)["a"]) == 1
    assert best.iteration_s == pytest.approx(2.0)


def test_the_sides_of_a_loop_may_overlap_in_part() -> None:
    # the env runs on the CPU node too, the policy (1 s, however many items) on the GPU only.  There together a step
    # takes 8 + 1 s, apart at least 8; with the env on both 4 + 1: 20 s, and 0.08 for the actor
    anywhere = {"kind_factors": {"gpu": 1.0, "cpu": 1.0}}
    work, measured = embodied((0, 1), (1, 0), (0, 0.01), blocks=8, steps=4, env=anywhere)
    nodes_ = [NodeGroup(kind=k, num_nodes=1, devices_per_node=1, memory_bytes=1e12, cores_per_node=8) for k in KINDS]
    mixed = Cluster("mixed", "gpu+cpu", 2, 16, 8, groups=tuple(nodes_), links=Links(latency_s=0.0))
    best = find_plans(Pricer(work, measured, mixed))[0]
    assert best.iteration_s <= 20.08 + 1e-9
    assert devices_of(best.tree) == {"env": (0, 1), "policy": (0,), "actor": (0,)}
    assert "overlapping" in best.shape


def test_more_than_64_chunks_are_tried() -> None:
    # a and b do not fit together, and switching costs 400 s: 128 blocks of 1 s go through both devices, one block at a
    # time in 128 + 1 s; in 64 chunks it would be 130
    held = {"resident_bytes": 60e9, "offload_s": 100.0, "onload_s": 100.0}
    measured = profile({name: stage(0, 1) | held for name in "ab"})
    best = find_plans(Pricer(graph("ab", (("a", "b"),), blocks=128), measured, cluster(2, 80e9)))[0]
    assert best.iteration_s == pytest.approx(129.0)
    assert isinstance(best.tree, Spatial)
    assert best.tree.granularity == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_sketch_is_the_plan_that_it_was_made_of(seed: int) -> None:
    pricer = random_case(seed)
    tree = wide_tree(pricer, random.Random(seed))
    if any(isinstance(node, Temporal) and not node.resident for node in nodes(tree)):
        return  # which turns switch is found again from memory
    same = next(iter(trees(sketch_of(tree, pricer.workflow), pricer.workflow)))
    assert simulate(same, pricer).iteration_s == pytest.approx(simulate(tree, pricer).iteration_s)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_tried_can_run(seed: int) -> None:
    pricer = random_case(seed, blocks=6)
    moves = Moves(pricer.workflow, pricer.cluster)
    tree = wide_tree(pricer, random.Random(seed))
    tried = set(moves.around(sketch_of(tree, pricer.workflow)))
    assert tried or pricer.cluster.num_devices == 1
    for other in tried:
        require_runnable("tried", next(iter(trees(other, pricer.workflow))), pricer.workflow)


def test_turns_nest_in_every_way_once() -> None:
    found = nestings([Leaf(name, (0,)) for name in "abcd"])
    assert len(found) == len(set(map(str, found))) == 22  # trees over four leaves whose levels alternate: 2 * 11
    exclusive = {str(sorted((s, sorted(o)) for s, o in Plan("p", 1, tree).exclusive().items())) for tree in found}
    assert len(exclusive) == 22


def test_memory_makes_turns_switch_where_nothing_fits_without() -> None:
    # a stays with b or c, b and c do not fit together: a > (b >> c) or the like, each device with 80 of 80 GB
    held = {"resident_bytes": 50e9, "offload_s": 1.0, "onload_s": 1.0}
    stages = {"a": stage(0, 1, 20e9), "b": stage(0, 1) | held, "c": stage(0, 1) | held}
    pricer = Pricer(graph("abc", (("a", "b"), ("b", "c")), whole=True), profile(stages), cluster(2, 80e9))
    best = find_plans(pricer)[0]
    assert max(pricer.memory(best.tree).values()) <= 80e9
    # turns: 3 * 4 s and two switches each way on every device; apart nothing switches: a 4, b and c 8 each on one
    assert best.iteration_s <= 4 + 4 + 4 + 4 + 1e-9


def test_a_collective_stage_begins_and_ends_together() -> None:
    # three blocks on two devices: a ends after 2 and 1 s; b needs 2 and 1 s more, but both members wait for both
    work = graph("ab", (("a", "b"),), blocks=3)
    specs = {"a": work.stages["a"], "b": StageSpec("b", "fakes.b", None, collective=True)}
    tree = Temporal((Leaf("a", (0, 1)), Leaf("b", (0, 1))))
    pricer = Pricer(replace(work, stages=specs), profile({n: stage(0, 1) for n in "ab"}), cluster(2))
    run = simulate(tree, pricer)
    assert run.iteration_s == pytest.approx(4.0)
    assert run.busy_s == pytest.approx({0: 4.0, 1: 3.0})
    assert [span.start_s for span in run.spans if span.stage == "b"] == pytest.approx([2.0, 2.0])


def test_a_shape_says_how_the_sides_of_a_loop_lie() -> None:
    leaf = Leaf("policy", (1, 2))
    for devices, word in (((1, 2), "collocated"), ((0,), "disaggregated"), ((0, 1), "overlapping")):
        assert shape(LoopNode("rollout", (Leaf("env", devices), leaf), 1)) == f"rollout {word}"
