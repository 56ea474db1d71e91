"""PPO and GRPO from demonstrations to checkpoints with every tensor of a stage on an accelerator.

The accelerator's kernels are the CPU's, so with sums in the same order the weights are those of a CPU, bit for bit.
"""

from __future__ import annotations

import functools
import gc
import json
import shutil
from pathlib import Path

import openvla_folders
import pytest
import torch
from accelerated_runs import accelerators, clone_on_sim, executor_on_sim, overrides
from placements import switching
from policy_calls import rows_of_calls
from runs import (
    GRPO,
    clone,
    digest,
    executor_for,
    exported_weights,
    iterate,
    metric_rows,
    tiny,
    tiny_overrides,
    train,
    trees,
)

from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.policy_folder import load_policy
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.errors import PlanError, WorkerError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import Call, StepContext, WorkerHost
from rlinf_embodied.runtime.session import SerialSession

pytestmark = pytest.mark.accelerator

EXACT = ("algorithm.reduction=exact", "env.rows_per_call=4")  # the default is all-reduce, and calls of all rows
APART = trees("0:1/2", "1/2:1", "1/2:1", shards=2)
SWITCHING = switching(APART, "env+policy", "actor")
PLANS = {
    "collocated": (1, trees("all", "all", "all")),
    "disaggregated": (2, APART),
    "hybrid": (2, trees("0:1/2", "1/2:1", "all", shards=2)),
    "switching": (2, SWITCHING),
}
VARIANTS = {
    "ppo": [],
    "grpo": GRPO,
    "critic from images": ["policy.critic=observation", "algorithm.bootstrap_at_timeout=true"],
    "carried over": ["env.carry_over=true", "policy.options.freeze_stem=false"],
    "flow": ["policy=flow_vla", "policy.temperature=0.5", "policy.options.expert_size=32"],
}
CASES = [
    *(("ppo", plan) for plan in PLANS),
    ("grpo", "disaggregated"),
    ("critic from images", "disaggregated"),
    ("carried over", "collocated"),
    ("flow", "disaggregated"),
]


@functools.cache
def on_the_cpu(variant: str) -> str:
    """Returns the digest of the weights after two iterations on a core."""
    config = tiny(*EXACT, *VARIANTS[variant])
    executor = executor_for(config, PLANS["collocated"][1], 1, SerialSession(), clone(config))
    iterate(config, executor, 2)
    return digest(executor)


def same_policy(config: TrainConfig, a: Path, b: Path) -> bool:
    first, second = (load_policy(config.policy, str(folder), "cpu").policy.module.state_dict() for folder in (a, b))
    return all(torch.equal(value, second[name]) for name, value in first.items())


# --------------------------------------------------------------------------------------------------------- warm start
def test_cloning_on_accelerators_gives_the_policy_of_the_cpu(sim) -> None:
    before = sim.operations()
    config = tiny(*EXACT)
    theirs = clone_on_sim(config, devices=2)
    assert sim.operations() > before + 1000
    assert theirs != clone(config)  # the cache keeps kinds of devices apart
    assert same_policy(config, theirs, clone(config))


def test_demonstrations_of_a_simulator_on_the_device_wait_in_the_memory_of_the_cpu(sim) -> None:
    config = tiny("warm_start.num_demos=16", "warm_start.epochs=1", "warm_start.head_epochs=1", "run.seed=5")
    workflow_blocks = _Watched(sim)
    clone_on_sim(config, session=workflow_blocks)
    assert workflow_blocks.grown == 0


class _Watched(SerialSession):
    """Notes by how much the device's memory has grown once the last demonstration was made."""

    def __init__(self, sim) -> None:
        super().__init__()
        self._sim, self.grown = sim, -1

    def submit(self, calls, collective=False):
        collects = bool(calls) and calls[0][1].method == "collect"
        before = self._sim.memory_allocated(0)
        answers = super().submit(calls, collective)
        if collects:
            self.grown = self._sim.memory_allocated(0) - before
        return answers


