"""What training's stages do when they leave a device's memory, and that a simulator on a GPU cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from any_plan import fake
from runs import clone, tiny

from rlinf_embodied.embodied.env_stage import EnvStage, EnvStageConfig
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig, RolloutStage
from rlinf_embodied.errors import PlanError
from rlinf_embodied.learning.weights import SharedPolicy
from rlinf_embodied.runtime import host as host_module
from rlinf_embodied.runtime.host import (
    Call,
    LocalRef,
    Receipt,
    StepContext,
    WorkerHost,
    WorkerSpec,
    can_leave,
    solo_context,
)
from rlinf_embodied.workflow.graph import StageSpec

ACCELERATOR = WorkerSpec(0, "sim:0", device_module="simulated_accelerator")


@pytest.mark.accelerator
def test_a_simulator_on_a_gpu_does_not_offer_to_leave_and_a_plan_that_wants_it_out_is_refused() -> None:
    assert can_leave(EnvStage, "cpu")
    assert not can_leave(EnvStage, "cuda:0")  # so its profile says that all of its memory stays taken
    assert can_leave(RolloutStage, "cuda:0")
    context = solo_context((0,), "sim:0")
    context.exclusive = frozenset({"actor"})
    spec = StageSpec("env", "rlinf_embodied.embodied.env_stage.EnvStage", EnvStageConfig(tiny().env, 0))
    with pytest.raises(PlanError, match=r"offloads env from the memory of sim:0 for actor, but a EnvStage stays there"):
        WorkerHost(ACCELERATOR).add_stage(spec, context)


def test_the_weights_are_on_the_device_while_one_of_their_users_is() -> None:
    config, folder, shared = tiny(), str(clone(tiny())), {}
    model = PolicyStageConfig(config.policy, folder, config.env, 0)
    rollout = RolloutStage(model)
    rollout.setup(replace(solo_context((0,)), shared=shared))
    shared |= {"policy": rollout._shared}
    evaluation = RolloutStage(replace(model, greedy=True, records=False, evaluates=True))
    evaluation.setup(replace(solo_context((0,)), shared=shared))
    policy = shared["policy"]
    assert isinstance(policy, SharedPolicy)
    assert evaluation._shared is policy
    assert policy.users == {"policy"}  # evaluation holds nothing before it runs
    rollout.offload(StepContext(0))
    assert policy.users == set()
    evaluation.step(StepContext(0), {0: None})
    assert policy.users == {"eval_policy"}  # although training's stages are out
    rollout.onload(StepContext(0))
    evaluation.close(StepContext(0), {0: None})
    assert policy.users == {"policy"}


def worker_on_a_gpu(**exclusive: str) -> WorkerHost:
    """A worker of fakes, each of which excludes the others that it names."""
    worker = WorkerHost(ACCELERATOR)
    for number, (name, others) in enumerate(exclusive.items()):
        context = solo_context((0, 1))
        context.exclusive = frozenset(others)
        worker.add_stage(fake(name, number), context)
    return worker


@pytest.mark.accelerator
def test_what_a_leaving_stage_keeps_in_its_worker_leaves_too(monkeypatch) -> None:
    moved: list[object] = []
    monkeypatch.setattr(host_module, "to_device", lambda value, device: moved.append((value, device)) or value)
    worker = worker_on_a_gpu(a="b", b="a")
    kept, _, receipt = worker.invoke(Call("a", "run", StepContext(0), (0, 1), keep=frozenset({0, 1})), [])
    assert isinstance(receipt, Receipt)
    values = list(receipt.report.values())  # pyright: ignore[reportAttributeAccessIssue]
    assert moved == []
    worker.invoke(Call("b", "run", StepContext(0), (0,), 1), [kept])
    assert moved == [(value, "cpu") for value in values]


@pytest.mark.accelerator
def test_of_a_loop_in_one_call_each_side_takes_its_own_data_along(monkeypatch) -> None:
    moved: list[object] = []
    monkeypatch.setattr(host_module, "to_device", lambda value, device: moved.append(value) or value)
    worker = worker_on_a_gpu(e="", p="l", l="p")  # the opener stays where it is
    call = Call("e", "loop", StepContext(0), (0, 1), keep=frozenset({0, 1}), partner="p", chunk_steps=1)
    *results, _ = worker.invoke(call, [])
    theirs = [worker._store[ref.key] for ref in results[2:] if isinstance(ref, LocalRef)]
    assert len(theirs) == 2
    worker.invoke(Call("l", "enter", StepContext(0)), [])
    assert moved == theirs


@pytest.mark.gpu
def test_a_policy_on_a_gpu_leaves_its_memory_and_comes_back_the_same() -> None:
    config = tiny()
    stage = RolloutStage(PolicyStageConfig(config.policy, str(clone(config)), config.env, 0))
    stage.setup(solo_context((0,), "cuda:0"))
    before = {name: tensor.cpu().clone() for name, tensor in stage._shared.policy.module.state_dict().items()}
    parameters = list(stage._shared.policy.module.parameters())
    stage.offload(StepContext(0))
    assert {p.device.type for p in parameters} == {"cpu"}  # the optimizer's own list follows
    stage.onload(StepContext(0))
    assert {p.device.type for p in parameters} == {"cuda"}
    after = stage._shared.policy.module.state_dict()
    assert all(torch.equal(before[name], tensor.cpu()) for name, tensor in after.items())
