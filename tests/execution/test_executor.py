"""What a plan computes is what plain loops compute, in as few calls as its places allow; weights go by reference."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import ray
from any_plan import mixed, outcome, rollouts
from placements import leaves
from plan_cases import parse

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.snapshots import Pace, take
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.plan import schedule
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.session import Ref, SerialSession, Session
from rlinf_embodied.workflow.graph import Edge, StageSpec, WeightEdge, Workflow

ENV, POLICY, ACTOR = range(3)  # numbers of the stages


def by_hand(iterations: int) -> list[dict[int, int]]:
    """What the actor of `rollouts` makes of each block, written as plain loops."""
    weight, found = 0, []
    for i in range(iterations):
        made = {}
        for block in range(4):
            policy, env = 0, mixed(ENV, block, i, 0, 0, 0)
            for step in range(3):
                policy = mixed(POLICY, block, i, 0, weight, policy, step, env)
                env = mixed(ENV, block, i, 0, 0, env, step, policy)
            policy = mixed(POLICY, block, i, 0, weight, policy, env)  # which sees the last one, too
            made[block] = mixed(ACTOR, block, i, 0, weight, 0, policy, mixed(ENV, block, i, 0, 0, env, 0))
        found.append(made)
        weight = mixed(ACTOR, sum(made.values()))
    return found


class Listening(SerialSession):
    """Knows which methods were called."""

    def __init__(self) -> None:
        super().__init__()
        self.methods: set[str] = set()

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        self.methods |= {call.method for _, call, _ in calls}
        return super().submit(calls, collective)


@pytest.mark.parametrize(
    ("plan", "methods"),
    [
        ("env+policy on 0-1 > actor on 0-1", {"loop"}),
        ("env on 0 | policy on 0-1 > actor on 0-1", {"open", "step", "close"}),
    ],
)
def test_values_are_those_computed_by_hand_and_a_loop_within_workers_is_one_call(plan: str, methods: set[str]) -> None:
    session, work = Listening(), rollouts()
    found = outcome(work, parse(plan, 2, work), session, 3)
    assert [iteration["actor"] for iteration in found] == by_hand(3)
    assert session.methods & {"loop", "open", "step", "close"} == methods


@pytest.mark.ray
def test_what_is_consumed_only_where_it_was_made_is_the_object_itself(ray_session: Session) -> None:
    kinds = {"maker": "Maker", "taker": "Taker", "other": "Taker"}
    stages = {name: StageSpec(name, f"fakes.{kind}", None) for name, kind in kinds.items()}
    graph = Workflow("pair", 4, stages, (Edge("maker", "taker"), Edge("maker", "other")))
    for maker, taker, other, stays in (
        ([0, 1], [0, 1], [0, 1], {0, 1, 2, 3}),
        ([1], [0, 1], [0, 1], {2, 3}),
        ([0], [0], [1], set()),
    ):
        plan = resolve("test", leaves(maker=maker, taker=taker, other=other), 2, graph)
        executor = Executor(graph, plan, ray_session, Cluster("test", "cpu", 2, 2, 0))
        result = executor.run(StepContext(5))
        for stage in ("taker", "other"):
            got = {block: value for report in result.all_of(stage, dict) for block, value in report.items()}
            assert got == {block: (block in stays, [block, 5]) for block in range(4)}


def work(at_once: str = "") -> Workflow:
    stages = {name: StageSpec(name, f"fakes.{name}", None, at_once=name == at_once) for name in "abc"}
    return Workflow("chain", 4, stages, tuple(Edge(s, t, whole=False) for s, t in (("a", "b"), ("b", "c"))))


@pytest.mark.parametrize(
    ("text", "at_once", "order"),
    [
        ("a+b on 0 | c on 1 in 2 chunks", "", "a0 b0 c0 a1 b1 c1"),
        ("a+b on 0 > c on 1", "", "a0 b0 c0"),
        ("a on 0 > b on 0 | c on 1 in 2 chunks", "", "a0 b0 c0 b1 c1"),
        ("a+b on 0 | c on 1 in 2 chunks", "b", "a0 a1 b0 b1 c0 c1"),  # it works on all its blocks at once
    ],
)
def test_calls_are_submitted_item_by_item_and_chunk_by_chunk(text: str, at_once: str, order: str) -> None:
    plan = parse(text, 2, work(at_once))
    assert " ".join(f"{step.stages[0]}{step.chunk}" for step in schedule(plan.items, work(at_once))) == order


@pytest.mark.parametrize(("cost_s", "iteration_s", "period"), [(0.4, 10.0, 1), (0.6, 10.0, 2), (84.0, 60.0, 28)])
def test_a_snapshot_is_due_as_soon_as_it_costs_no_more_than_its_share(cost_s, iteration_s, period) -> None:
    pace = Pace(0.05)
    pace.taken(cost_s)
    due = [pace.is_due(iteration_s) for _ in range(period)]
    assert due == [*[False] * (period - 1), True]
    assert cost_s <= 0.05 * period * iteration_s


@pytest.mark.parametrize(
    ("sizes", "kept"), [((6, 1), (6, 1)), ((5, 5), (5, 5)), ((5, 6), (5, None)), ((6, 6), (None, None))]
)
def test_a_snapshot_within_the_limit_has_every_part_however_unequal_they_are(sizes, kept) -> None:
    flow, session = Workflow("state", 2, {"a": StageSpec("a", "light_fakes.Stateful", sizes)}), SerialSession()
    made = Executor(flow, parse("a on 0-1", 2, flow), session, Cluster("test", "cpu", 2, 2, 0))
    snapshot = take(session, made, 0, most=10)
    assert snapshot.num_bytes == sum(sizes)
    assert tuple(None if part is None else len(part) for part in snapshot.states["a"]) == kept


def test_a_snapshot_counts_the_states_of_stages_that_run_ahead() -> None:
    targets = {"a": ("light_fakes.Stateful", (7,)), "learner": ("light_fakes.Learner", 1)}
    stages = {name: StageSpec(name, *target) for name, target in targets.items()}
    flow = Workflow("state", 1, stages, (Edge("a", "learner"),), (WeightEdge("learner", "a"),))
    session = SerialSession()
    plan = replace(parse("a+learner on 0", 1, flow), staleness=1)
    made = Executor(flow, plan, session, Cluster("test", "cpu", 1, 1, 0))
    assert take(session, made, 0, most=6).num_bytes == 7  # nothing runs ahead yet
    made.run(StepContext(0))
    assert take(session, made, 1, most=6).num_bytes == 7


NUM_WEIGHTS = 1 << 20  # 4 MB
MOST_BYTES = 100_000  # an iteration's receipts


def executor(session: Session) -> Executor:
    stages = {
        "reader": StageSpec("reader", "light_fakes.Reader", None),
        "learner": StageSpec("learner", "light_fakes.Learner", NUM_WEIGHTS),
    }
    flow = Workflow("fake", 2, stages, (Edge("reader", "learner"),), (WeightEdge("learner", "reader"),), {})
    plan = parse("reader on 0-1 > learner on 2", 3, flow)
    return Executor(flow, plan, session, Cluster("test", "cpu", 3, 3, 0, emulated=True))


def versions(made: Executor, iterations: int) -> list[list[object]]:
    return [made.run(StepContext(k)).reports["reader"][0] for k in range(iterations)]


def test_readers_work_with_the_weights_of_the_iteration_before() -> None:
    assert versions(executor(SerialSession()), 3) == [[0, 0], [1, 1], [2, 2]]


def test_what_a_stage_publishes_another_gets_without_the_driver() -> None:
    made = executor(SerialSession())
    (published,) = made.publish("learner", "export_weights", StepContext(0))
    assert made.call("reader", "install_weights", StepContext(0), payloads=[published]) == [0, 0]


@pytest.mark.ray
def test_the_driver_never_holds_the_weights(new_ray_session: Session, monkeypatch) -> None:
    made = executor(new_ray_session)
    seen: list[int] = []

    def counted(function):
        def call(value, *arguments, **options):
            result = function(value, *arguments, **options)
            seen.append(len(pickle.dumps(value if function is put else result)))
            return result

        return call

    get, put = ray.get, ray.put
    monkeypatch.setattr(ray, "get", counted(get))
    monkeypatch.setattr(ray, "put", counted(put))
    assert versions(made, 2) == [[0, 0], [1, 1]]
    assert 0 < sum(seen) / 2 < MOST_BYTES < 4 * NUM_WEIGHTS
