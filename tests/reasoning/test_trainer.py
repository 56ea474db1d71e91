"""A run may be stopped, killed or resumed anywhere: it ends where an uninterrupted one does, the critic included."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from math_runs import tiny_math
from runs import clone, metric_rows, train, trainer_of
from stopped_runs import interrupt_in, straight_runs

from policies.causal_lm import CausalLM
from rlinf_embodied.config import LanguagePolicyConfig, MathConfig
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.learning import checkpoint
from rlinf_embodied.learning.checkpoint import weights_sha256
from rlinf_embodied.reasoning.evaluation import AnswerStage
from rlinf_embodied.telemetry.plots import plot_curve

REFERENCE = ["algorithm.kl_coef=0.1", "algorithm.drop_zero_variance_groups=false"]
LORA = ["policy.lora.rank=4", "algorithm.lr=1e-2"]
VARIANTS = {
    "grpo": [],
    "reference": REFERENCE,
    "reference with lora": [*REFERENCE, *LORA],
}


def four(folder: Path, *overrides: str) -> MathConfig:
    """Four iterations, a checkpoint after every second."""
    short = ["run.num_iterations=4", "checkpoint.every=2", "eval.num_problems=8", "eval.num_samples=0"]
    config = tiny_math(*short, *overrides)
    config.run.dir = str(folder)
    return config


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns what gives the folder of a variant's uninterrupted run."""
    return straight_runs(tmp_path_factory, lambda folder, variant: train(four(folder, *VARIANTS[variant])), "grpo")


# ------------------------------------------------------------------------------------------------------ stop and go on
def test_adapters_reach_workers_that_only_evaluate(monkeypatch, tmp_path) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, 1)
        train(four(tmp_path, *LORA), code=130)
    used, stages, original = [], [], AnswerStage.run

    def run(self, step_context, inputs):
        used.append(weights_sha256(self._shared.policy.module.state_dict()))
        stages.append(self)
        return original(self, step_context, inputs)

    monkeypatch.setattr(AnswerStage, "run", run)
    train(four(tmp_path, *LORA, "plan=pipelined", "cluster.num_devices=4", "eval.problems_per_block=2"))
    assert len(used) == 4
    assert len(set(used)) == 1
    assert all(AnswerStage._user not in stage._shared.users for stage in stages)  # it holds no memory afterwards


def test_it_trains_and_says_so(straight, tmp_path) -> None:
    summary = json.loads((straight() / "summary.json").read_text())
    rows = metric_rows(straight())
    assert summary["tokens"] == rows[-1]["global_step"] == sum(row["rollout/tokens"] for row in rows)
    first = json.loads((straight() / "metrics.jsonl").read_text().partition("\n")[0])
    assert first["charts/tokens_per_s_per_device"] >= first["charts/tokens_per_s"]  # on one device
    assert first["charts/update_tflop_per_s_per_device"] > 0
    assert rows[0]["charts/length_p50"] <= rows[0]["charts/length_p99"] <= rows[0]["rollout/longest"]
    assert (summary["problems"], summary["num_eval_problems"]) == (32, 8)
    assert summary["weights_sha256"] != weights_sha256(
        CausalLM.from_config(LanguagePolicyConfig(), clone(tiny_math()), 0).module.state_dict()
    )
    low, high = summary["accuracy_after_interval"]
    assert low <= summary["accuracy_after"] <= high
    table = (straight() / "samples.md").read_text().splitlines()
    assert len(table) == 2 + 8
    assert plot_curve(straight()).read_bytes().startswith(b"\x89PNG")


def test_evaluations_on_the_way_change_nothing(straight, tmp_path) -> None:
    summary = train(four(tmp_path, "eval.every=1", "plan=disaggregated", "cluster.num_devices=2"))
    assert summary["weights_sha256"] == json.loads((straight() / "summary.json").read_text())["weights_sha256"]
    metrics = metric_rows(tmp_path)
    assert [i for i, row in enumerate(metrics, 1) if "eval/accuracy" in row] == [1, 2, 3]  # the last one comes after


@pytest.mark.parametrize("variant", ["reference", "reference with lora"])
def test_the_divergence_is_measured_from_the_policy_that_the_run_started_from(straight, tmp_path, variant) -> None:
    state = checkpoint.load_state(straight(variant) / "checkpoints/latest")
    assert Path(str(state["reference"])) == clone(tiny_math()).resolve()
    rows = metric_rows(straight(variant))
    assert rows[0]["losses/reference_kl"] == pytest.approx(0, abs=1e-9)
    assert rows[-1]["losses/reference_kl"] > 1e-5
    # resumed from the second iteration on, it is still measured from the first policy, not from the checkpoint
    resume = [f"resume={straight(variant) / 'checkpoints/step_000002'}", "plan=disaggregated", "cluster.num_devices=2"]
    train(four(tmp_path, *VARIANTS[variant], *resume))
    assert metric_rows(tmp_path) == rows[2:]


# ------------------------------------------------------------------------------------------------------------- refusals
def test_without_its_reference_a_run_does_not_continue(straight, tmp_path) -> None:
    shutil.copytree(straight("reference"), tmp_path, dirs_exist_ok=True, symlinks=True)
    reference = str(checkpoint.load_state(tmp_path / "checkpoints/latest")["reference"])
    moved = clone(tiny_math()).rename(clone(tiny_math()).with_name("moved"))
    try:
        with pytest.raises(
            CheckpointError, match=r"kl_coef is 0.1, but the policy .* no longer in .*: copy it to that folder"
        ):
            trainer_of(four(tmp_path, *REFERENCE))
    finally:
        moved.rename(reference)
