"""What texts alone decide is what math-verify would say; what it may see is tame; hostile answers earn nothing."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_runs import completions

from rlinf_embodied.config import RewardConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PromptTemplate, template_names
from rlinf_embodied.reasoning.answers import decide, within_limits
from rlinf_embodied.reasoning.reward_stage import Verifier
from rlinf_embodied.reasoning.verifier_worker import are_equal

integers = st.integers(-(10**20), 10**20)
fractions = st.fractions(-1000, 1000, max_denominator=60)


def is_right(answer: str, reference: str) -> bool:
    """The whole way of an answer, in this process."""
    found = decide(answer, reference)
    return are_equal(*found) if isinstance(found, tuple) else found


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        *(("6", "6"), (" 6 ", "6"), ("6.", "6"), ("06", "6"), ("+6", "6"), ("-6", "\u22126"), ("6.0", "6")),
        ("**6**", "6"),
        *(("x=5", "5"), ("x = -5", "-5"), ("5", "x=5"), ("$x=5$", "5"), ("3 + 2 = 5", "5"), ("\\boxed{5}", "5")),
        *(("1/2", "0.5"), ("0.5", "\\frac{1}{2}"), ("\\frac12", "0.5"), (".5", "1/2"), ("-\\dfrac{3}{4}", "-0.75")),
        *(("2/4", "1/2"), ("0.333333", "1/3"), ("\\frac{-1}{2}", "-0.5"), ("\\boxed{\\frac{1}{2}}", "0.5")),
        *(("1,250", "1250"), ("1{,}250", "1250"), ("$1,250.50", "1250.5"), ("18 dollars", "18"), ("5\\text{ cm}", "5")),
        *(("12%", "12"), ("12\\%", "0.12"), ("5 cm", "5"), ("$18$", "18"), ("\\(18\\)", "18"), ("72 clips.", "72")),
        *(("2\\sqrt{3}", "\\sqrt{12}"), ("x^2-1", "(x-1)(x+1)"), ("(2,1)", "(2,1)"), ("\\{1,2\\}", "\\{2,1\\}")),
        ("\\overline{ AB }", "\\overline{AB}"),
        *(("120", "\\binom{10}{3}"), ("\\dbinom{n}{n-k}", "\\binom{n}{k}"), ("\\binom{2 n}{n}", "\\binom{2n}{n}")),
        ("(-\\infty, \\infty)", "\\mathbb{R}"),
        ("(-\\infty,0)\\cup(0,\\infty)", "\\mathbb{R}\\setminus\\{0\\}"),
        ("\\begin{bmatrix}1&2\\\\x&\\frac{8}{2}\\end{bmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ x & 4 \\end{pmatrix}"),
        ("\\begin{pmatrix}1\\\\(-2)\\end{pmatrix}", "\\frac12\\begin{pmatrix}2\\\\-4\\end{pmatrix}"),
        *(("2\u03c0", "2\\pi"), ("1 < x", "x > 1"), ("north", "north"), ("\u4e03", "\u4e03"), ("2^{10}", "2^{10}")),
    ],
)
def test_right_answers(answer, reference):
    assert is_right(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        *(("7", "6"), ("-6", "6"), ("", "6"), ("six", "6"), ("6 7", "6"), ("6, 7", "6"), ("7 6", "6"), ("5 or 6", "6")),
        *(("3+3", "6"), ("3+2", "x=5"), ("2*3", "6"), ("7+8-9", "6"), ("12/2", "6"), ("3!", "6")),
        *(("\\frac{12}{2}", "6"), ("\\sqrt{36}", "6")),
        *(("6x", "6"), ("6\\pi", "6"), ("6 million", "6"), ("1e3", "1000"), ("0x6", "6"), ("6e0", "6"), ("6%%", "6")),
        *(("0.34", "1/3"), ("1/0", "0.5"), ("0.5", "1/0"), ("1/3", "0.5"), ("12,34", "1234"), ("1.2.3", "1.2")),
        *(("6\x00", "6"), ("\u0666", "6"), ("\uff16", "6"), ("6\u200b", "6"), ("six\n6", "6"), ("-", "6"), ("=", "6")),
        *(("x^2+1", "(x-1)(x+1)"), ("a+b", "ab"), ("(1,2)", "(2,1)"), ("south", "north"), ("\u516b", "\u4e03")),
        *(("0.\\overline{3}", "0.3"), ("0.\\overline{9}", "1"), ("0", "x=0+0.\\overline{3}x")),
        *(("AB", "\\overline{AB}"), ("\\overline{CD}", "\\overline{AB}"), ("210", "\\binom{10}{3}")),
        *(("\\mathbb{Z}", "\\mathbb{R}"), ("R", "\\mathbb{R}"), ("\\binom{10}{3}", "120")),
        ("\\begin{pmatrix}1\\\\y\\end{pmatrix}", "\\begin{pmatrix}1\\\\x\\end{pmatrix}"),
        ("\\begin{pmatrix}1&x\\end{pmatrix}", "\\begin{pmatrix}1\\\\x\\end{pmatrix}"),
        ("", ""),
    ],
)
def test_wrong_answers(answer, reference):
    assert not is_right(answer, reference)


@given(fractions, st.sampled_from(["1/2", "-7/3", "0.25"]), st.integers(-3, 3), st.booleans())
@settings(max_examples=60)
def test_numbers_that_are_compared_at_once_are_compared_as_math_verify_does(number, reference, steps, near):
    value = Fraction(reference) + steps * Fraction(1, 10**5) if near else number
    fraction, decimal = f"{value.numerator}/{value.denominator}", f"{float(value):.9f}"
    for answer in (fraction, decimal):
        found = decide(answer, reference)
        if isinstance(found, bool):
            assert found == are_equal(answer, reference)
    if abs(value - Fraction(reference)) != Fraction(1, 10**5):  # the border itself is left to math-verify
        assert decide(fraction, reference) is (value == Fraction(reference))
    assert decide(fraction, fraction) is True


@given(st.text(max_size=40), st.sampled_from(["6", "0.5", "x^2", "(1,2)", ""]))
def test_any_text_is_decided_or_asked_about_in_ascii(text, reference):
    found = decide(text, reference)
    assert isinstance(found, bool) or all(part.isascii() and part.isprintable() for part in found)


@pytest.mark.parametrize(
    "text",
    [
        *("9^9^9^9", "9**9**9**9", "9^{9^{9}}", "9^{9*9*9}", "9^{999}", "9^999", "2^{10^{10}}", "9^(9^9)"),
        *("x^2x^2x^2x^2x^2", "(99!)!", "5!!", "100!", "1" * 16, "\\overline{12}"),
        *("\\sum_{i=1}^{9} i", "\\int_0^1 x dx", "\\prod_{i=1}^{9} i", "\\lim_{x\\to 0} x"),
    ],
)
def test_what_could_run_for_long_is_not_shown_to_math_verify(text):
    assert not within_limits(text)
    assert decide(text, "x+1") is False
    assert decide(text, "1") is False


@pytest.mark.parametrize(
    "text", ["x^2", "x^{n+1}", "e^{-x}", "2^{10}", "10!", "n!", "a != b", "90^\\circ", "\\binom{2n+1}{k}", "\\cos x^2"]
)
def test_what_textbooks_ask_for_is(text):
    assert within_limits(text)


def test_a_reference_beyond_the_limits_is_compared_as_text():
    reference = "\\int_0^1 f(x) dx"
    assert decide(reference, reference) is True
    assert decide("\\int_0^1 f(y) dy", reference) is False
    assert decide("6", "7" * 300) is False


# ------------------------------------------------------------------------------------------------------ hostile texts
FORMS = {name: PromptTemplate(name) for name in template_names()}
CHECKS = {
    "integer": lambda text: decide(text, "6"),
    "fraction": lambda text: decide(text, "1/3"),
    "formula": lambda text: decide(text, "x+1"),
    "reference": lambda text: decide("x+1", text),
    "limits": lambda text: within_limits(text[:256]),  # `decide` hands it no more
    **{f"{name}, answer": form.final_answer for name, form in FORMS.items()},
    **{f"{name}, form": form.is_formatted for name, form in FORMS.items()},
}
PIECES = r"1~12~1 ~ ~1+~(~()~-~1/~1,~1,234~.~1.~%~x~x ~x=~=~$~!~{~}~{}~^~^{~^{1}~**~**1~#~#### ~\~\ ~&~\boxed~\boxed "
PIECES += r"~\boxed{~}$~\frac~\frac{~\frac{1}~\text{~\text{a~\binom{1}~\overline{~\begin{pmatrix}~\\"
BEHIND = ["", "\x00", "!", "}", "\u0664", "\\end{pmatrix}^"]


@pytest.mark.timeout(120)  # a second where time is linear in the length; hours where it is not
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_comes_to_an_end_whatever_is_repeated_and_whatever_ends_it(name):
    for length in (40, 256, 20_000):
        for piece in [*PIECES.split("~"), "\n", "####\n", "\u00d7"]:
            for behind in BEHIND:
                CHECKS[name](piece * ((length - len(behind)) // len(piece)) + behind)


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
        assert verifier.math_verify.pid is None  # integers need no process


def test_rewards_add_correctness_and_form_and_truncated_answers_earn_neither():
    texts = ["7+8=15;15-9=6;#6", "#7", "#5#6", "6", "#6", "#6"]
    with Verifier(COMPACT, RewardConfig(format_reward=0.25)) as verifier:
        verified = verifier.verify(texts, [SIX] * 6, ended=[True, True, True, True, True, False])
        assert verified.correct.tolist() == [True, False, True, False, True, False]
        assert verified.formatted.tolist() == [True, True, False, False, True, False]
        assert verified.raw.dtype == np.float32
        made = completions([SIX], [[2]] * 6, [[1]] * 6, ended=[True] * 5 + [False], texts=texts)
        assert verifier.score(0, made, 20)[0].rewards.tolist() == [[1.25, 0.25, 1.0, 0.0, 1.25, 0.0]]
        assert verifier.verify([], []).raw.shape == (0,)


def test_math_verify_judges_what_texts_leave_open_in_the_order_of_the_questions(natural):
    answers = ["#### 1/2", "#### 50%", "#### 0.51", "\\boxed{\\frac{2}{4}}", "#### 0.5000001", "#### 50\\%", "#### .49"]
    expected = [True, True, False, True, True, True, False]
    verified = natural.verify(answers * 3, [HALF] * 21)
    assert verified.correct.tolist() == expected * 3
    assert natural.math_verify._process.pid is not None


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
