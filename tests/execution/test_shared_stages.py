"""One stage in two loops of a graph: one policy learns in two envs, iteration by iteration; planned, and run alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runs import cluster, tiny

from rlinf_embodied.embodied.env_stage import EnvStageConfig
from rlinf_embodied.embodied.graph import ACTOR, ENV, POLICY
from rlinf_embodied.embodied.warm_start import starting_policy
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.errors import PlanError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import measure
from rlinf_embodied.planning.explain import rank
from rlinf_embodied.planning.plan import Plan, resolve
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession, Session
from rlinf_embodied.workflow.graph import Edge, Loop, Workflow

WALLED = "walled_env"


def two_envs() -> Workflow:
    """The embodied workflow with a second env, in which there is a wall; both loops have the one policy."""
    config = tiny("policy=actor_critic", "env.cameras=[]")
    folder: Path = starting_policy(config, SerialSession(), cluster(1), lambda *progress: None)
    work = training_workflow(config, str(folder))
    walled = replace(config.env, options={"gap": 0.5})
    again = replace(work.stages[ENV], name=WALLED, config=EnvStageConfig(walled, config.run.seed, keep_images=True))
    loops = {
        "open": replace(work.loops["rollout"], name="open", shards=(1,)),
        "walled": Loop("walled", WALLED, POLICY, config.env.chunks_per_rollout, shards=(1,)),
    }
    edges = (*work.edges, Edge(WALLED, ACTOR))  # in the order of the loops, as the policy's columns are
    return replace(work, name="two envs", stages={**work.stages, WALLED: again}, edges=edges, loops=loops)


def placed(env: object, walled: object, policy: object, actor: object) -> dict:
    first = {"loop": {"name": "open", "shards": 1, "stages": {ENV: env, POLICY: policy}}}
    second = {"loop": {"name": "walled", "shards": 1, "stages": {WALLED: walled, POLICY: policy}}}
    return {"temporal": [first, second, {"leaf": {"stage": ACTOR, "devices": actor}}]}


PLANS = {
    "collocated on 2": (2, placed("all", "all", "all", "all")),
    "envs apart from the policy": (2, placed([0], [0], [1], "all")),
    "one loop in one place, one apart": (3, placed([0, 1], [2], [0, 1], [1, 2])),
    "all apart": (3, placed([0], [2], [1], [0, 1, 2])),
}


def trained(work: Workflow, plan: Plan, session: Session) -> list[object]:
    """Returns digests of the weights and the env's reports, by iteration."""
    executor = Executor(work, plan, session, cluster(plan.num_devices))
    found: list[object] = []
    for number in range(3):
        result = executor.run(StepContext(number))
        episodes = [
            sorted((e.env_id, e.seed) for rounds in result.reports[stage] for report in rounds for e in report.episodes)  # pyright: ignore[reportAttributeAccessIssue]
            for stage in (ENV, WALLED)
        ]
        (digest,) = set(executor.call(ACTOR, "weights_digest", StepContext(0)))
        found.append((digest, episodes))
    return found


@pytest.fixture(scope="module")
def work() -> Workflow:
    return two_envs()


@pytest.fixture(scope="module")
def alone(work) -> list[object]:
    return trained(work, resolve("one", [{"tree": placed("all", "all", "all", "all")}], 1, work), SerialSession())


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_weights_of_one_worker(work, alone, plan: str) -> None:
    devices, tree = PLANS[plan]
    assert trained(work, resolve("p", [{"tree": tree}], devices, work), SerialSession()) == alone


def test_rounds_of_the_shared_stage_are_all_different(alone) -> None:
    """Rounds key what is drawn: were they alike, both loops would begin with the same seeds and noise."""
    for _, (first, second) in alone:
        assert {seed for _, seed in first}.isdisjoint(seed for _, seed in second)
    assert len({digest for digest, _ in alone}) == 3


def test_it_is_measured_and_planned_as_one_unit(work, alone) -> None:
    machine = replace(cluster(2), memory_bytes=1 << 34)
    profile = measure(work, SerialSession(), machine, "two envs", {}, lambda *progress: None, budget_s=1.0)
    ranked, _ = rank(Pricer(work, profile, machine))
    assert all(list(entry.plan.loops()) == ["open", "walled"] for entry in ranked)
    assert {stage for entry in ranked for stage in entry.busy_s} == set(work.stages)
    for entry in ranked[:2]:
        again = resolve("again", [entry.plan.to_dict()], 2, work)
        assert trained(work, again, SerialSession()) == alone


OPEN, WALL, LEARNS = placed([0], [0], [1], "all")["temporal"]
OTHER_PLACE = placed([0], [0], [0], "all")["temporal"][1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([WALL, OPEN, LEARNS], "has walled before open, but they share a stage, .* swap the parts"),
        ([OPEN, OTHER_PLACE, LEARNS], r"puts policy on the devices \[1\] in one loop and on \[0\] in another"),
        ([OPEN, LEARNS], r"add \['walled_env'\] to the stages of its loop"),
    ],
)
def test_plans_that_tear_the_shared_stage_apart_are_refused(work, parts: list[dict], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve("mine", [{"tree": {"temporal": parts}}], 2, work)


@pytest.mark.ray
def test_ray_workers_give_the_weights_of_one_process(work, alone, ray_session) -> None:
    devices, tree = PLANS["envs apart from the policy"]
    assert trained(work, resolve("p", [{"tree": tree}], devices, work), ray_session) == alone
