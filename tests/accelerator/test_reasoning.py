"""The reasoning workflow on an accelerator: fine-tuning, generation, log-probs, critic and adapters."""

from __future__ import annotations

import pytest
from accelerated_runs import accelerators
from math_runs import DAPO, PPO, TWO_STEPS, tiny_math
from runs import cluster, digest, iterate

from rlinf_embodied.config import MathConfig
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.reasoning import job as job_module
from rlinf_embodied.reasoning.fine_tuning import starting_policy
from rlinf_embodied.reasoning.workflow import training_workflow
from rlinf_embodied.runtime.session import SerialSession

pytestmark = pytest.mark.accelerator

EXACT = ["algorithm.reduction=exact", "warm_start.reduction=exact"]
VARIANTS = {
    "one step": ([], 1),
    "two steps and a reference": ([*TWO_STEPS, "algorithm.kl_coef=0.1"], 2),
    "ppo": ([*PPO, "algorithm.critic_warmup_iterations=0"], 2),
    "dapo": (DAPO, 2),
}


@pytest.fixture(scope="module", autouse=True)
def _no_images():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_module, "plot_curve", lambda folder: folder / "curve.png")
        yield


def trained(config: MathConfig, where, devices: int) -> tuple[str, dict[str, float]]:
    """Returns the digest of the weights and the metrics after two iterations."""
    session, place = SerialSession(), where(devices)
    folder = starting_policy(config, session, place, lambda *progress: None)
    workflow = training_workflow(config, str(folder))
    name = "collocated" if devices == 1 else "disaggregated"
    plan = resolve(name, tiny_math(f"plan={name}").plan.variants, devices, workflow)
    executor = Executor(workflow, plan, session, place)
    metrics = iterate(config, executor, 2)[-1]
    return digest(executor), metrics


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_iterations_give_the_weights_of_the_cpu(sim, variant: str) -> None:
    more, devices = VARIANTS[variant]
    config = tiny_math(*EXACT, "generation.rows_per_batch=32", *more)  # one set: those of a call decode together there
    before = sim.operations()
    weights, metrics = trained(config, accelerators, devices)
    assert sim.operations() > before + 1000
    assert metrics["charts/optimizer_steps"] > 0
    assert weights == trained(config, cluster, devices)[0]
