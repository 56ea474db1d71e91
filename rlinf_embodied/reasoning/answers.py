"""Which answers are decided directly, and which are passed to math-verify.

Texts decide first, a time limit last: what could make a computer algebra system run for long is refused by its length,
digits, powers and factorials.

- The same text as the reference is right.
- Where the reference is a number, the answer must be a number as well: one literal, with or without a currency sign,
  per cent, unit, \\boxed{} or "x =".  An expression is none, however right: 7+8 would be an echo of the question.
  For the same reason a fraction is no answer where the reference is an integer.  Integers are compared here, and so are
  decimals and fractions that are exactly equal or clearly apart; nearly equal ones (1/3 and 0.333333) and percentages
  are math-verify's.
- Anything else is compared by math-verify within the limits below; a reference beyond them, only as text.

Every pattern here takes time at most quadratic in the 256 characters that it may see: no repetition holds another one
that can split the same characters in several ways.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

LONGEST = 256  # characters of a final answer
_LONGEST_LITERAL = 40  # characters of a number that is not compared exactly
_FAR = Fraction(1, 10**5)  # numbers with this difference differ for math-verify, which rounds decimals to six places
_MOST_POWERS = 4  # signs for powers in a formula
_INTEGER = re.compile(r"-?[0-9]+")
_ASSIGNMENT = re.compile(r"^[A-Za-z]\s*=\s*")
_REPLACED = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "°": "^\\circ "},  # noqa: RUF001
        **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∞": "\\infty ", "∪": "\\cup ", "\u00a0": " "},  # noqa: RUF001
    }
)
_DRESS = re.compile(r"(?P<kept>\\\\)|\\[$()\[\],!]|\$")  # two backslashes end a matrix's row
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
_EXPONENT = re.compile(  # a number of two digits, a letter, or a sum in brackets; no power of a power
    r"(?:\^|\*\*)\s*(?:-?[0-9]{1,2}(?![0-9])|[A-Za-z]|\\(?:circ|pi|infty)\b"
    r"|\{(?!\s*-?[0-9]{3})[A-Za-z0-9+\-/ ]*\}|\((?!\s*-?[0-9]{3})[A-Za-z0-9+\-/ ]*\))(?!\s*(?:\^|\*\*))"
)
_SMALL_FACTORIAL = re.compile(r"(?<![0-9])(?:[0-9]{1,2}|[A-Za-z])!(?!!)")
# many digits; what runs over many terms; repeating decimals, whose period math-verify would leave out
_REFUSED = re.compile(r"[0-9]{16}|\\(?:sum|prod|int|lim)(?![A-Za-z])|\\overline\s*\{\s*[0-9]")


def decide(answer: str, reference: str) -> bool | tuple[str, str]:
    """Returns whether an answer is right, or the pair (answer, reference) to ask math-verify about."""
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
    """Returns whether the answer that most of a problem's completions give is right; of equals the first one.

    Answers are the same if their texts are, without units and what dresses them; those that are None have no vote.
    """
    plain = [None if answer is None else _plain(answer) or answer for answer in answers]
    votes = [None if text is None else _literal(text) or text for text in plain]
    counts = Counter(vote for vote in votes if vote is not None)
    return bool(counts) and correct[votes.index(counts.most_common(1)[0][0])]


def within_limits(text: str) -> bool:
    """Returns whether a formula is tame enough for a computer algebra system."""
    powers, plain = len(_POWER.findall(text)), text.replace("!=", "")
    return (
        _REFUSED.search(text) is None
        and powers <= _MOST_POWERS
        and powers == len(_EXPONENT.findall(text))
        and plain.count("!") == len(_SMALL_FACTORIAL.findall(plain))
    )


def _plain(text: str) -> str | None:
    """Returns a text in ASCII without what only dresses it; None where it is too long or has other characters."""
    if len(text) > LONGEST:
        return None
    text = text.translate(_REPLACED)
    if not (text.isascii() and text.isprintable()):
        return None
    boxed = _BOXED.fullmatch(text.strip())
    text = boxed["before"] + boxed["content"] if boxed else text
    text = _DRESS.sub(lambda found: found["kept"] or "", text)
    return text.replace("{,}", ",").strip("* ").rstrip(". ") or None


def _literal(text: str) -> str | None:
    """Returns the number that a text consists of, as math-verify reads it best; None where it is something else.

    Units and thousands' commas are left out: " 1,250.50 dollars" is "1250.50", "\\frac12" is "1/2".
    """
    found = _LITERAL.fullmatch(text)
    unit = (found["unit"] or found["boxed_unit"] or "") if found else ""
    letters = [word for word in re.findall(r"[A-Za-z]+", unit) if len(word) == 1]
    if found is None or _NO_UNIT.search(unit) or not _ONE_LETTER_UNITS.issuperset(letters):
        return None
    sign = "-" if found["sign"] == "-" else ""
    if found["number"]:
        whole, point, decimals = found["number"].replace(",", "").partition(".")
        return sign + (whole or "0") + (point + decimals if decimals else "") + ("%" if found["percent"] else "")
    top = found["top"] or found["top_b"] or found["top_d"]
    bottom = found["bottom"] or found["bottom_b"] or found["bottom_d"]
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
