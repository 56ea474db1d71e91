"""How a problem is put to a model, how an answer to it is written, and where in an answer the final one stands.

| template | prompt             | direct answer | chain of thought          | final answer                           |
| compact  | 7+8-9=             | #6            | 7+8=15;15-9=6;#6          | what follows the last #                |
| natural  | What is 7 + 8 - 9? | #### 6        | 7 + 8 = 15 (lines) #### 6 | see NaturalTemplate.final_answer       |

Neither writes the end-of-sequence token: the tokenizer owns it.
"""

from __future__ import annotations

import re
from typing import Protocol

from rlinf_embodied.data.problems import Problem

_MARK = "####"
_BOXED = "\\boxed{"
_LONGEST_BOX = 1024  # characters that are searched for the closing bracket
_INSTRUCTION = "Write the steps, then the answer alone in a last line that begins with ####."
_OPERATOR = re.compile(r"(?<=[0-9x)])[-+*/=]")  # a sign that follows nothing of that kind is part of a number


class PromptTemplate(Protocol):
    """Writes prompts and completions, and reads completions."""

    def prompt(self, problem: Problem) -> str:
        """Returns what the model is given; of a chat, the user's message."""
        ...

    def completion(self, problem: Problem, chain_of_thought: bool) -> str:
        """Returns a right completion: a direct answer, or a chain of thought if asked for and the problem has steps."""
        ...

    def final_answer(self, completion: str) -> str | None:
        """Returns the answer that a completion ends with, stripped; None where it gives none."""
        ...

    def is_formatted(self, completion: str) -> bool:
        """Returns whether the completion gives one final answer, in the template's way and at its very end."""
        ...


class CompactTemplate:
    """The template of small models with a character vocabulary."""

    def prompt(self, problem: Problem) -> str:
        """Returns the question as it is."""
        return problem.question

    def completion(self, problem: Problem, chain_of_thought: bool) -> str:
        """Returns "7+8=15;15-9=6;#6", or "#6" for a direct answer."""
        steps = problem.solution if chain_of_thought and problem.solution else ""
        return f"{steps}#{problem.answer}"

    def final_answer(self, completion: str) -> str | None:
        """Returns all that follows the last #; an answer that continues after it is another answer."""
        _, mark, answer = completion.rpartition("#")
        return answer.strip() or None if mark else None

    def is_formatted(self, completion: str) -> bool:
        """Returns whether there is one # and, after it, an answer that is no further step."""
        _, mark, answer = completion.partition("#")
        return bool(mark) and bool(answer.strip()) and not set(answer) & set("#;=\n")


class NaturalTemplate:
    """The template of models that read and write sentences."""

    def prompt(self, problem: Problem) -> str:
        """Returns the question as a sentence, and how the answer is to be given."""
        return f"{_sentence(problem)}\n{_INSTRUCTION}"

    def completion(self, problem: Problem, chain_of_thought: bool) -> str:
        """Returns the steps in lines, if asked for, and the answer behind ####."""
        lines = []
        if chain_of_thought and problem.solution:
            lines = [problem.solution] if problem.family == "text" else _step_lines(problem.solution)
        answer = problem.answer if problem.family == "text" else _spaced(problem.answer)
        return "\n".join([*lines, f"{_MARK} {answer}"])

    def final_answer(self, completion: str) -> str | None:
        """Returns what follows #### in the last line, else the last \\boxed{}, else what follows the last ####.

        The instruction asks for the first form.  Models write the second one by habit, and #### as a Markdown heading.
        """
        _, mark, rest = completion.rpartition(_MARK)
        marked = rest.partition("\n")[0].strip() or None if mark else None
        ends_marked = marked is not None and "\n" not in rest.strip()
        return marked if ends_marked else _last_boxed(completion) or marked

    def is_formatted(self, completion: str) -> bool:
        """Returns whether there is one ####, it begins the last line, and an answer follows it."""
        _, mark, rest = completion.partition(_MARK)
        begins_a_line = completion.rpartition(_MARK)[0].rpartition("\n")[2].strip() == ""
        answer = rest.strip()
        return bool(mark) and begins_a_line and bool(answer) and "#" not in answer and "\n" not in answer


PROMPT_TEMPLATES: dict[str, PromptTemplate] = {"compact": CompactTemplate(), "natural": NaturalTemplate()}


def _sentence(problem: Problem) -> str:
    if problem.rule is not None:
        *most, last = map(str, problem.rule.numbers)
        return (
            f"Use the numbers {', '.join(most)} and {last}, each of them at most once, with + - * / and brackets, "
            f"and write an expression that equals {problem.rule.target}."
        )
    if problem.family == "linear":
        return f"Solve {_spaced(problem.question.removesuffix('?'))} for x."
    if problem.family == "text":
        return problem.question
    return f"What is {_spaced(problem.question.removesuffix('='))}?"


def _step_lines(solution: str) -> list[str]:
    return [_spaced(step) for step in solution.split(";") if step]


def _spaced(expression: str) -> str:
    """Puts spaces around operators, not behind the sign of a number."""
    return _OPERATOR.sub(lambda found: f" {found[0]} ", expression)


def _last_boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...}, None where none is closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 0
    for end in range(start + len(_BOXED) - 1, min(len(text), start + _LONGEST_BOX)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + len(_BOXED) : end].strip() or None
    return None
