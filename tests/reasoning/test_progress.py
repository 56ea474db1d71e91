"""Long methods report progress, so that none that works is taken for one that hangs."""

from __future__ import annotations

from collections import Counter

import pytest
from math_runs import PPO, TWO_STEPS, tiny_math
from runs import clone, cluster, executor_for, iterate

from rlinf_embodied.config import RewardConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.reasoning.evaluation import SAMPLED, AnswerEvaluation
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.reward_stage import Verifier
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.runtime.worker_state import WorkerState
from rlinf_embodied.telemetry.progress import progress_reported_to


@pytest.fixture
def reports(monkeypatch) -> Counter[str]:
    """How often each stage's method reported progress."""
    seen: Counter[str] = Counter()
    progress = WorkerState.progress

    def counted(self) -> None:
        seen[self._step[0]] += 1
        progress(self)

    monkeypatch.setattr(WorkerState, "progress", counted)
    return seen


def test_decoding_and_passes_of_every_stage_report_progress(reports) -> None:
    small = ["algorithm.tokens_per_microbatch=64", "algorithm.kl_coef=0.1", "algorithm.critic_warmup_iterations=0"]
    config = tiny_math(*PPO[:3], *TWO_STEPS, *small)
    iterate(config, executor_for(config, config.plan.variants, 1, SerialSession()), 1)
    for stage in ("generation", "old_log_probs", "reference", "critic", "actor"):
        assert reports[f"{stage}.run"] > 4, reports  # one call of each


def test_an_evaluation_that_samples_many_answers_reports_progress(reports) -> None:
    config = tiny_math("eval.num_problems=4", "eval.problems_per_block=4", "eval.num_samples=16")
    made = StageConfig(config, str(clone(config)))
    evaluation = AnswerEvaluation(made, SerialSession(), cluster(1))
    evaluation.executor.run(StepContext(0, message=SAMPLED))
    assert reports["answers.run"] > 4, reports  # one call


def test_each_answer_of_a_users_reward_is_progress() -> None:
    done = []
    problem = Problem(0, "7+8-9=", "6", None, "sum", "sum2-2-9")
    for concurrency in (1, 3):
        config = RewardConfig(_target_="a.user's", concurrency=concurrency)
        with (
            progress_reported_to(lambda: done.append(1)),
            Verifier(PromptTemplate("compact"), config, lambda completion, problem: 1.0) as verifier,
        ):
            verifier.verify(["#6"] * 5, [problem] * 5)
    assert len(done) == 10
