"""Plans are data: what a file says, and what it may not say."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import stored_tree
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.notation import parse_devices, resolve
from rlinf_embodied.planning.plan import Leaf, LoopNode, Temporal
from rlinf_embodied.workflow.graph import Edge, Loop, StageSpec, WeightEdge, Workflow


def workflow(num_blocks: int = 4) -> Workflow:
    stages = {name: StageSpec(name, f"fakes.{name}", None) for name in ("env", "policy", "actor")}
    return Workflow(
        "test",
        num_blocks,
        stages,
        (Edge("policy", "actor"), Edge("env", "actor")),
        (WeightEdge("actor", "policy"),),
        {"rollout": Loop("rollout", "env", "policy", 3)},
    )


def tree(env: object = "all", policy: object = "all", actor: object = "all", shards: int = 1) -> dict:
    loop = {"name": "rollout", "shards": shards, "stages": {"env": env, "policy": policy}}
    return {"temporal": [{"loop": loop}, {"leaf": {"stage": "actor", "devices": actor}}]}


def test_a_plan_file_becomes_a_tree_with_device_numbers() -> None:
    plan = resolve("p", [{"tree": tree("0:1/2", "1/2:1", "1/2:1", shards=2)}], 4, workflow())
    loop = LoopNode("rollout", (Leaf("env", (0, 1)), Leaf("policy", (2, 3))), 2)
    assert plan.tree == Temporal((loop, Leaf("actor", (2, 3))))
    assert plan.owners("env", 4) == (0, 0, 1, 1)
    assert plan.devices() == (0, 1, 2, 3)


HERE = Cluster("test", "cpu", 2, 2, 0)
STORED = replace(HERE, transport="object_store")


@pytest.mark.parametrize(
    ("places", "cluster", "fused", "shards"),
    [
        ({}, HERE, True, 1),
        ({}, STORED, False, 2),  # both sides are in one worker, but every message leaves it
        ({"env": [0], "policy": [1]}, HERE, False, 2),
        ({"env": [0]}, HERE, False, 2),  # half of the blocks have both sides in one worker
    ],
)
def test_a_loop_is_one_call_where_both_sides_are_in_one_worker_and_data_may_stay_there(
    places: dict, cluster: Cluster, fused: bool, shards: int
) -> None:
    plan = resolve("p", [{"tree": tree(**places, shards=2)}], 2, workflow())
    assert plan.shares_workers("rollout", 4) == (not places)
    assert plan.is_fused("rollout", 4, cluster) is fused
    assert [plan.shards(stage, 4, cluster) for stage in ("env", "policy", "actor")] == [shards, shards, 1]


def test_a_resolved_plan_written_out_reads_back_as_itself() -> None:
    plan = resolve("p", [{"tree": tree("0:1/2", "1/2:1", "1/2:1", shards=2)}], 4, workflow())
    assert resolve("p", [{"tree": plan.to_dict()["tree"]}], 4, workflow()) == plan


def test_the_largest_variant_that_fits_is_taken() -> None:
    variants = [{"min_devices": 1, "tree": tree()}, {"min_devices": 3, "tree": tree("0:1/3", "1/3:2/3", "2/3:1")}]
    assert resolve("p", variants, 2, workflow()).owners("actor", 4) == (0, 0, 1, 1)
    assert resolve("p", variants, 3, workflow()).owners("actor", 4) == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("variants", "devices", "message"),
    [
        ([{"min_devices": 2, "tree": tree()}], 1, "needs at least 2 devices"),
        ([{"tree": tree(shards=5)}], 1, "5 shards"),
        ([{"tree": tree(env="0:1/9")}], 2, "no device of 2"),
        ([{"tree": tree(env=[7])}], 2, "cluster has the devices 0..1"),
        ([{"tree": tree(env="half")}], 2, "a range like"),
        ([{"tree": {"leaf": {"stage": "actor", "devices": "all"}}}], 1, "every stage must be placed exactly once"),
        ([{"tree": {"sideways": []}}], 1, "exactly one key"),
        ([{"tree": {"leaf": {"devices": "all"}}}], 1, "missing"),
        ([{"tree": tree()}], 8, "only 4 blocks"),
        ([{"tree": tree(env=["a"])}], 2, "a list of whole numbers"),
        ([{"tree": tree(env=[0, 0])}], 2, "each device once"),
        ([{"tree": tree(shards="two")}], 1, "of the wrong kind"),  # pyright: ignore[reportArgumentType]
        ([{"tree": {"loop": {"name": "rollout", "stages": ["env", "policy"]}}}], 1, "of the wrong kind"),
        ([{"tree": {"spatial": {"granularity": "x", "parts": [tree()]}}}], 1, "granularity is 'x'"),
        ([{"tree": {"temporal": {"resident": "false", "parts": [tree()]}}}], 1, "resident is 'false'"),
        ([{"min_devices": "two", "tree": tree()}], 2, "`min_devices` is a whole number"),
        ([{"min_devices": 1}], 2, "a variant has a `tree`"),
        (
            [{"min_devices": 2, "max_devices": 2, "tree": tree()}],
            4,
            "was made for 2 devices, but cluster.num_devices is 4",
        ),
    ],
)
def test_a_plan_that_cannot_run_says_what_is_wrong(variants: list, devices: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve("p", variants, devices, workflow())


def test_spatial_parts_may_not_share_devices() -> None:
    spatial = {"spatial": [tree("all", "all", [0])["temporal"][0], {"leaf": {"stage": "actor", "devices": [0]}}]}
    with pytest.raises(PlanError, match="share devices"):
        resolve("p", [{"tree": spatial}], 2, workflow())


def test_a_dangling_edge_a_cycle_and_an_unbounded_loop_are_refused() -> None:
    stage = {"a": StageSpec("a", "fakes.a", None), "b": StageSpec("b", "fakes.b", None)}
    with pytest.raises(PlanError, match="names the stage 'c'"):
        Workflow("w", 1, stage, (Edge("a", "c"),))
    with pytest.raises(PlanError, match="form a cycle"):
        Workflow("w", 1, stage, (Edge("a", "b"), Edge("b", "a")))
    with pytest.raises(PlanError, match="bounded"):
        Workflow("w", 1, stage, loops={"l": Loop("l", "a", "b", 0)})


@given(st.integers(1, 64), st.integers(1, 64))
def test_blocks_are_spread_contiguously_and_evenly(num_devices: int, num_blocks: int) -> None:
    num_devices = min(num_devices, num_blocks)
    stages = {"a": StageSpec("a", "fakes.a", None)}
    trees = [{"tree": {"leaf": {"stage": "a", "devices": "all"}}}]
    plan = resolve("p", trees, num_devices, Workflow("w", num_blocks, stages))
    owners = plan.owners("a", num_blocks)
    counts = [owners.count(device) for device in range(num_devices)]
    assert list(owners) == sorted(owners)
    assert max(counts) - min(counts) <= 1


@given(st.integers(2, 64))
def test_halves_are_disjoint_and_cover_all_devices(num_devices: int) -> None:
    low, high = (parse_devices(text, num_devices, "plan") for text in ("0:1/2", "1/2:1"))
    assert sorted(low + high) == list(range(num_devices))


def test_staleness_is_a_number_of_the_plan_and_of_its_file() -> None:
    plan = resolve("p", [{"tree": tree(), "staleness": 2}], 2, workflow())
    assert plan.staleness == 2
    assert plan.to_dict()["staleness"] == 2
    assert resolve("p", [stored_tree(plan.to_dict())], 2, workflow()) == plan
    fresh = resolve("p", [{"tree": tree()}], 2, workflow())
    assert fresh.staleness == 0
    assert "staleness" not in fresh.to_dict()


@pytest.mark.parametrize("value", [-1, 9, 1.0, True, "1", None])
def test_a_staleness_that_is_no_small_whole_number_is_refused(value: object) -> None:
    with pytest.raises(PlanError, match=r"plan\.p\.staleness is .*from 0 to 8"):
        resolve("p", [{"tree": tree(), "staleness": value}], 2, workflow())


def test_staleness_needs_weights_and_a_stage_that_can_run_ahead() -> None:
    with pytest.raises(PlanError, match="passes no weights on"):
        resolve("p", [{"tree": tree(), "staleness": 1}], 2, replace(workflow(), weight_edges=()))
    turned = replace(workflow(), weight_edges=(WeightEdge("policy", "actor"),))
    with pytest.raises(PlanError, match="none can run ahead"):
        resolve("p", [{"tree": tree(), "staleness": 1}], 2, turned)
    resolve("p", [{"tree": tree(), "staleness": 0}], 2, turned)


def test_the_back_of_an_iteration_is_what_makes_weights_and_what_comes_behind() -> None:
    assert workflow().back() == {"actor"}
    stages = {name: StageSpec(name, f"fakes.{name}", None) for name in "abcde"}
    edges = (Edge("a", "b"), Edge("b", "c"), Edge("a", "e"))
    line = Workflow("line", 2, stages, edges, (WeightEdge("b", "a"),))
    assert line.back() == {"b", "c"}
    looped = replace(line, loops={"l": Loop("l", "d", "c", 2)}, edges=(Edge("a", "b"), Edge("b", "d"), Edge("d", "e")))
    assert looped.back() == {"b", "c", "d", "e"}
    assert replace(line, weight_edges=()).back() == frozenset()


# --------------------------------------------------------------------------------------------------------------- shares
def shared(shares: object, devices: object = "all", **more) -> dict:
    loop = {"name": "rollout", "shards": 1, "stages": {"env": "all", "policy": "all", **more}}
    actor = {"stage": "actor", "devices": devices, "shares": shares}
    return {"temporal": [{"loop": loop}, {"leaf": actor}]}


def test_shares_say_how_many_blocks_each_device_has() -> None:
    side = {"devices": [0, 1], "shares": [3, 1]}
    plan = resolve("p", [{"tree": shared([1, 3], env=side, policy=side)}], 2, workflow())
    assert plan.owners("actor", 4) == (0, 1, 1, 1)
    assert plan.owners("env", 4) == plan.owners("policy", 4) == (0, 0, 0, 1)
    assert plan.is_fused("rollout", 4, HERE)
    assert resolve("p", [stored_tree(plan.to_dict())], 2, workflow()) == plan
    apart = resolve("p", [{"tree": shared([1, 3], env=side)}], 2, workflow())
    assert not apart.is_fused("rollout", 4, HERE)  # half of the blocks have both sides in one worker


def test_every_chunk_is_shared_alike_but_batches_stay_whole() -> None:
    stages = {"a": StageSpec("a", "fake", None), "b": StageSpec("b", "fake", None, blocks_per_batch=2)}
    work = Workflow("w", 8, stages, (Edge("a", "b", granularities=()),))
    parts = [
        {"leaf": {"stage": "a", "devices": [0, 1], "shares": [6, 2]}},
        {"leaf": {"stage": "b", "devices": [2, 3], "shares": [2, 6]}},
    ]
    plan = resolve("p", [{"tree": {"spatial": {"granularity": 4, "parts": parts}}}], 4, work)
    assert plan.owners("a", 8) == (0, 0, 0, 1, 0, 0, 0, 1)
    assert plan.owners("b", 8, 2) == (2, 2, 3, 3, 3, 3, 3, 3)
    parts[0]["leaf"]["shares"] = [5, 3]
    with pytest.raises(PlanError, match=r"gives a shares of \[5, 3\], but calls it for 4 blocks at a time, 2 times"):
        resolve("p", [{"tree": {"spatial": {"granularity": 4, "parts": parts}}}], 4, work)
    parts[1]["leaf"]["shares"] = [5, 3]
    with pytest.raises(PlanError, match=r"gives b shares of \[5, 3\], but it works on 2 blocks at a time"):
        resolve("p", [{"tree": {"temporal": parts}}], 4, work)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([3, 2], "5 blocks in all, but there are 4 blocks"),
        ([4, 0], "at least one"),
        ([1, 1, 2], "of the 2 devices"),
        ([], "of the 2 devices"),
        ([1.5, 2.5], r"shares is \[1.5, 2.5\]"),
        ([True, 3], r"shares is \[True, 3\]"),
        ("31", "shares is '31'"),
        (None, "shares is None"),
    ],
)
def test_shares_that_are_none_are_refused(shares: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve("p", [{"tree": shared(shares)}], 2, workflow())


def test_a_shard_has_a_block() -> None:
    side = {"devices": [0, 1], "shares": [3, 1]}
    data = shared([1, 3], env=side)
    data["temporal"][0]["loop"]["shards"] = 5
    with pytest.raises(PlanError, match=r"has 5 shards, but each has a block at least, of which there are 4"):
        resolve("p", [{"tree": data}], 2, workflow())
