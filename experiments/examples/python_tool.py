"""A tool that lets the model calculate in Python: what it wrote before "=" runs in the sandbox, "2**10=" gives "1024;".

python experiments/train_llm_math.py data=chains tool._target_=experiments.examples.python_tool.evaluate
    warm_start.tool_share=0.1
"""

from __future__ import annotations

import functools
import re

from rlinf_embodied.data.problems import Problem
from rlinf_embodied.reasoning.sandbox import Sandbox

_EXPRESSION = re.compile(r"([-+*/%() 0-9.]*[0-9)])=$")


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()


def evaluate(text: str, problem: Problem) -> str | None:
    """Returns the value of the expression at the end of a turn, and a semicolon; None where there is none."""
    found = _EXPRESSION.search(text)
    result = found and _sandbox().run(f"print({found[1].strip()})")
    return f"{result.stdout.strip()};" if result and result.status == "ok" else None
