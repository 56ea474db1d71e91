"""Which answers are decided directly, and which are passed to math-verify.

Texts decide first, a clock last: whatever could make a computer algebra system run for long is refused by length,
digits, nesting and powers, so that a reward depends on the answer and the reference only.

- The same text as the reference is right.  (math-verify says so too of formulas, but not of all that is malformed.)
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
from fractions import Fraction

from rlinf_embodied.data.expressions import evaluate
from rlinf_embodied.data.problems import Countdown

LONGEST = 256  # characters of a final answer
_LONGEST_LITERAL = 40  # characters of a number that is not compared exactly
_FAR = Fraction(1, 10**5)  # numbers with this difference differ for math-verify, which rounds decimals to six places
_MOST_DIGITS = 15  # of a number within a formula
_DEEPEST = 8  # brackets within each other
_MOST_POWERS, _LARGEST_POWER = 4, 1000  # signs for powers; product of all integer exponents
_INTEGER = re.compile(r"-?[0-9]+")
_ASSIGNMENT = re.compile(r"^[A-Za-z]\s*=\s*")
_CHOSEN = r"\s*\{ ?[0-9]{0,2} ?[A-Za-z]?(?: ?[-+] ?(?:[0-9]{1,2}|[A-Za-z]))? ?\}"  # of a binomial: 10, n, 2n-1
_COMMAND = re.compile(
    r"\\(?:(?:[dt]?frac|sqrt|pi|cdot|times|div|left|right|text|mathrm|infty|pm|mp|circ|leq?|geq?|lt|gt|neq?|cup|cap|in|log"
    r"|ln|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|alpha|beta|gamma|delta|theta|lambda|mu|phi|quad|mid|setminus)(?![A-Za-z])"
    rf"|[dt]?binom{_CHOSEN}{_CHOSEN}|overline\s*\{{[A-Za-z ]+\}}|mathbb\{{[NZQRC]\}}|(?:begin|end)\{{[pb]matrix\}})"
)
_MATRIX_EDGE = re.compile(r"\\(begin|end)\{[pb]matrix\}")
_AROUND_MATRICES = re.compile(r"(?:[0-9A-Za-z=+\-., {}]|\\(?:[dt]?frac|cdot|times)(?![A-Za-z])|\\[{}])*")  # no powers
_REPLACED = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "°": "^\\circ "},  # noqa: RUF001
        **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∞": "\\infty ", "∪": "\\cup ", "\u00a0": " "},  # noqa: RUF001
    }
)
_DRESS = re.compile(r"(?P<kept>\\\\)|\\[$()\[\],!]|\$")  # two backslashes end a matrix's row
_BARE_SET = re.compile(r"\\mathbb\s+([NZQRC])(?![A-Za-z])")
_REPEATING = re.compile(
    r"(?<![0-9,.])(?P<whole>[0-9]*)\.(?P<first>[0-9]*)\\overline\s*\{\s*(?P<period>[0-9]+)\s*\}(?![0-9])"
)
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
_EXPONENT = re.compile(
    r"(?:\^|\*\*)\s*(?P<exponent>-?[0-9]{1,2}(?![0-9])|[A-Za-z]|\\(?:circ|pi|infty)\b"
    r"|\{[A-Za-z0-9+\-/ ]*\}|\([A-Za-z0-9+\-/ ]*\))"
    r"(?!\s*(?:\^|\*\*))"
)
_SMALL_FACTORIAL = re.compile(r"(?<![0-9])(?:[0-9]{1,2}|[A-Za-z])!(?!!)")


def decide(answer: str, reference: str) -> bool | tuple[str, str]:
    """Returns whether an answer is right, or the pair (answer, reference) to ask math-verify about.

    Args:
        answer: final answer of a completion, of any length and content.
        reference: right answer.
    """
    answer, reference = answer.strip(), reference.strip()
    if answer == reference:
        return bool(reference)
    plain = _plain(answer)
    if plain is None:
        return False
    plain_reference = _plain(reference)
    if plain_reference is None:
        return False
    number = _literal(_ASSIGNMENT.sub("", plain_reference))
    if number is not None and not re.search(r"/0*$", number):
        return _decide_number(_literal(plain.rpartition("=")[2].strip()), number)
    if not within_limits(plain) or not within_limits(plain_reference):
        return False
    return f"${plain}$", f"${plain_reference}$"


def solves(answer: str, rule: Countdown) -> bool:
    """Returns whether an answer is an expression that equals the target and uses each number at most once.

    The target may stand behind it: "3*8" and "3*8=24" are the same answer.
    """
    plain = _plain(answer)
    if plain is None:
        return False
    for sign, meant in (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/")):
        plain = plain.replace(sign, meant)
    left, equals, right = plain.partition("=")
    found = evaluate(left)
    if found is None or found.value != rule.target or (equals and right.strip() != str(rule.target)):
        return False
    left_over = list(rule.numbers)
    for number in found.numbers:
        if number not in left_over:
            return False
        left_over.remove(number)
    return True


def within_limits(text: str) -> bool:
    """Returns whether a formula is short, shallow and tame enough for a computer algebra system."""
    return (
        re.search(rf"[0-9]{{{_MOST_DIGITS + 1}}}", text) is None
        and len(_COMMAND.findall(text)) == len(re.findall(r"\\[A-Za-z]", text))
        and _depth(text) <= _DEEPEST
        and _has_small_powers(text)
        and _has_plain_matrices(text)
        and text.replace("!=", "").count("!") == len(_SMALL_FACTORIAL.findall(text.replace("!=", "")))
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
    text = _BARE_SET.sub(r"\\mathbb{\1}", _REPEATING.sub(_as_fraction, text))
    if "matrix}" in text:
        text = text.replace("\\\\", "\\\\ ")  # what follows the end of a row is no command
    return text.replace("{,}", ",").strip("* ").rstrip(". ") or None


def _as_fraction(repeating: re.Match[str]) -> str:
    """Returns a repeating decimal as \\frac{...}{...}: math-verify would leave the period out."""
    whole, first, period = repeating["whole"] or "0", repeating["first"], repeating["period"]
    nines = 10 ** len(first) * (10 ** len(period) - 1)
    value = Fraction(int(whole + first), 10 ** len(first)) + Fraction(int(period), nines)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _literal(text: str) -> str | None:
    """Returns the number that a text consists of, as math-verify reads it best; None where it is something else.

    Units and thousands' commas are left out: " 1,250.50 dollars" is "1250.50", "\\frac12" is "1/2".
    """
    found = _LITERAL.fullmatch(text)
    if found is None or not _is_unit(found["unit"] or found["boxed_unit"] or ""):
        return None
    sign = "-" if found["sign"] == "-" else ""
    if found["number"]:
        whole, point, decimals = found["number"].replace(",", "").partition(".")
        return sign + (whole or "0") + (point + decimals if decimals else "") + ("%" if found["percent"] else "")
    top = found["top"] or found["top_b"] or found["top_d"]
    bottom = found["bottom"] or found["bottom_b"] or found["bottom_d"]
    return f"{sign}{top}/{bottom}".removeprefix("--")


def _is_unit(text: str) -> bool:
    words = re.findall(r"[A-Za-z]+", text)
    return all(len(word) > 1 or word in _ONE_LETTER_UNITS for word in words) and not _NO_UNIT.search(text)


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


def _depth(text: str) -> int:
    """Returns how many brackets of any kind are open at once, at most."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _has_plain_matrices(text: str) -> bool:
    """Whether matrices are opened and closed in turn, and are no function's argument, in no bracket and no power."""
    pieces = _MATRIX_EDGE.split(text)
    edges, around = pieces[1::2], " ".join(pieces[::4])
    if not edges:
        return True
    return edges == ["begin", "end"] * (len(edges) // 2) and _AROUND_MATRICES.fullmatch(around) is not None


def _has_small_powers(text: str) -> bool:
    """Whether there are few powers, none of a power's power by sign, and exponents that multiply to little."""
    exponents = [found["exponent"] for found in _EXPONENT.finditer(text)]
    if len(exponents) != len(re.findall(r"\^|\*\*", text)) or len(exponents) > _MOST_POWERS:
        return False
    product = 1
    for number in re.findall(r"[0-9]+", " ".join(exponents)):
        if len(number) > 2:
            return False
        product *= max(int(number), 1)
    return product <= _LARGEST_POWER