def test_an_openvla_folder_is_trained_on_accelerators_as_on_a_cpu(tmp_path) -> None:
    folder = openvla_folders.write_published(tmp_path / "published", action=2)
    own = ["policy=openvla_oft", "policy.options.prompt_length=24", "policy.options.lora.rank=4"]
    own += [f"warm_start.checkpoint={folder}", "run.num_iterations=2", "algorithm.critic_warmup_iterations=0"]
    small = [text for text in tiny_overrides(*EXACT) if not text.startswith(("policy.", "warm_start."))]
    digests = set()
    for name, where in (("cpu", []), ("sim", overrides(2))):
        given = dict(text.split("=", 1) for text in [*small, *own, *where, f"run.dir={tmp_path / name}"])
        config = compose_train([f"{key}={value}" for key, value in given.items()])
        digests.add(train(config)["weights_sha256"])
    assert len(digests) == 1


# ----------------------------------------------------------------------------------------------------------- training
def test_a_policy_call_has_all_rows_of_a_worker_unless_it_is_bounded() -> None:
    assert rows_of_calls(tiny(), "sim:0") == [16, 16]
    assert rows_of_calls(tiny("env.rows_per_call=9"), "sim:0") == [8, 8, 8, 8]
    (metrics,) = iterate(tiny(), executor_on_sim(tiny(), PLANS["collocated"][1], 1, clone(tiny())), 1)
    assert metrics["losses/initial_log_ratio"] <= 1e-5  # training scores in calls of a block


@pytest.mark.parametrize(("variant", "plan"), CASES)
def test_two_iterations_give_the_weights_of_the_cpu(sim, variant: str, plan: str) -> None:
    config, (devices, tree) = tiny(*EXACT, *VARIANTS[variant]), PLANS[plan]
    executor = executor_on_sim(config, tree, devices, clone(config))
    before = sim.operations()
    metrics = iterate(config, executor, 2)
    assert sim.operations() > before + 1000
    assert metrics[-1]["losses/policy_steps"] > 0
    assert digest(executor) == on_the_cpu(variant)


@pytest.mark.parametrize("variant", ["ppo", "grpo", "flow"])
def test_fast_sums_take_all_rows_at_once_and_give_about_the_weights_of_the_cpu(sim, variant: str) -> None:
    fast, counts, weights = tiny("env.rows_per_call=4", *VARIANTS[variant]), [], []
    for config in (tiny(*EXACT, *VARIANTS[variant]), fast):
        executor = executor_on_sim(config, PLANS["collocated"][1], 1, clone(config))
        before = sim.operations()
        iterate(config, executor, 2)
        counts.append(sim.operations() - before)
        weights.append(exported_weights(executor))
    assert counts[1] < 0.85 * counts[0]  # there are four blocks; rollouts, which count as well, are the same
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=0)


def test_passes_in_bfloat16_are_close_to_those_in_float32(sim) -> None:
    rows = []
    for precision in ("float32", "bfloat16"):
        config = tiny(*EXACT, f"algorithm.precision={precision}", "algorithm.critic_warmup_iterations=0")
        executor = executor_on_sim(config, PLANS["collocated"][1], 1, clone(config))
        rows += iterate(config, executor, 1)
    assert rows[1]["losses/initial_log_ratio"] <= 1e-5
    assert rows[1]["losses/grad_norm"] != rows[0]["losses/grad_norm"]
    assert rows[1]["losses/grad_norm"] == pytest.approx(rows[0]["losses/grad_norm"], rel=0.2)


