"""How a problem is put to a model, how an answer to it is written, and where in an answer the final one stands.

| template | prompt             | direct answer | chain of thought          | final answer                           |
| compact  | 7+8-9=             | #6            | 7+8=15;15-9=6;#6          | what follows the last #                |
| natural  | What is 7 + 8 - 9? | #### 6        | 7 + 8 = 15 (lines) #### 6 | see NaturalTemplate.final_answer       |

Neither writes the end-of-sequence token: the tokenizer owns it.
"""

from __future__ import annotations

import re

from rlinf_embodied.data.problems import Problem

_MARK = "####"
_BOXED = "\\boxed{"
_LONGEST_BOX = 1024  # characters that are searched for the closing bracket
_INSTRUCTION = "Write the steps, then the answer alone in a last line that begins with ####."
_OPERATOR = re.compile(r"(?<=[0-9])[-+*/=]")  # a sign that follows nothing of that kind is part of a number


class CompactTemplate:
    """The template of small models with a character vocabulary."""

    def prompt(self, problem: Problem) -> str:
        """Returns what the model is given (of a chat, the user's message): the question as it is."""
        return problem.question

    def completion(self, problem: Problem, chain_of_thought: bool) -> str:
        """Returns a right completion: "7+8=15;15-9=6;#6", or "#6" for a direct answer."""
        steps = problem.solution if chain_of_thought and problem.solution else ""
        return f"{steps}#{problem.answer}"

    def final_answer(self, completion: str) -> str | None:
        """Returns all that follows the last #, stripped; None where a completion gives no answer."""
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
        text = problem.family == "text"
        sentence = problem.question if text else f"What is {_spaced(problem.question.removesuffix('='))}?"
        return f"{sentence}\n{_INSTRUCTION}"

    def completion(self, problem: Problem, chain_of_thought: bool) -> str:
        """Returns the steps in lines, if asked for, and the answer behind ####."""
        steps = problem.solution if chain_of_thought and problem.solution else ""
        lines = [steps] if problem.family == "text" else [_spaced(step) for step in steps.split(";")]
        return "\n".join([*filter(None, lines), f"{_MARK} {problem.answer}"])

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


PromptTemplate = CompactTemplate | NaturalTemplate
PROMPT_TEMPLATES: dict[str, PromptTemplate] = {"compact": CompactTemplate(), "natural": NaturalTemplate()}


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
