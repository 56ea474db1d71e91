"""A reward for code problems (reward._target_): whether a program in a completion passes the tests of its problem.

The column `tests` of a problem (data.columns=[tests]) is a list, for example

    [{"input": "3\\n", "output": "9\\n"}, {"input": "5\\n", "output": "25\\n"}]      standard input and output
    ["assert square(3) == 9", "assert square(5) == 25"]                          statements that follow the program
"""

from __future__ import annotations

import functools
import re
import secrets

from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.reasoning.sandbox import Sandbox

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()


def passes_tests(completion: str, problem: Problem) -> float:
    """Returns 1 if the program in a completion passes all tests, 0 if one fails or reaches a limit.

    The program is the last block fenced by ```, or the whole completion.  Printed lines are compared without trailing
    spaces.  Expected outputs never enter the sandbox.  Statements run there after the program, followed by printing a
    random word, so that a program that exits early does not pass.

    Raises:
        ConfigError: the problem has no tests, or the machine cannot isolate programs.
    """
    tests = problem.columns.get("tests")
    rule = 'a code problem has the column "tests": some {"input": ..., "output": ...} or statements, in a list'
    valid, path = isinstance(tests, list) and tests and all(map(_is_test, tests)), f"tests of {problem.question[:80]!r}"
    require(bool(valid), path, tests, rule, "use data.columns=[tests], correct the row")
    assert isinstance(tests, list)
    program = (_FENCED.findall(completion) or [completion])[-1]
    statements = [test for test in tests if isinstance(test, str)]
    pairs = [test for test in tests if not isinstance(test, str)]
    if statements:
        word = secrets.token_hex(16)
        result = _sandbox().run("\n".join([program, *statements, f"print({word!r})"]))
        if result.status != "ok" or not result.stdout.endswith(f"{word}\n"):
            return 0.0
    for pair in pairs:
        result = _sandbox().run(program, pair["input"])
        if result.status != "ok" or _lines(result.stdout) != _lines(pair["output"]):
            return 0.0
    return 1.0


def _is_test(test: object) -> bool:
    pair = isinstance(test, dict) and all(isinstance(test.get(name), str) for name in ("input", "output"))
    return pair or isinstance(test, str)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
