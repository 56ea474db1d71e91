"""Cores beside accelerators: simulators on cores, everything else on accelerators, and the weights of a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from accelerated_runs import MODULE, ROOM, overrides
from runs import clone, digest, executor_for, iterate, metric_rows, tiny, train, trees

from rlinf_embodied.cluster.hardware import Cluster, with_cores
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import PlanConfig
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.errors import ConfigError, PlanError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.session import SerialSession, Session

pytestmark = pytest.mark.accelerator

EXACT = ["algorithm.reduction=exact", "env.rows_per_call=4", "cluster.cpu_devices=2"]


def cluster(devices: int = 1, cores: int = 2) -> Cluster:
    return with_cores(Cluster("test", "sim", devices, 4, ROOM, device_module=MODULE), cores)


def executor(plan: PlanConfig, devices: int, session: Session) -> Executor:
    config = tiny(*EXACT)
    workflow = training_workflow(config, str(clone(config)))
    places = cluster(devices)
    return Executor(workflow, resolve(plan.name, plan.variants, places, workflow), session, places)


@pytest.fixture(scope="module")
def of_the_cpu() -> str:
    config = tiny("algorithm.reduction=exact")
    made = executor_for(config, trees("all", "all", "all"), 1, SerialSession(), clone(config))
    iterate(config, made, 2)
    return digest(made)


def preset(name: str) -> PlanConfig:
    return compose_train([f"plan={name}"]).plan


@pytest.mark.parametrize(
    ("name", "devices", "policy", "actor"),
    [("collocated", 1, [0], [0]), ("disaggregated", 2, [0], [1]), ("hybrid", 2, [0, 1], [0, 1])],
)
def test_simulators_are_on_cores_and_all_else_is_not(of_the_cpu, sim, name, devices, policy, actor) -> None:
    made = executor(preset(name), devices, SerialSession())
    assert made.workers("env") == [devices, devices + 1]
    assert (made.workers("policy"), made.workers("actor")) == (policy, actor)
    iterate(tiny(*EXACT), made, 2)
    assert digest(made) == of_the_cpu
    assert all(sim.memory_allocated(k) > 0 for k in range(devices))


@pytest.mark.ray
@pytest.mark.slow
def test_a_plan_is_found_that_keeps_simulators_on_cores_and_evaluates_there(tmp_path: Path) -> None:
    config = tiny(
        *overrides(1),
        *EXACT,
        f"run.dir={tmp_path / 'run'}",
        "plan=auto",
        "plan.profile_budget_s=3",
        "cluster.session=ray",
    )
    summary = train(config)
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert "auto" in plan["name"]
    spans = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    places: dict[str, set[int]] = {}
    for event in spans:
        if event["ph"] == "X":
            places.setdefault(event["cat"], set()).add(event["pid"])
    assert places["env"] <= {1, 2}
    assert places["policy"] == places["actor"] == {0}
    assert summary["backend"]
    assert metric_rows(tmp_path / "run")


def test_what_is_placed_otherwise_is_refused() -> None:
    config = tiny(*EXACT)
    workflow, places = training_workflow(config, "nowhere"), cluster(1)
    with pytest.raises(PlanError, match=r"has env on the devices \[0\], but .* run on cores, \[1, 2\]"):
        resolve("own", trees([0], [0], [0]), places, workflow)
    with pytest.raises(PlanError, match=r"has actor on the devices \[1\], .* and other stages do not"):
        resolve("own", trees([1], [0], [1]), places, workflow)
    assert resolve("own", trees([1, 2], [0], [0]), places, workflow).places()["env"].devices == (1, 2)
    own = [{"cores": True, **trees("cores", "all", "all")[0]}]
    with pytest.raises(PlanError, match="needs CPU cores next to accelerators: set cluster"):
        resolve("own", own, replace(places, groups=(), num_devices=1), workflow)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["cluster.cpu_devices=2", "cluster.torch_device=cpu"],
            "it adds cores to nodes with accelerators, and there are none",
        ),
        ([*overrides(1), "cluster.cpu_devices=4096"], "but a node has .* cores: use cluster.cpu_devices="),
        ([*overrides(1), "cluster.cpu_devices=-1"], "cluster.cpu_devices is -1, but it must not be negative"),
        (
            [*overrides(1), "env=maniskill_pick", "cluster.cpu_devices=1", "env.options.backend=gpu"],
            "env.options.backend is 'gpu', but .* simulators run on cores: use env.options.backend=auto",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(tmp_path: Path, given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(tiny(*given, f"run.dir={tmp_path / 'run'}"))
