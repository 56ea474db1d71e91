"""The parser gives what Python gives, for expressions of its grammar, and nothing for anything else."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_embodied.data.expressions import evaluate

numbers = st.integers(0, 999)


@st.composite
def expressions(draw, depth=3):
    """Texts of the grammar, blanks included."""
    if depth == 0 or draw(st.booleans()):
        return str(draw(numbers))
    left, right = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    text = f"{left}{draw(st.sampled_from(['+', '-', '*', '/', ' + ', ' * ']))}{right}"
    return draw(st.sampled_from([text, f"({text})", f"-({text})"]))


def pythons_value(text: str) -> Fraction | None:
    # integers with leading zeros are no Python, so they are rewritten
    exact = re.sub(r"\d+", lambda found: f"Fraction({int(found[0])})", text.strip())
    try:
        return eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        return None


@given(expressions())
def test_the_value_is_pythons_and_the_numbers_are_those_of_the_text(text):
    found = evaluate(text)
    expected = pythons_value(text) if len(text) <= 256 else None
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.value == expected
        assert list(found.numbers) == [int(word) for word in "".join(c if c.isdigit() else " " for c in text).split()]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "()",
        "1+",
        "*1",
        "1 2",
        "(1",
        "1)",
        "2**3",
        "2//3",
        "1/0",
        "1/(2-2)",
        "+1",
        "x",
        "1.5",
        "9^9",
        "٤",
        "1\x00",
        "--1",
        "2*- -1",
    ],
)
def test_what_is_no_expression_has_no_value(text):
    assert evaluate(text) is None


def test_long_and_deep_texts_are_refused_at_once():
    assert evaluate("(" * 32 + "1" + ")" * 32) is not None
    assert evaluate("(" * 128 + "1" + ")" * 128) is None
    for text in ("1" * 1_000_000, "(" * 1_000_000, "1+" * 500_000 + "1", "9*" * 127 + "9"):
        found = evaluate(text)
        assert found is None or found.value == 9**128


@pytest.mark.timeout(60)  # backtracking would take years
@pytest.mark.parametrize("bad", ["x", "#", "=", "\x00", "٤"])
def test_one_bad_character_behind_many_digits_is_refused_at_once(bad):
    for text in ("1" * 40 + bad, "1" * 255 + bad, "1 " * 127 + bad, "1+" * 100 + bad, "(1" * 100 + bad):
        assert evaluate(text) is None
