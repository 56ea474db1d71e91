"""Every plan computes the same; only where and when differs."""

import os
from collections.abc import Sequence

import pytest

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import HangError, WorkerError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.flow.graph import Edge, Loop, RepeatDecision, StageSpec, WeightEdge, Workflow
from rlinf_embodied.flow.plan import resolve
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.session import Ref, SerialSession, Session

CHUNK_STEPS = 3
PLANS = {
    "collocated on 1": (1, ("all", "all", "all", 1)),
    "collocated on 2": (2, ("all", "all", "all", 1)),
    "collocated on 3, uneven": (3, ("all", "all", "all", 1)),
    "disaggregated on 2": (2, ("0:1/2", "1/2:1", "1/2:1", 2)),
    "disaggregated on 3": (3, ("0:1/3", "1/3:2/3", "2/3:1", 2)),
    "hybrid on 2": (2, ("0:1/2", "1/2:1", "all", 2)),
    "one env, policy on all": (2, ([0], "all", "all", 1)),
    "unlike splits": (3, ([0, 1], [2], [0, 2], 2)),
}


def workflow(rounds: int = 1, env: dict | None = None) -> Workflow:
    stages = {
        "env": StageSpec("env", "fakes.Counter", env),
        "policy": StageSpec("policy", "fakes.Doubler", None),
        "actor": StageSpec("actor", "fakes.Summer", None, collective=True),
    }
    decide = (lambda reports: RepeatDecision(len(reports) >= rounds, f"after {len(reports)}")) if rounds > 1 else None
    loop = Loop("rollout", "env", "policy", CHUNK_STEPS, max_rounds=rounds + 2, decide=decide)
    edges = (Edge("policy", "actor"), Edge("env", "actor"))
    return Workflow("fake", 4, stages, edges, (WeightEdge("actor", "policy"),), {"rollout": loop})


def by_hand(iterations: int, rounds: int = 1) -> list[float]:
    """The same arithmetic as the fakes', written as plain loops."""
    weight, totals = 0, []
    for iteration in range(iterations):
        total = 0
        for round_ in range(rounds):
            for block in range(4):
                value = 1000 * block + 100 * iteration + 10 * round_
                for _ in range(CHUNK_STEPS):
                    total += value  # seen by the policy
                    value += value * 2 % 97 + weight
                    total += value  # kept in the env's history
                total += value  # the last one shown
        totals.append(float(total))
        weight = total % 89
    return totals


def make(name: str, session: Session, graph: Workflow, transport: str = "adaptive") -> Executor:
    devices, (env, policy, actor, shards) = PLANS[name]
    loop = {"name": "rollout", "shards": shards, "stages": {"env": env, "policy": policy}}
    tree = {"temporal": [{"loop": loop}, {"leaf": {"stage": "actor", "devices": actor}}]}
    cluster = Cluster("test", "cpu", devices, devices, 0, transport=transport)
    return Executor(graph, resolve(name, [{"tree": tree}], devices, graph), session, cluster)


def totals(executor: Executor, iterations: int) -> list[float]:
    return [executor.run(StepContext(k)).reports["actor"][0][0]["total"] for k in range(iterations)]


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_gives_the_totals_computed_by_hand(name: str) -> None:
    assert totals(make(name, SerialSession(), workflow()), 3) == by_hand(3)


@pytest.mark.parametrize("name", ["collocated on 2", "disaggregated on 2", "hybrid on 2"])
def test_a_repeated_loop_runs_until_its_judge_has_enough(name: str) -> None:
    executor = make(name, SerialSession(), workflow(rounds=2))
    result = executor.run(StepContext(0))
    assert result.reports["actor"][0][0] == {"total": by_hand(1, rounds=2)[0], "message": "after 2"}
    assert len(result.reports["env"]) == 2


class Listening(SerialSession):
    """Knows which methods were called."""

    def __init__(self) -> None:
        super().__init__()
        self.methods: set[str] = set()

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        self.methods |= {call.method for _, call, _ in calls}
        return super().submit(calls, collective)


@pytest.mark.parametrize(
    ("transport", "methods"), [("adaptive", {"loop"}), ("object_store", {"open", "step", "close"})]
)
def test_a_loop_within_workers_is_one_call_unless_everything_goes_through_the_store(
    transport: str, methods: set[str]
) -> None:
    session = Listening()
    executor = make("collocated on 2", session, workflow(), transport)
    assert totals(executor, 2) == by_hand(2)
    assert session.methods & {"loop", "open", "step", "close"} == methods


@pytest.mark.ray
@pytest.mark.parametrize("name", ["collocated on 2", "disaggregated on 2", "hybrid on 2"])
def test_ray_gives_the_same_in_processes_of_their_own(name: str, ray_session: Session) -> None:
    executor = make(name, ray_session, workflow())
    assert totals(executor, 2) == by_hand(2)
    pids = {pid for pid, _ in executor.facts["env"]} | set(executor.facts["policy"])
    assert os.getpid() not in pids
    assert len(pids) == 2


@pytest.mark.ray
def test_a_failing_stage_names_itself_its_worker_and_the_reason(ray_session: Session) -> None:
    executor = make("collocated on 2", ray_session, workflow(env={"fail_at": 1}))
    with pytest.raises(WorkerError, match=r"worker \d .* failed in env.loop .*ValueError: the fake failed"):
        executor.run(StepContext(0))


@pytest.mark.ray
def test_a_hang_says_who_waits_for_whom(impatient_ray_session: Session) -> None:
    executor = make("disaggregated on 2", impatient_ray_session, workflow(env={"hang_at": 0}))
    with pytest.raises(HangError, match=r"(?s)worker 0 .* is in env.step .* for 2\d s.*worker 1 .* waits for worker 0"):
        executor.run(StepContext(0))


def test_spans_cover_every_stage() -> None:
    result = make("disaggregated on 2", SerialSession(), workflow()).run(StepContext(0))
    assert {span.stage for span in result.spans} == {"env", "policy", "actor"}
    assert all(span.end_s >= span.start_s for span in result.spans)
