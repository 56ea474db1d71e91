"""A loop whose chunk-steps a worker relays: the same values with fewer calls, and faults are reported as without it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from any_plan import alone, outcome, rollouts
from plan_cases import parse
from threads import ThreadSession

from rlinf_embodied.cluster.hardware import EMULATED, Cluster
from rlinf_embodied.errors import LostWorkerError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.plan import Item, Place, Plan
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.runtime.ray_worker import from_wire, to_wire
from rlinf_embodied.runtime.relay import shards_of
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.workflow.graph import StageSpec, Workflow

EVEN, ODD = {0, 2}, {1, 3}
WORK = rollouts()
APART = parse("env on 0 | policy on 1 in 2 shards > actor on 1", 2, WORK)


class Counting(ThreadSession):
    """Knows what the driver submitted, and whether its workers may relay."""

    def __init__(self, relays: bool = True) -> None:
        super().__init__(seed=0)
        self.relays, self.calls = relays, []

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        self.calls += [call for _, call, _ in calls]
        return super().submit(calls, collective)


def test_an_answerers_worker_relays_for_the_openers_that_only_it_answers() -> None:
    parts = shards_of((0, 0, 1, 1), (2, 2, 2, 2), [EVEN, ODD])
    assert parts == {2: ({0: (0,), 1: (2,)}, {0: (1,), 1: (3,)})}
    assert set(shards_of((0, 0, 1, 1), (2, 2, 3, 3), [EVEN, ODD])) == {2, 3}


@pytest.mark.parametrize(
    ("opener", "answerer"),
    [((0, 0, 0, 0), (1, 1, 2, 2)), ((0, 1, 0, 1), (1, 1, 2, 2)), ((0, 0, 1, 1), (1, 1, 0, 0))],
    ids=["two answer one", "one is both", "each would wait for the other"],
)
def test_where_no_worker_can_relay_the_driver_does(opener: tuple[int, ...], answerer: tuple[int, ...]) -> None:
    assert shards_of(opener, answerer, [EVEN, ODD]) == {}


def test_a_call_arrives_as_it_was_sent() -> None:
    at = StepContext(3, 0, 1, 2, 4, 5, {"message": (1, 2)})
    call = Call(
        *("p", "relay", at, (1, 3), 1, frozenset({3}), "e", 7, {"a": 1}, True, ({0: (1,)}, {2: (3,)})),
        counts_bytes=True,
    )
    sent = from_wire(to_wire(call, attempt=6), {"a": 1})
    assert sent.step_context.attempt == 6
    assert from_wire(to_wire(sent, attempt=0), {"a": 1}) == call


@pytest.mark.parametrize("relays", [True, False])
def test_the_driver_makes_a_call_per_worker_instead_of_one_per_chunk_step(relays: bool) -> None:
    session = Counting(relays)
    assert outcome(WORK, APART, session, 1) == alone(WORK)[:1]
    loop = [call for call in session.calls if call.stage != "actor" and not call.publishes and call.blocks]
    shards, ends = 2, 3  # open, and close of both sides
    assert len(loop) == shards * ends + (1 if relays else 2 * 3 * shards)


def test_spans_and_reports_are_those_of_calls_by_the_driver() -> None:
    cores = Cluster("test", "cpu", 2, 2, 0)
    results = [Executor(WORK, APART, Counting(relays), cores).run(StepContext(0)) for relays in (True, False)]
    seen = [sorted((span.name, span.worker, str(span.args), span.stage) for span in result.spans) for result in results]
    assert seen[0] == seen[1]
    assert {stage for *_, stage in seen[0]} == set(WORK.stages)
    assert results[0].reports == results[1].reports


def test_a_shard_to_which_nothing_is_shown_is_over() -> None:
    stages = {name: StageSpec(name, "fakes.Sparing", last) for name, last in (("env", 0), ("policy", 9))}
    small = Workflow("small", 4, stages, (), (), WORK.loops)
    plan = Plan("apart", 2, (Item((Place("env", (0,)), Place("policy", (1,))), shards=2),))
    result = Executor(small, plan, Counting(), Cluster("test", "cpu", 2, 2, 0)).run(StepContext(0))
    assert result.reports == {side: [[2, 2]] for side in ("env", "policy")}  # a step per shard, of three


# ------------------------------------------------------------------------------------------------------------- trouble
STAR = Item((Place("env", (0, 1)), Place("policy", (2,))), shards=2)  # worker 2 answers both others


def executor(session: RaySession, fates: dict[int, str]) -> Executor:
    """Workers without torch, which start soon."""
    stages = {name: StageSpec(name, "troubled.Turns", fates) for name in ("env", "policy")}
    graph = Workflow("turns", 4, stages, (), (), WORK.loops)
    return Executor(graph, Plan("star", 3, (STAR,)), session, Cluster("test", EMULATED, 3, 3, 0, emulated=True))


def pids_of(made: Executor) -> list[object]:
    """Returns the processes of the workers."""
    return made.facts["env"] + made.facts["policy"]


@pytest.fixture
def session(ray_cluster):
    made = RaySession(hang_after_s=2.0)
    yield made
    made.close()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("fate", "kind", "message", "lost"),
    [
        ({1: "die"}, LostWorkerError, r"worker 1 \(pid \d+, .* died", {1}),
        ({0: "end it"}, LostWorkerError, r"worker 2 \(pid \d+, .* died", {2}),
    ],
    ids=["an opener dies", "who relays dies"],
)
def test_a_worker_in_trouble_is_the_one_that_is_named_and_the_others_continue(
    session, fate, kind, message, lost
) -> None:
    made = executor(session, fate)
    pids = pids_of(made)
    first = made.run(StepContext(0)).reports["policy"]
    with pytest.raises(kind, match=message) as caught:
        made.run(StepContext(1, message=pids[2]))
    assert set(getattr(caught.value, "workers", ())) == lost
    session.replace(tuple(lost))
    session.clear()
    again = executor(session, {})
    assert [again.run(StepContext(k)).reports["policy"] for k in range(2)] == [first, first]
    assert [a == b for a, b in zip(pids, pids_of(again), strict=True)] == [worker not in lost for worker in range(3)]
