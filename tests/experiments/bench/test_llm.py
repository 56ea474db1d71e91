"""The benchmark of language models: equal losses on both sides, arms that do the work, and what is made of numbers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.bench.llm import __main__ as bench_llm
from experiments.bench.llm import bare, ours
from experiments.bench.llm import work as llm_work
from policies.causal_lm import CausalLM
from rlinf_embodied.config import LanguagePolicyConfig
from rlinf_embodied.errors import ConfigError

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs TRL: pip install -c constraints.txt -e '.[peers]'"
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Sums of two or three small numbers and a model that gets some of them right: groups with a spread in reward."""
    folder = tmp_path_factory.mktemp("bench_llm") / "start"
    made = llm_work.Work(start=str(folder), level="sum1-2-3", worked=0.0, prompts=4, group=4, new_tokens=8)
    llm_work.make_start(made, steps=100, examples=2_000)
    return made


# ------------------------------------------------------------------------------------------------------------- the work
def test_the_start_pads_with_its_end_token_and_solves_some_problems(work):
    policy = CausalLM.from_config(LanguagePolicyConfig(), Path(work.start), 0)
    assert policy.spec.pad_id in policy.spec.eos_ids
    assert 0.1 < llm_work.greedy_accuracy(Path(work.start), work, 100) <= 1.0


# ------------------------------------------------------------------------------------------------ no-framework baseline
def test_our_trainer_does_the_very_work_of_the_bare_cost(work, tmp_path):
    """Same prompts, same completions, same steps: what it costs more is what there is around them."""
    folders = [tmp_path / "bare", tmp_path / "ours"]
    runs = [arm.train(replace(work, steps=3), folder) for arm, folder in zip((bare, ours), folders, strict=True)]
    made, expected = ([step.tokens for step in steps] for steps in runs)
    assert made == expected
    assert len(made) == 3
    models = [CausalLM.from_config(LanguagePolicyConfig(), folder / "model", 0) for folder in folders]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)  # Adam moves by up to 3e-4


# ------------------------------------------------------------------------------------------------------------------ TRL
@needs_trl
def test_trl_trains_on_the_prompts_of_each_step(work, tmp_path):
    steps = bench_llm.run_arm("trl_1", replace(work, steps=2), tmp_path)
    assert len(steps) == 2
    assert all(4 * 4 <= step.tokens <= 4 * 4 * 8 for step in steps)
    CausalLM.from_config(LanguagePolicyConfig(), tmp_path / "model", 0)


# ---------------------------------------------------------------------------------------------------------- the numbers
def steps_of(seconds: float, tokens: int, count: int = 4):
    return [llm_work.Step(tokens, i * seconds, i * seconds / 4) for i in range(1, count + 1)]


def test_speed_is_counted_from_the_end_of_the_skipped_steps():
    found = bench_llm.measured(steps_of(2.0, 100), skipped=2, accuracy=0.5)
    assert found.s_per_step == pytest.approx(2.0)
    assert found.processor_s == pytest.approx(0.5)
    assert found.tokens_per_s == pytest.approx(50.0)


def test_goals_compare_arms_on_the_same_cores():
    made = lambda seconds, accuracy: [bench_llm.measured(steps_of(seconds, 100), 1, accuracy)]  # noqa: E731
    found = {"ours_1": made(1.0, 0.8), "trl_1": made(1.4, 0.8), "bare_1": made(0.95, 1)}
    found |= {"ours_2": made(0.5, 0.8), "trl_2": made(1.3, 0.9)}
    goals = bench_llm.goals(found)
    assert [str(goal).split(": ", 1)[1].split(", ", 1)[1] for goal in goals] == [
        "goal 1.5: missed",
        "goal 1: reached",
        "goal 0.9: reached",
        "goal 2.5: reached",
        "goal 1: missed",
    ]


def test_an_arm_of_more_cores_than_there_are_is_refused(work, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    with pytest.raises(ConfigError, match="arms is 'ours_2', but there are 1 cores"):
        bench_llm.run_arm("ours_2", work, tmp_path)
