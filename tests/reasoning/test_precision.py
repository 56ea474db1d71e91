"""An actor that computes in bfloat16: its own log-probs are those of its passes, generation stays what it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from math_runs import TWO_STEPS, tiny_math, warm
from runs import cluster

from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.weights import WeightsMessage
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.reasoning.workflow import training_workflow
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.training.job import Progress

SHARDED = ["algorithm.sharding=fsdp2", "run.exact=false"]


@pytest.fixture(autouse=True)
def _no_group_stays():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("variant", [TWO_STEPS, SHARDED], ids=["two steps", "in slices"])
def test_an_iteration_corrects_for_float32_generation_and_moves_float32_weights(variant: list[str]) -> None:
    config = tiny_math("algorithm.precision=bfloat16", *variant)
    workflow = training_workflow(config, str(warm(config)))
    executor = Executor(workflow, resolve("test", config.plan.variants, 1, workflow), SerialSession(), cluster(1))
    row = ReasoningJob(config).run_iteration(executor, Progress())[1]
    assert 1e-4 < row["losses/mismatch_max"] < 0.5  # generation's weights are the same, but nothing was rounded there
    assert row["losses/initial_log_ratio"] < (0.3 if variant == TWO_STEPS else 1e-6)  # other batches; the pass itself
    assert row["losses/grad_norm"] > 0
    (message,) = executor.call("actor", "export_weights", StepContext(0))
    assert isinstance(message, WeightsMessage)
    assert {value.dtype for value in message.tensors.values()} == {torch.float32}
