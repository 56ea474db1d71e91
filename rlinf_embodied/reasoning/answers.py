"""Compares answers with references by their texts, or decides that math-verify has to compare them.

Formulas on which a computer algebra system could run for long are refused by their length, digits, powers and
factorials.

- The same text as the reference is right.
- If the reference is a number, the answer must be a number as well: one literal, with or without a currency sign,
  per cent, unit, \\boxed{} or "x =".  An expression is wrong even if its value is right, since 7+8 may repeat the
  question.  For the same reason a fraction is wrong if the reference is an integer.  Integers are compared here, as are
  decimals and fractions that are exactly equal or clearly different; math-verify compares nearly equal ones (1/3 and
  0.333333) and percentages.
- Other answers are compared by math-verify within the limits below.  A reference beyond them is compared as text only.

Every pattern takes at most quadratic time in its at most 256 characters: no repetition contains another one that can
split the same characters in several ways.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

LONGEST = 256  # characters of a final answer
_LONGEST_LITERAL = 40  # characters of a number that math-verify may compare
_FAR = Fraction(1, 10**5)  # numbers this far apart differ for math-verify, which rounds decimals to six places
_MOST_POWERS = 4  # power signs in a formula
_INTEGER = re.compile(r"-?[0-9]+")
_ASSIGNMENT = re.compile(r"^[A-Za-z]\s*=\s*")
_REPLACED = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "°": "^\\circ "},  # noqa: RUF001
        **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∞": "\\infty ", "∪": "\\cup ", "\u00a0": " "},  # noqa: RUF001
    }
)
_MARKUP = re.compile(r"(?P<kept>\\\\)|\\[$()\[\],!]|\$")  # two backslashes end a matrix's row
_BOXED = re.compile(r"(?P<before>[^{}]*)\\boxed\s*\{(?P<content>.*)\}[$.]*")
_UNIT = r"(?:\\(?:text|mathrm)\s*\{(?P<boxed_unit>[A-Za-z ./]*)\}|(?P<unit>[A-Za-z][A-Za-z ]*))?"
_LITERAL = re.compile(
    r"(?P<sign>[+-]?)\s*(?:"
    r"(?P<top>[0-9]+)\s*/\s*(?P<bottom>[0-9]+)"
    r"|\\[dt]?frac\s*(?:\{\s*(?P<top_b>-?[0-9]+)\s*\}|(?P<top_d>[0-9]))"
    r"\s*(?:\{\s*(?P<bottom_b>[0-9]+)\s*\}|(?P<bottom_d>[0-9]))"
    r"|(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)\s*(?P<percent>\\?%)?"
    rf")\s*{_UNIT}"
)
_NO_UNIT = re.compile(r"\b(?:pi|sqrt|sin|cos|tan|log|ln|exp|hundred|thousand|million|billion|trillion|dozen|half)\b")
_ONE_LETTER_UNITS = frozenset("mghslLKNJWVA")
_POWER = re.compile(r"\^|\*\*")
_EXPONENT = re.compile(  # allowed: a number of two digits, a letter, or a sum in brackets; not a power of a power
    r"(?:\^|\*\*)\s*(?:-?[0-9]{1,2}(?![0-9])|[A-Za-z]|\\(?:circ|pi|infty)\b"
    r"|\{(?!\s*-?[0-9]{3})[A-Za-z0-9+\-/ ]*\}|\((?!\s*-?[0-9]{3})[A-Za-z0-9+\-/ ]*\))(?!\s*(?:\^|\*\*))"
)
_SMALL_FACTORIAL = re.compile(r"(?<![0-9])(?:[0-9]{1,2}|[A-Za-z])!(?!!)")
# many digits; sums, products and integrals; repeating decimals, whose period math-verify would ignore
_REFUSED = re.compile(r"[0-9]{16}|\\(?:sum|prod|int|lim)(?![A-Za-z])|\\overline\s*\{\s*[0-9]")


def decide(answer: str, reference: str) -> bool | tuple[str, str]:
    """Returns whether an answer is right, or the pair (answer, reference) that math-verify has to compare."""
    answer, reference = answer.strip(), reference.strip()
    if answer == reference:
        return bool(reference)
    plain, plain_reference = _plain(answer), _plain(reference)
    if plain is None or plain_reference is None:
        return False
    number = _literal(_ASSIGNMENT.sub("", plain_reference))
    if number is not None and not re.search(r"/0*$", number):
        return _decide_number(_literal(plain.rpartition("=")[2].strip()), number)
    if not within_limits(plain) or not within_limits(plain_reference):
        return False
    return f"${plain}$", f"${plain_reference}$"


def majority_is_right(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Returns whether the most frequent answer to a problem is right; of equally frequent ones the first counts.

    Answers are equal if their texts are, without units and markup; None is not counted.
    """
    plain = [None if answer is None else _plain(answer) or answer for answer in answers]
    votes = [None if text is None else _literal(text) or text for text in plain]
    counts = Counter(vote for vote in votes if vote is not None)
    return bool(counts) and correct[votes.index(counts.most_common(1)[0][0])]


