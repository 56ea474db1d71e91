"""Weights go from worker to worker: the driver hands on references, and what it reads itself is small."""

from __future__ import annotations

import pickle

import pytest
import ray
from plan_cases import parse

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession, Session
from rlinf_embodied.workflow.graph import Edge, StageSpec, WeightEdge, Workflow

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
