"""Plans as text, and what can run."""

from __future__ import annotations

import json

import plan_cases as planning
import pytest
from any_plan import any_plans, random_workflow
from plan_cases import parse

from rlinf_embodied.cluster.hardware import Cluster, NodeGroup
from rlinf_embodied.errors import PlanError
from rlinf_embodied.planning.notation import resolve, to_dict, to_text
from rlinf_embodied.planning.plan import Item, Kind, Place, collocated, owners
from rlinf_embodied.workflow.graph import Edge, StageSpec, Workflow

WORK, _ = planning.embodied((1, 0), (1, 0), (1, 0), blocks=8)
CHAIN = planning.graph("abcd", [("a", "b"), ("b", "c"), ("c", "d")], blocks=8)


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_is_the_same_after_writing_and_reading(seed: int) -> None:
    work = random_workflow(seed)
    for plan in any_plans(work, 3, seed, 20):
        assert parse(to_text(plan), 3, work, plan.name) == plan
        assert resolve(plan.name, [json.loads(json.dumps(to_dict(plan)))], 3, work) == plan


@pytest.mark.parametrize(
    "text",
    [
        "env+policy on 0-3 > actor on 0-3",
        "env on 0-1 | policy on 2-3 in 2 shards > actor on 0-3 (3:3:1:1)",
        "env+policy on 0,2-3 (4:2:2) > actor on 0; exclusive actor / env+policy",
        "env+policy on 0-3 > actor on 0-3; exclusive actor / policy; staleness 2",
    ],
)
def test_texts_are_printed_as_they_are_written(text: str) -> None:
    assert to_text(parse(text, 4, WORK)) == text


def test_presets_are_resolved_for_a_cluster() -> None:
    assert parse("env on 0:1/2 | policy on 1/2:1 > actor on all", 4, WORK).places()["policy"].devices == (2, 3)
    plan = parse("a on 0 | b+c on 1 in chunks > d on all", 2, CHAIN)
    assert plan.items[0] == Item((Place("a", (0,)), Place("b", (1,)), Place("c", (1,))), 8)
    assert parse("a on 0:1/2 | b+c on 1/2:1 in chunks > d on all", 8, CHAIN).items[0].chunks == 2
    assert parse("a+b+x?+c+d on 0", 1, CHAIN).items == collocated(CHAIN, 1).items
    work = Workflow(
        "w", 8, WORK.stages | {"env": StageSpec("env", "e", None, kinds=("cpu",))}, WORK.edges, (), WORK.loops
    )
    groups = [
        NodeGroup(kind=k, num_nodes=1, devices_per_node=2, memory_bytes=1, cores_per_node=2) for k in ("gpu", "cpu")
    ]
    object.__setattr__(groups[1], "beside", 0)
    mixed = Cluster("mixed", "gpu", 4, 2, 0, groups=tuple(groups))
    variants = [{"items": ["env+policy on all", "actor on all"]}]
    variants += [{"cores": True, "items": ["env on cores | policy on all in 2 shards", "actor on all"]}]
    plan = resolve("p", variants, mixed, work)
    assert to_text(plan) == "env on 2-3 | policy on 0-1 in 2 shards > actor on 0-1"
    assert plan.kind(work) is Kind.collocated
    sizes = [{"min_devices": n, "items": [f"env+policy on 0-{n - 1}", "actor on 0"]} for n in (1, 2)]
    assert to_text(resolve("p", sizes, 3, WORK)) == "env+policy on 0-1 > actor on 0"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a+b+c+d on 0-1", Kind.collocated),
        ("a+b on 0 | c+d on 1 in 2 chunks", Kind.disaggregated),
        ("a on 0 > b on 1 > c+d on 0-1", Kind.hybrid),
    ],
)
def test_a_plan_has_a_word(text: str, kind: Kind) -> None:
    assert parse(text, 2, CHAIN).kind(CHAIN) is kind


