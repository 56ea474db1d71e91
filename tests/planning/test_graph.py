"""Workflows are plain data, and say at once what is wrong with them."""

from dataclasses import replace

import pytest
from plan_cases import graph

from rlinf_embodied.errors import PlanError
from rlinf_embodied.workflow.graph import Edge, Loop, Repeat, RepeatDecision, StageSpec, Workflow


def test_the_order_follows_the_edges() -> None:
    work = graph(("c", "b", "a"), (("a", "c"), ("c", "b")))
    assert work.order() == ("a", "c", "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": (("a", "x"),)}, r"edge a -> x names the stage 'x', but there are only \['a', 'b'\]"),
        ({"edges": (("a", "b"), ("b", "a"))}, r"the edges among \['a', 'b'\] form a cycle: declare it as a loop"),
        ({"loops": {"l": Loop("l", "a", "b", 0)}}, "chunk_steps=0, but a loop has at least one"),
        ({"loops": {"l": Loop("l", "a", "a", 1)}}, "made of two stages"),
        (
            {"loops": {"k": Loop("k", "a", "b", 1), "l": Loop("l", "b", "c", 1)}, "stages": "abc"},
            r"loop k shares \['b'\] with l: give each loop its own stages",
        ),
        ({"blocks": 0}, "there is no work in less than one"),
    ],
)
def test_a_broken_workflow_is_refused_with_the_reason(changes: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        graph(tuple(changes.pop("stages", "ab")), **{"edges": (), **changes})


def stages(**changes: dict) -> dict[str, StageSpec]:
    return {name: StageSpec(name, "fakes.x", None, **changes.get(name, {})) for name in "abc"}


ENOUGH = Repeat("more", "c", "b", lambda rounds: RepeatDecision(True), max_rounds=3)
CHAIN = (Edge("a", "b"), Edge("b", "c"))


@pytest.mark.parametrize(
    ("repeat", "changes", "edges", "message"),
    [
        (replace(ENOUGH, before="x"), {}, CHAIN, "repeat more names the stage 'x'"),
        (
            replace(ENOUGH, decided_by="c"),
            {},
            CHAIN,
            r"is decided by c, whose data does not reach c: let one decide of \['a', 'b'\]",
        ),
        (ENOUGH, {}, CHAIN[1:], r"\['a'\] are neither before nor behind c"),
        (ENOUGH, {"c": {}}, CHAIN, "c waits for all rounds: give it whole=True"),
    ],
)
def test_a_repeat_is_refused_with_the_reason(repeat: Repeat, changes: dict, edges: tuple, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Workflow("w", 4, stages(**{"c": {"whole": True}, **changes}), edges, repeat=repeat)


def test_what_comes_before_the_stage_is_counted_by_rounds() -> None:
    work = Workflow("w", 4, stages(c={"whole": True}), CHAIN, repeat=ENOUGH).with_rounds(1.5)
    assert work.expected_rounds() == {"a": 1.5, "b": 1.5}
    assert work.rounds({"b": [[1], [2]]}) == {"a": 2, "b": 2}