def test_a_run_on_an_accelerator_films_checkpoints_and_continues_there_and_on_the_cpu(tmp_path) -> None:
    here, there = tmp_path / "sim", tmp_path / "cpu"
    films = ["eval.record_video=true", "eval.num_videos=1", "eval.num_episodes=3", "eval.num_envs=3", *EXACT]
    short = ["run.num_iterations=2", "checkpoint.every=2", *films]
    assert train(tiny(f"run.dir={here}", *overrides(), *short))["iterations"] == 2
    assert train(tiny(f"run.dir={there}", *short))["iterations"] == 2
    assert [path.name for path in here.glob("videos/*/*.mp4")] != []
    shutil.copytree(here, tmp_path / "sim then cpu", symlinks=True)
    shutil.copytree(there, tmp_path / "cpu then sim", symlinks=True)
    longer = ["run.num_iterations=3", *short[1:]]
    found = {
        train(tiny(f"run.dir={folder}", *where, *longer))["weights_sha256"]
        for folder, where in (
            (here, overrides()),
            (tmp_path / "sim then cpu", []),
            (tmp_path / "cpu then sim", overrides()),
        )
    }
    assert len(found) == 1
    kinds = [json.loads((folder / "manifest.json").read_text())["hardware"]["kind"] for folder in (here, there)]
    assert kinds == ["sim", "cpu"]
    assert metric_rows(here)[:2] == metric_rows(there)[:2]


# ------------------------------------------------------------------------------------------------------ context switch
def worker(session: SerialSession, number: int) -> WorkerHost:
    return session._hosts[number]


def test_after_a_switch_no_byte_of_the_stage_that_left_is_on_the_device(sim) -> None:
    config, session = tiny(), SerialSession()
    folder = clone(config)
    gc.collect()
    assert sim.memory_allocated(1) == 0
    executor = executor_on_sim(config, SWITCHING, 2, folder, session)
    iterate(config, executor, 1)
    host = worker(session, 1)  # of policy and actor, whose data lies on sim:1
    policy = load_policy(config.policy, str(folder), "cpu").policy.module
    weights = sum(tensor.numel() * tensor.element_size() for tensor in policy.state_dict().values())
    host.invoke(Call("policy", "enter", StepContext(0)), [])
    assert 0 < sim.memory_allocated(1) <= weights * 1.01  # the policy's weights; moments and samples have left
    host.invoke(Call("actor", "enter", StepContext(0)), [])
    host._switch("actor", "offload", StepContext(0))
    assert sim.memory_allocated(1) == 0
    host._switch("actor", "onload", StepContext(0))
    iterate(config, executor, 2)  # and it continues
    session.close()


def test_what_a_worker_keeps_is_gone_once_it_is_cleared(sim) -> None:
    config, session = tiny(), SerialSession()
    iterate(config, executor_on_sim(config, PLANS["disaggregated"][1], 2, clone(config), session), 1)
    assert min(sim.memory_allocated(device) for device in (0, 1)) > 0
    session.clear()
    assert [sim.memory_allocated(device) for device in (0, 1)] == [0, 0]


def test_a_plan_that_takes_a_simulator_out_of_an_accelerators_memory_is_refused() -> None:
    plan = switching(trees("all", "all", "all"), "env+policy", "actor")
    with pytest.raises(PlanError, match="offloads env from the memory of sim:0 for actor, but a EnvStage stays there"):
        executor_on_sim(tiny(), plan, 1, clone(tiny()))


@pytest.mark.parametrize(("room", "where"), [(30_000, "policy.setup"), (300_000, r"(actor|policy|env)\.")])
def test_a_stage_that_does_not_fit_the_device_is_refused_with_what_to_do(sim, room: int, where: str) -> None:
    config = tiny()
    folder = clone(config)
    sim.set_limit(sim.memory_allocated(0) + room, 0)
    message = rf"worker 0 \(sim:0\) has no room for {where}.*Tried to allocate \d+ bytes.*make them exclusive"
    with pytest.raises(WorkerError, match=message):
        iterate(config, executor_on_sim(config, trees("all", "all", "all"), 1, folder), 1)


# --------------------------------------------------------------------------------------------------- worker to worker
@pytest.mark.ray
def test_workers_of_their_own_process_each_have_their_accelerator(new_ray_session) -> None:
    config, (devices, tree) = tiny(*EXACT), PLANS["hybrid"]
    workflow = training_workflow(config, str(clone(config)))
    executor = Executor(workflow, resolve("test", tree, devices, workflow), new_ray_session, accelerators(devices))
    iterate(config, executor, 2)
    assert digest(executor) == on_the_cpu("ppo")
