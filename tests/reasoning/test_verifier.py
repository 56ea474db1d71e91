"""Rewards: right answers earn, whatever else a completion does to earn does not."""

import numpy as np
import pytest

from rlinf_embodied.config import RewardConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PromptTemplate, template_names
from rlinf_embodied.reasoning.reward_stage import Verifier

COMPACT, NATURAL = PromptTemplate("compact"), PromptTemplate("natural")
SIX = Problem(0, "7+8-9=", "6", "7+8=15;15-9=6;", "sum", "sum2-2-9")
HALF = Problem(1, "What is a half?", "0.5", None, "text", "own")


@pytest.fixture(scope="module")
def natural():
    with Verifier(NATURAL, RewardConfig(timeout_s=0.5)) as made:
        yield made


@pytest.mark.parametrize("form", template_names())
def test_own_completions_are_right_and_those_of_other_problems_are_not(form):
    problems = GeneratedProblems("sum4-6-9,chain2-3", 0).batch(Split.train, 0, 64)
    with Verifier(PromptTemplate(form)) as verifier:
        for worked in (False, True):
            texts = [PromptTemplate(form).completion(problem, worked) for problem in problems]
            verified = verifier.verify(texts, problems)
            assert verified.correct.all()
            assert verified.formatted.all()
            shifted = verifier.verify(texts[1:] + texts[:1], problems).correct
            assert shifted.mean() < 0.1  # some problems share their answer
        assert verifier._math._process.pid is None  # integers need no process


def test_rewards_add_correctness_and_form_and_truncated_answers_earn_neither():
    texts = ["7+8=15;15-9=6;#6", "#7", "#5#6", "6", "#6", "#6"]
    with Verifier(COMPACT, RewardConfig(format_reward=0.25)) as verifier:
        verified = verifier.verify(texts, [SIX] * 6, ended=[True, True, True, True, True, False])
        assert verified.correct.tolist() == [True, False, True, False, True, False]
        assert verified.formatted.tolist() == [True, True, False, False, True, False]
        assert verified.rewards.dtype == np.float32
        assert verified.rewards.tolist() == [1.25, 0.25, 1.0, 0.0, 1.25, 0.0]
        assert verifier.verify([], []).rewards.shape == (0,)


def test_math_verify_judges_what_texts_leave_open_in_the_order_of_the_questions(natural):
    answers = ["#### 1/2", "#### 50%", "#### 0.51", "\\boxed{\\frac{2}{4}}", "#### 0.5000001", "#### 50\\%", "#### .49"]
    expected = [True, True, False, True, True, True, False]
    verified = natural.verify(answers * 3, [HALF] * 21)
    assert verified.correct.tolist() == expected * 3
    assert natural._math._process.pid is not None


def test_hostile_completions_earn_nothing(natural):
    symbolic = Problem(2, "Expand (x+1)^2.", "x^2+2x+1", None, "text", "own")
    contents = [
        *("9**9**9**9", "(" * 10**5, "x" * 10**6, "1" * 10**6, "\x00", "\u0664\u0662", "\\boxed{" * 10**5),
        *("x^{9^{9^9}}", "((x+1)^{99})^{99}", "\\sum_{i=1}^{9^9} i", "\\sin(\\cos(\\tan(x^9+1)^9)^9)"),
        *("\ud800", "1/0", "\\frac{1}{0}"),
    ]
    hostile = [f"#### {content}" for content in contents] + ["####" * 10**5, "\\boxed{" + "{" * 10**6]
    for problem in (SIX, HALF, symbolic):
        natural.verify(["#### 1/3", "#### x^2+1+2x"], [HALF, symbolic])  # its process is there
        verified = natural.verify([*hostile, f"#### {problem.answer}"], [problem] * (len(hostile) + 1))
        assert verified.correct.tolist() == [False] * len(hostile) + [True]
