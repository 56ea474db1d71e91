"""Prompts read as they should, and final answers are cut out where the template says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.prompt_templates import PROMPT_TEMPLATES

COMPACT, NATURAL = PROMPT_TEMPLATES["compact"], PROMPT_TEMPLATES["natural"]
SUM = Problem(0, "7+8-9=", "6", "7+8=15;15-9=6;", "sum", "sum2-2-9")
WORDS = Problem(1, "How many are left?", "1,250", "He had 2,000.\nThen 750 - 0 went.", "text", "gsm8k")


@pytest.mark.parametrize(
    ("problem", "question", "completion"),
    [
        (SUM, "What is 7 + 8 - 9?", "7 + 8 = 15\n15 - 9 = 6\n#### 6"),
        (WORDS, "How many are left?", "He had 2,000.\nThen 750 - 0 went.\n#### 1,250"),
    ],
)
def test_natural_texts(problem, question, completion):
    assert NATURAL.prompt(problem).startswith(question + "\n")
    assert "####" in NATURAL.prompt(problem)
    assert NATURAL.completion(problem, chain_of_thought=True) == completion
    assert NATURAL.completion(problem, chain_of_thought=False) == completion.rpartition("\n")[2]


@pytest.mark.parametrize(
    ("completion", "answer", "formatted"),
    [
        ("#6", "6", True),
        ("7+8=15;15-9=6;#6", "6", True),
        ("#5#6", "6", False),
        ("#6;7+8=15", "6;7+8=15", False),
        ("7+8=15", None, False),
        ("7+8=15;#", None, False),
        ("", None, False),
        ("# ", None, False),
    ],
)
def test_compact_answers_follow_the_last_mark(completion, answer, formatted):
    assert COMPACT.final_answer(completion) == answer
    assert COMPACT.is_formatted(completion) is formatted


@pytest.mark.parametrize(
    ("completion", "answer", "formatted"),
    [
        ("7 + 8 = 15\n#### 6", "6", True),
        ("#### 6\n", "6", True),
        ("so #### 6", "6", False),
        ("#### 5\n#### 6", "6", False),
        ("#### 6\nThat was easy.", "6", False),
        ("It is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}", False),
        ("\\boxed{1} or \\boxed{2}", "2", False),
        ("\\boxed{2} but #### 3", "3", False),
        ("#### Step 1: add\n2+3=5\n\nSo the answer is \\boxed{5}", "5", False),
        ("<think>\n#### Plan\nadd</think>\nThe answer is $\\boxed{5}$.", "5", False),
        ("\\boxed{5}\n\n#### Check\n2 + 3 = 5", "5", False),
        ("\\boxed{4} is the half.\n#### 8", "8", True),
        ("#### 5\nThis is \\boxed{", "5", False),
        ("\\boxed{2", None, False),
        ("\\boxed{}", None, False),
        ("It is 6.", None, False),
        ("####", None, False),
    ],
)
def test_natural_answers_stand_behind_the_mark_or_in_the_last_box(completion, answer, formatted):
    assert NATURAL.final_answer(completion) == answer
    assert NATURAL.is_formatted(completion) is formatted


@given(st.text(max_size=60))
def test_any_text_can_be_read(text):
    for form in PROMPT_TEMPLATES.values():
        answer = form.final_answer(text)
        assert answer is None or (answer == answer.strip() and answer in text)
        if form.is_formatted(text):
            assert answer is not None


def test_megabytes_are_read_in_linear_time():
    for text in ("#" * 10**6, "\\boxed{" + "{" * 10**6, "####" * 250_000, "\n" * 10**6, "x" * 10**6):
        for form in PROMPT_TEMPLATES.values():
            form.final_answer(text)
            form.is_formatted(text)