def within_limits(text: str) -> bool:
    """Returns whether a computer algebra system can evaluate a formula quickly."""
    powers, plain = len(_POWER.findall(text)), text.replace("!=", "")
    return (
        _REFUSED.search(text) is None
        and powers <= _MOST_POWERS
        and powers == len(_EXPONENT.findall(text))
        and plain.count("!") == len(_SMALL_FACTORIAL.findall(plain))
    )


def _plain(text: str) -> str | None:
    """Returns a text in ASCII without markup; None if it is too long or has other characters."""
    if len(text) > LONGEST:
        return None
    text = text.translate(_REPLACED)
    if not (text.isascii() and text.isprintable()):
        return None
    boxed = _BOXED.fullmatch(text.strip())
    text = boxed["before"] + boxed["content"] if boxed else text
    text = _MARKUP.sub(lambda match: match["kept"] or "", text)
    return text.replace("{,}", ",").strip("* ").rstrip(". ") or None


def _literal(text: str) -> str | None:
    """Returns the number that a text consists of, in math-verify's notation; None if it is not a number.

    Units and thousands' commas are removed: " 1,250.50 dollars" is "1250.50", "\\frac12" is "1/2".
    """
    match = _LITERAL.fullmatch(text)
    unit = (match["unit"] or match["boxed_unit"] or "") if match else ""
    letters = [word for word in re.findall(r"[A-Za-z]+", unit) if len(word) == 1]
    if match is None or _NO_UNIT.search(unit) or not _ONE_LETTER_UNITS.issuperset(letters):
        return None
    sign = "-" if match["sign"] == "-" else ""
    if match["number"]:
        whole, point, decimals = match["number"].replace(",", "").partition(".")
        return sign + (whole or "0") + (point + decimals if decimals else "") + ("%" if match["percent"] else "")
    top = match["top"] or match["top_b"] or match["top_d"]
    bottom = match["bottom"] or match["bottom_b"] or match["bottom_d"]
    return f"{sign}{top}/{bottom}".removeprefix("--")


def _decide_number(answer: str | None, reference: str) -> bool | tuple[str, str]:
    """Compares literals: directly if exactly equal or clearly different, otherwise by math-verify."""
    if answer is None or re.search(r"/0*$", answer):
        return False
    if _INTEGER.fullmatch(reference):
        if "/" in answer:
            return False
        if _INTEGER.fullmatch(answer):
            return int(answer) == int(reference)
    if "%" not in answer + reference:
        difference = abs(Fraction(answer) - Fraction(reference))
        if difference == 0 or difference > _FAR:
            return difference == 0
    return (answer, reference) if len(answer) <= _LONGEST_LITERAL else False
