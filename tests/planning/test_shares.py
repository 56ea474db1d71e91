"""Unlike devices: what shares of the blocks the search finds, with the arithmetic."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from plan_cases import cluster, embodied, graph, profile, random_case, stage, with_shares, with_speeds

from rlinf_embodied.planning.explain import rank, rows
from rlinf_embodied.planning.moves import Moves
from rlinf_embodied.planning.plan import Leaf, LoopNode, Plan, Temporal, leaves
from rlinf_embodied.planning.plan_check import require_runnable
from rlinf_embodied.planning.planner import find_plans
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.shares import in_proportion
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.planning.sketch import sketch_of, trees
from rlinf_embodied.workflow.graph import StageSpec


def shares_of(tree) -> dict[str, tuple[int, ...]]:
    return {leaf.stage: leaf.shares for leaf in leaves(tree)}


def test_a_device_at_half_speed_gets_half_as_much() -> None:
    # 12 blocks of 1 s: evenly 6 s here and 12 s there; 8 and 4 blocks are 8 s on either
    pricer = with_speeds(Pricer(graph("a", (), blocks=12), profile({"a": stage(0, 1)}), cluster(2)), [1.0, 0.5])
    even, uneven = Leaf("a", (0, 1)), Leaf("a", (0, 1), (8, 4))
    assert [simulate(tree, pricer, False).iteration_s for tree in (even, uneven)] == pytest.approx([12.0, 8.0])
    best = find_plans(pricer)[0]
    assert (best.iteration_s, best.tree) == (pytest.approx(8.0), uneven)


def test_devices_of_another_kind_get_what_they_can_do() -> None:
    # a call costs 1 s everywhere and a block 1 s, on the other kind 2 + 2: 8 and 4 blocks take 9 and 10 s, 9 and 3 take
    # 10 and 8
    entry = stage(1, 1) | {"kind_factors": {"gpu": 1.0, "other": 2.0}}
    pricer = Pricer(graph("a", (), blocks=12), profile({"a": entry}), cluster(2))
    (group,) = pricer.cluster.node_groups()
    one = replace(group, devices_per_node=1)
    mixed = replace(pricer.cluster, groups=(one, replace(one, kind="other", beside=0)))
    best = find_plans(Pricer(pricer.workflow, pricer.profile, mixed))[0]
    assert best.iteration_s == pytest.approx(10.0)
    assert shares_of(best.tree)["a"] in ((8, 4), (9, 3))


def test_three_workers_on_two_cores() -> None:
    """One core to itself, one for two workers: each of these at half speed.  12 blocks of 1 s: 6, 3, 3 instead of 4."""
    pricer = with_speeds(Pricer(graph("a", (), blocks=12), profile({"a": stage(0, 1)}), cluster(3)), [1.0, 0.5, 0.5])
    best = find_plans(pricer)[0]
    assert (best.iteration_s, shares_of(best.tree)["a"]) == (pytest.approx(6.0), (6, 3, 3))


def test_both_sides_of_a_loop_get_the_same_shares() -> None:
    # 4 steps of 1 + 1 s per block and step: 12 blocks on speeds 2 to 1 are 8 * 8 = 64 s, evenly 96 s; the actor 8 s
    work, measured = embodied((0, 1), (0, 1), (0, 1), blocks=12)
    pricer = with_speeds(Pricer(work, measured, cluster(2)), [1.0, 0.5])
    best = find_plans(pricer)[0]
    assert best.iteration_s == pytest.approx(72.0)
    assert shares_of(best.tree) == {"env": (8, 4), "policy": (8, 4), "actor": (8, 4)}
    assert Plan("p", 2, best.tree).shares_workers("rollout", 12)


def test_alike_devices_share_evenly() -> None:
    work, measured = embodied((0, 1), (0, 1), (0, 1), blocks=12)
    assert not any(
        shares_of(plan.tree)[s] for plan in find_plans(Pricer(work, measured, cluster(3))) for s in ("env", "actor")
    )


def test_a_batch_is_not_torn_apart() -> None:
    # 12 blocks in batches of 3: 9 and 3, not 8 and 4
    work = graph("a", (), blocks=12)
    work = replace(work, stages={"a": StageSpec("a", "fake", None, blocks_per_batch=3)})
    best = find_plans(with_speeds(Pricer(work, profile({"a": stage(0, 1)}), cluster(2)), [1.0, 0.5]))[0]
    assert (best.iteration_s, shares_of(best.tree)["a"]) == (pytest.approx(9.0), (9, 3))


def test_a_share_is_what_a_device_has_to_hold() -> None:
    entry = stage(0, 1) | {"resident_bytes": [[1e9], [2e9], [64e9]]}
    pricer = with_speeds(Pricer(graph("a", (), blocks=12), profile({"a": entry}), cluster(2)), [1.0, 0.5])
    assert pricer.memory(Leaf("a", (0, 1), (8, 4))) == pytest.approx({0: 8e9, 1: 4e9})
    assert pricer.memory(Leaf("a", (0, 1))) == pytest.approx({0: 6e9, 1: 6e9})
    loop = pricer.least_memory(Leaf("a", (0, 1), (8, 4)))
    assert loop == pytest.approx({0: 8e9, 1: 4e9})


@pytest.mark.parametrize("seed", range(12))
def test_moves_with_shares_can_be_run_and_sketches_keep_them(seed: int) -> None:
    pricer, draw = random_case(seed, max_devices=4), random.Random(seed)
    pricer = with_speeds(pricer, [draw.choice([1.0, 0.5]) for _ in range(pricer.cluster.num_devices)])
    moves = Moves(pricer.workflow, pricer.cluster, pricer.slowdown_on)
    every = tuple(range(pricer.cluster.num_devices))[: pricer.workflow.num_blocks]
    sides = {loop.opener: loop for loop in pricer.workflow.loops.values()}
    units = [s for s in pricer.workflow.order() if s not in {loop.answerer for loop in sides.values()}]
    made = [
        LoopNode(sides[u].name, (Leaf(u, every), Leaf(sides[u].answerer, every)), 1) if u in sides else Leaf(u, every)
        for u in units
    ]
    tree = with_shares(Temporal(tuple(made)) if len(made) > 1 else made[0], pricer, draw)
    sketch = sketch_of(tree, pricer.workflow)
    assert shares_of(next(iter(trees(sketch, pricer.workflow)))) == shares_of(tree)
    for other in moves.around(sketch):
        for found in trees(other, pricer.workflow):
            require_runnable("move", found, pricer.workflow)


def test_the_table_shows_the_shares() -> None:
    pricer = with_speeds(Pricer(graph("a", (), blocks=12), profile({"a": stage(0, 1)}), cluster(2)), [1.0, 0.5])
    assert rows(rank(pricer)[0])[0]["devices"] == "a 2 (8:4)"


@pytest.mark.parametrize(
    ("speeds", "number", "least", "expected"),
    [
        ([1.0, 0.5], 12, 1, (8, 4)),
        ([1.0, 1.0, 1.0], 8, 1, (3, 3, 2)),
        ([1.0, 0.01], 10, 1, (9, 1)),
        ([1.0, 0.01], 10, 2, (8, 2)),
        ([1.0, 0.01, 0.01], 3, 1, (1, 1, 1)),
        ([1.0, 0.5], 1, 1, ()),
    ],
)
def test_things_are_divided_in_proportion(speeds, number, least, expected) -> None:
    found = in_proportion(speeds, number, least)
    assert tuple(sorted(found, reverse=True)) == expected
    assert sum(found) == (number if expected else 0)
