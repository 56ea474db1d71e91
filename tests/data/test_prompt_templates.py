"""Prompts read as they should, and final answers are cut out where the template says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.errors import ConfigError

COMPACT, NATURAL = PromptTemplate("compact"), PromptTemplate("natural")
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
    for form in (COMPACT, NATURAL):
        answer = form.final_answer(text)
        assert answer is None or (answer == answer.strip() and answer in text)
        if form.is_formatted(text):
            assert answer is not None


def test_megabytes_are_read_in_linear_time():
    for text in ("#" * 10**6, "\\boxed{" + "{" * 10**6, "####" * 250_000, "\n" * 10**6, "x" * 10**6):
        for form in (COMPACT, NATURAL):
            form.final_answer(text)
            form.is_formatted(text)


# ------------------------------------------------------------------------------------------------------ one's own files
@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("boxed", "\\boxed{\\frac{1}{2}} #### 3", "\\frac{1}{2}"),
        ("last_number", "3-2 is 1,250.50.", "1,250.50"),
        ("last_number", "It is -7, not x.", "-7"),
        ("marked", "#### 5 #### 6\nEasy.", "6"),
        ("marked_last_line", "#### 6\nEasy.", None),
        ("<answer>(.*?)</answer>", "<answer>1</answer> or <answer> 2 </answer>", "2"),
    ],
)
def test_rules_for_final_answers_can_be_chosen(rule, text, answer):
    assert PromptTemplate.of(DataConfig(final_answer=[rule])).final_answer(text) == answer


def test_a_runs_template_is_compiled_once(monkeypatch):
    made = PromptTemplate.of(DataConfig(final_answer=["boxed", "marked"]))
    monkeypatch.setattr(PromptTemplate, "__init__", None)
    assert PromptTemplate.of(DataConfig(final_answer=["boxed", "marked"])) is made


def test_a_file_is_a_template(tmp_path):
    file = tmp_path / "think.jinja"
    file.write_text(
        "{% set final_answer = ['<answer>(.*?)</answer>', 'last_number'] %}\n"
        "{% set format = '(?s:.*)</think>\\\\s*<answer>.*</answer>' %}\n"
        "{{ question }} ({{ columns.unit }})\nPut it in <answer>.\n"
    )
    form = PromptTemplate(str(file))
    problem = Problem(0, "How far?", "6", None, "text", "x", {"unit": "km"})
    assert form.prompt(problem) == "How far? (km)\nPut it in <answer>."
    assert form.is_formatted("a</think>\n<answer>6</answer>")
    assert not form.is_formatted("<answer>6</answer>")
    assert form.final_answer("It is 6.") == "6"
    with pytest.raises(ConfigError, match=r"of the question 'a\?': .* has no attribute 'unit'"):
        form.prompt(Problem(0, "a?", "6", None, "text", "x"))
    with pytest.raises(ConfigError, match=r"no macro completion\(solution, answer\), which fine-tuning needs"):
        form.completion(problem, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"no such template .* use compact, natural, or the path of a \.jinja file"),
        ("{{ question", r"line 1: unexpected end of template"),
        ("{% set final_answer = question %}", r"must be constants"),
        ("{% set final = 'boxed' %}", r"it sets \['final'\]"),
        ("{% set final_answer = 'boxt' %}", r"one of marked, .*with 1 capturing groups"),
        ("{% set final_answer = '\\boxed{(.*)}' %}", r"write .* in a string of a Jinja file"),
        ("{% set format = '(' %}", r"missing \)"),
    ],
)
def test_a_bad_file_names_rule_and_action(tmp_path, text, message):
    file = tmp_path / "bad.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        PromptTemplate(str(file))


def test_a_file_runs_in_a_sandbox(tmp_path):
    file = tmp_path / "evil.jinja"
    file.write_text("{{ question.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="cannot be used"):
        PromptTemplate(str(file)).prompt(SUM)
