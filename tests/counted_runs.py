"""Runs of the fakes (fakes.py) whose results can be computed by hand: a counter, a doubler and a summer."""

from __future__ import annotations

from collections.abc import Sequence

from placements import looped

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import Output, StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.workflow.graph import Edge, Loop, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow

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
        "actor": StageSpec("actor", "fakes.Summer", None, collective=True, whole=True),
    }
    decide = lambda reports: RepeatDecision(len(reports) >= rounds, f"after {len(reports)}")  # noqa: E731
    again = Repeat("resample", "actor", "env", decide, rounds + 2) if rounds > 1 else None
    loop = Loop("rollout", "env", "policy", CHUNK_STEPS)
    edges = (Edge("policy", "actor"), Edge("env", "actor"))
    return Workflow("fake", 4, stages, edges, (WeightEdge("actor", "policy"),), {"rollout": loop}, again)


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


def make(name: str, session: Session, graph: Workflow) -> Executor:
    devices, (env, policy, actor, shards) = PLANS[name]
    variants = looped(env, policy, shards, actor=actor)
    cluster = Cluster("test", "cpu", devices, devices, 0)
    return Executor(graph, resolve(name, variants, devices, graph), session, cluster)


def totals(executor: Executor, iterations: int) -> list[float]:
    reports = [executor.run(StepContext(k)).all_of("actor", dict)[0] for k in range(iterations)]
    return [report["total"] for report in reports]


class Sparing:
    """Either side of a loop; shows nothing any more after the chunk-step of its config, and reports how many it did."""

    def __init__(self, config: int) -> None:
        self.last = config

    def setup(self, context: object) -> None:
        self.steps = 0

    def open(self, step_context: StepContext, blocks: Sequence[int]) -> dict[int, int]:
        return dict.fromkeys(blocks, 1)

    def step(self, step_context: StepContext, answers: dict[int, int]) -> dict[int, int | None]:
        self.steps += 1
        return dict.fromkeys(answers, 1 if step_context.chunk_step < self.last else None)

    def close(self, step_context: StepContext, blocks: dict[int, object]) -> Output:
        return Output(dict.fromkeys(blocks, 0), self.steps)
