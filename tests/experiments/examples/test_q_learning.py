"""A classic RL workflow goes through the machinery of the VLAs: it is planned, it learns, and no plan changes it."""

from __future__ import annotations

import torch
from placements import leaves

from experiments.examples import q_learning as script
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession

CLIFF = "CliffWalking-v1"  # -1 per step: 13 steps at best, 100 until the time is up
CORES = Cluster("test", "cpu", 2, 2, 8 << 30)


def test_light_learners_on_one_device_are_planned_and_walk_along_the_cliff() -> None:
    flow = script.workflow(CLIFF, [0.5, 0.2, 0.1])
    best, returns = script.train(flow, SerialSession(), Cluster("test", "cpu", 1, 1, 8 << 30), 25)
    assert set(best.plan.places()) == {"collect", "replay", "learn0", "learn1", "learn2"}
    assert best.plan.devices() == (0,)
    assert [before for before, _ in returns] == [-100.0] * 3
    assert returns[0] == [-100.0, -13.0]
    assert returns[1][1] == -13.0


def tables(variants: list[dict]) -> torch.Tensor:
    """Returns the learner's table after a few iterations under a plan; all of its workers must have the same."""
    flow = script.workflow(CLIFF, [0.5])
    executor = Executor(flow, resolve("test", variants, 2, flow), SerialSession(), CORES)
    for k in range(3):
        reports = executor.run(StepContext(k)).all_of("learn0", torch.Tensor)
    assert all(torch.equal(report, reports[0]) for report in reports)
    return reports[0]


def test_its_table_has_the_same_bits_under_every_plan() -> None:
    alone = tables(leaves(collect=[0], replay=[0], learn0=[0]))
    assert float(alone.abs().sum()) > 0
    for plan in (leaves(collect="all", replay="all", learn0="all"), leaves(collect=[0], replay=[1], learn0="all")):
        assert torch.equal(tables(plan), alone)