def test_blocks_are_contiguous_within_a_chunk() -> None:
    assert owners(Place("a", (0, 1)), 8) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert owners(Place("a", (0, 1), (6, 2)), 8, 4) == (0, 0, 0, 1, 0, 0, 0, 1)
    assert owners(Place("a", (0, 1)), 8, 2) == (0, 1) * 4
    assert owners(Place("a", (0, 1)), 6, 1, blocks_per_batch=2) == (0, 0, 0, 0, 1, 1)


WHOLE_EDGE = Workflow("w", 4, {n: StageSpec(n, "x", None) for n in "ab"}, (Edge("a", "b", whole=True),))
TOO_FEW = Workflow("w", 4, {n: StageSpec(n, "x", None, whole=True) for n in "a"})


@pytest.mark.parametrize(
    ("work", "text", "parts"),
    [
        (WORK, "env+policy on all", [r"add \['actor'\]"]),
        (WORK, "env+policy on all > actor on all > judge on all", [r"remove \['judge'\], or mark them optional"]),
        (WORK, "env+policy on all > actor on all > actor on all", [r"place \['actor'\] once"]),
        (WORK, "env on 0 > policy on 1 > actor on all", ["a loop .rollout. is an item of its two sides"]),
        (WORK, "actor on all > env+policy on all", ["has actor before policy", "swap them"]),
        (WORK, "env+policy on 0-8 > actor on all", ["has the devices '0-8', .* of the devices 0-3 of the cluster"]),
        (WORK, "env+policy on 0,0 > actor on all", ["needs each one once"]),
        (WORK, "env+policy on 0-1 (4:5) > actor on all", ["8 blocks in all", "make them add up"]),
        (WORK, "env+policy on 0 in 9 shards > actor on all", ["9 shards, but each needs a block"]),
        (WORK, "env+policy on 0 in 2 chunks > actor on all", ["streams the loop rollout"]),
        (WORK, "env+policy on 0 > actor on 0 in 3 chunks", ["do not divide by it"]),
        (WORK, "env+policy on 0 > actor on 1:1/2", ["has the devices '1:1/2'"]),
        (WORK, "env+policy on some > actor on 0", ["they are `all`, `cores`, a range like"]),
        (WORK, "env+policy > actor on 0", ["it must read like 'env on 0"]),
        (WORK, "env+policy on 0 > actor on 0; exclusive env / policy", ["alternate on the same devices"]),
        (WORK, "env+policy on 0 > actor on 0; exclusive env / judge", ["env and judge exclusive, but its stages are"]),
        (WORK, "env+policy on 0 > actor on 0; staleness 99", ["whole number of iterations, 0"]),
        (CHAIN, "a on 0-3 | b on 0 in 4 chunks > c+d on 0", ["only 2 blocks per call, so some get none"]),
        (CHAIN, "a on 0-1 (5:3) | b on 2 in 2 chunks > c+d on 0", ["use multiples of 2"]),
        (CHAIN, "a+b+c+d on 0 in 2 shards", ["only loops have shards"]),
        (WHOLE_EDGE, "a+b on 0 in 2 chunks", ["edge a -> b needs all blocks at once"]),
        (TOO_FEW, "a on 0 in 2 chunks", ["a needs all blocks at once"]),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_do(work: Workflow, text: str, parts: list[str]) -> None:
    for part in parts:
        with pytest.raises(PlanError, match=part):
            parse(text, 4, work)


def test_fewer_devices_than_a_plan_needs_are_refused() -> None:
    with pytest.raises(PlanError, match=r"plan p needs at least 2 devices, but cluster.num_devices is 1"):
        resolve("p", [{"min_devices": 2, "items": ["env+policy on all", "actor on all"]}], 1, WORK)
    with pytest.raises(PlanError, match=r"plan p needs 2 devices, but cluster.num_devices is 3"):
        resolve("p", [{"min_devices": 2, "max_devices": 2, "items": ["env+policy on all", "actor on all"]}], 3, WORK)
