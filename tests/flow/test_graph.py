"""Workflows are plain data, and say at once what is wrong with them."""

import pytest
from planning import graph

from rlinf_embodied.errors import PlanError
from rlinf_embodied.flow.graph import WHOLE, Barrier, Edge, Loop, StageSpec, WeightEdge, Workflow


def test_the_order_follows_edges_and_barriers() -> None:
    work = graph(("c", "b", "a"), (("a", "c"),), barriers=(Barrier("c", "b"),))
    assert work.order() == ("a", "c", "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": (("a", "x"),)}, r"edge a -> x names the stage 'x', but there are only \['a', 'b'\]"),
        ({"barriers": (Barrier("x", "a"),)}, r"barrier x \| a names the stage 'x'"),
        ({"edges": (("a", "b"), ("b", "a"))}, r"the edges among \['a', 'b'\] form a cycle: declare it as a loop"),
        ({"barriers": (Barrier("b", "a"),), "edges": (("a", "b"),)}, "form a cycle"),
        ({"loops": {"l": Loop("l", "a", "b", 0)}}, "a loop is bounded by positive numbers"),
        ({"loops": {"l": Loop("l", "a", "a", 1)}}, "made of two stages"),
        ({"loops": {"l": Loop("l", "a", "b", 1, expected_rounds=2.0)}}, r"between 1 and max_rounds=1 rounds"),
        ({"loops": {"l": Loop("l", "a", "b", 1, shards=())}}, "at least one is in flight"),
        ({"loops": {"k": Loop("k", "a", "b", 1), "l": Loop("l", "b", "a", 1)}}, "a stage belongs to one loop"),
        ({"blocks": 0}, "there is no work in less than one"),
    ],
)
def test_a_broken_workflow_is_refused_with_the_reason(changes: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        graph(("a", "b"), **{"edges": (), **changes})


def test_chunks_divide_the_blocks() -> None:
    stages = {name: StageSpec(name, "fakes.x", None) for name in "ab"}
    with pytest.raises(PlanError, match=r"granularities \(3,\) .* chunks divide the 8 blocks"):
        Workflow("w", 8, stages, (Edge("a", "b", granularities=(3,)),))


def test_an_edge_allows_what_it_lists_and_always_the_whole() -> None:
    assert not Edge("a", "b").allows(2, 8)
    assert Edge("a", "b", granularities=(WHOLE, 2)).allows(2, 8)
    assert Edge("a", "b", granularities=()).allows(4, 8)
    assert Edge("a", "b").allows(8, 8)


def test_the_drawing_shows_every_kind_of_edge() -> None:
    work = graph(
        ("env", "policy", "actor", "log"),
        (("policy", "actor"),),
        loops={"rollout": Loop("rollout", "env", "policy", 7, max_rounds=3)},
        weight_edges=(WeightEdge("actor", "policy"),),
        barriers=(Barrier("actor", "log"),),
    )
    dot = work.to_dot()
    assert 'label="rollout: 7 chunk-steps, up to 3 rounds"' in dot
    assert '"policy" -> "actor";' in dot
    assert '"actor" -> "policy" [style=dashed' in dot
    assert '"actor" -> "log" [style=dotted' in dot
