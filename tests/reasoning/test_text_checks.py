"""No text that a model may write holds up a check that reads it outside of the verifier's processes."""

import pytest

from rlinf_embodied.data.expressions import evaluate
from rlinf_embodied.data.problems import Countdown
from rlinf_embodied.data.prompt_templates import PROMPT_TEMPLATES
from rlinf_embodied.reasoning.answers import decide, solves, within_limits

CHECKS = {
    "expressions": evaluate,
    "countdown": lambda text: solves(text, Countdown(24, (3, 8))),
    "integer": lambda text: decide(text, "6"),
    "fraction": lambda text: decide(text, "1/3"),
    "formula": lambda text: decide(text, "x+1"),
    "reference": lambda text: decide("x+1", text),
    "limits": lambda text: within_limits(text[:256]),  # `decide` hands it no more
    **{f"{name}, answer": form.final_answer for name, form in PROMPT_TEMPLATES.items()},
    **{f"{name}, form": form.is_formatted for name, form in PROMPT_TEMPLATES.items()},
}
PIECES = [
    "1",
    "12",
    "1 ",
    " ",
    "1+",
    "(",
    "()",
    "-",
    "1/",
    "1,",
    "1,234",
    ".",
    "1.",
    "%",
    "x",
    "x ",
    "x=",
    "=",
    "$",
    "!",
]
PIECES += [
    "{",
    "}",
    "{}",
    "^",
    "^{",
    "^{1}",
    "**",
    "**1",
    "#",
    "#### ",
    "####\n",
    "\n",
    "\\",
    "\\\\",
    "\\ ",
    "&",
    "\u00d7",
]
PIECES += [
    "\\boxed",
    "\\boxed ",
    "\\boxed{",
    "}$",
    "\\frac",
    "\\frac{",
    "\\frac{1}",
    "\\text{",
    "\\text{a",
    "\\mathbb ",
]
PIECES += ["\\binom", "\\binom{ ", "\\binom{1}", "\\overline{", "\\overline{ ", "0.\\overline{1}", ".1\\overline{1"]
PIECES += ["\\begin{pmatrix}", "\\end{pmatrix}", "\\begin{pmatrix}1\\end{pmatrix}", "\\begin{pmatrix}\\\\"]
BEHIND = ["", "\x00", "!", "}", "\u0664", "\\end{pmatrix}^"]


@pytest.mark.timeout(120)  # a second where time is linear in the length; hours where it is not
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_comes_to_an_end_whatever_is_repeated_and_whatever_ends_it(name):
    for length in (40, 256, 20_000):
        for piece in PIECES:
            for behind in BEHIND:
                CHECKS[name](piece * ((length - len(behind)) // len(piece)) + behind)
