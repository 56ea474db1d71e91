"""Prompt templates: how a problem is put to a model, how a completion is written, and where its final answer is.

A template is a Jinja file: templates/<name>.jinja, or a custom one.  Its text is the prompt (in a chat, the user's
message); docs/problems_and_rewards.md lists the variables.  It may also have

    {% set final_answer = ["boxed"] %}              rules that locate the final answer; the first match counts
    {% set format = "..." %}                        pattern of a whole completion that earns the format reward
    {% macro completion(solution, answer) %}...     a correct completion, for supervised fine-tuning

A rule is a name of `_RULES` or a regular expression with one group, whose last match counts.  Files are rendered in
Jinja's sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, nodes
from jinja2.environment import TemplateModule
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlinf_embodied.config import DataConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError

_FOLDER = Path(__file__).parent / "templates"
_PATH = "data.prompt_template"
_BOXED = "\\boxed{"
_LONGEST_BOX = 1024  # characters searched for the closing bracket
_MARKED = r"####(?!#)((?:(?!####)[^\n])*+)"  # to the end of the line, or to the next mark
_DEFAULT_RULES = ["marked_last_line", "boxed", "marked"]


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    answer = None
    for match in pattern.finditer(text):
        answer = match[1]
    return answer


def _last_boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...}, None if none is closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 0
    for end in range(start + len(_BOXED) - 1, min(len(text), start + _LONGEST_BOX)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + len(_BOXED) : end]
    return None


Rule = Callable[[str], str | None]
_RULES: dict[str, Rule] = {
    "marked": partial(_last_match, re.compile(_MARKED)),  # the text after the last ####
    "marked_last_line": partial(_last_match, re.compile(_MARKED + r"\s*+\Z")),  # the same, in the last line only
    "boxed": _last_boxed,  # the content of the last \boxed{}
    "last_number": partial(_last_match, re.compile(r"(?<![0-9.])(-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?)")),
}


def template_names() -> list[str]:
    """Returns the names of the templates that come with the library."""
    return sorted(path.stem for path in _FOLDER.glob("*.jinja"))


def template_text(name: str) -> str:
    """Returns the text of a template of the library, or of a file *.jinja.

    Raises:
        ConfigError: it cannot be read.
    """
    path = Path(name).expanduser() if name.endswith(".jinja") else _FOLDER / f"{name}.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        known = ", ".join(template_names())
        raise ConfigError(
            f"{_PATH} is {name!r}, but there is no such template ({error}): use {known}, or the path of a .jinja file"
        ) from error


class PromptTemplate:
    """A template and its rules."""

    def __init__(self, name: str, final_answer: Sequence[str] = ()) -> None:
        """Reads a template of the library, or a file *.jinja; `final_answer` replaces its rules.

        Raises:
            ConfigError: it cannot be read, is not valid Jinja, or sets an unknown variable.
        """
        blocks = {"trim_blocks": True, "lstrip_blocks": True}
        self._name, sandbox = name, ImmutableSandboxedEnvironment(**blocks, undefined=StrictUndefined)
        sandbox.filters["regex_replace"] = lambda text, pattern, by: re.sub(pattern, by, text)
        text = template_text(name)
        try:
            self._jinja, tree = sandbox.from_string(text), sandbox.parse(text)
            assigned = [node for node in tree.body if isinstance(node, nodes.Assign)]
            variables = {
                node.target.name: cast(Any, node.node).as_const()
                for node in assigned
                if isinstance(node.target, nodes.Name)
            }
        except TemplateSyntaxError as error:
            raise self._unusable(f"line {error.lineno}: {error.message}") from error
        except nodes.Impossible as error:
            raise self._unusable("its variables must be constants") from error
        unknown = variables.keys() - {"final_answer", "format"}
        require(not unknown, _PATH, name, f"it sets {sorted(unknown)}", "set final_answer and format, or nothing")
        rules, path = (final_answer, "data.final_answer") if final_answer else (variables.get("final_answer"), _PATH)
        rules = [rules] if isinstance(rules, str) else rules or _DEFAULT_RULES
        self._rules = [_RULES.get(rule) or partial(_last_match, _pattern(rule, 1, path)) for rule in rules]
        self._format = _pattern(variables["format"], 0, _PATH) if variables.get("format") else None

    @staticmethod
    def of(config: DataConfig) -> PromptTemplate:
        """Returns the template of a run, which is compiled once: all new episodes refer to it."""
        return _compiled(config.prompt_template, tuple(config.final_answer))

    def _unusable(self, reason: object) -> ConfigError:
        return ConfigError(f"{_PATH} is {self._name!r}, but it cannot be used ({reason}): correct the file")

    def _rendered(self, problem: Problem) -> TemplateModule:
        variables = {"question": problem.question, "family": problem.family, "level": problem.level}
        try:
            return self._jinja.make_module(variables | {"columns": problem.columns})
        except (TemplateError, TypeError, ValueError, AttributeError) as error:
            raise self._unusable(f"of the question {problem.question[:80]!r}: {error}") from error

    def prompt(self, problem: Problem) -> str:
        """Returns the prompt of the model (in a chat, the user's message)."""
        return str(self._rendered(problem))

    def completion(self, problem: Problem, chain_of_thought: bool) -> str:
        """Returns a correct completion, with the solution if `chain_of_thought`, without an end-of-sequence token.

        Raises:
            ConfigError: the template has no macro of this name.
        """
        macro = getattr(self._rendered(problem), "completion", None)
        if macro is None:
            raise self._unusable("it has no macro completion(solution, answer), which fine-tuning needs")
        return str(macro(problem.solution or "" if chain_of_thought else "", problem.answer))

    def final_answer(self, completion: str) -> str | None:
        """Returns the match of the first rule that has one, stripped; None if the completion has no final answer."""
        return next((answer for rule in self._rules if (answer := (rule(completion) or "").strip())), None)

    def is_formatted(self, completion: str) -> bool:
        """Returns whether a completion has a final answer, and matches the template's format if it has one."""
        fits = self._format is None or self._format.fullmatch(completion) is not None
        return fits and self.final_answer(completion) is not None


@cache
def _compiled(name: str, final_answer: tuple[str, ...]) -> PromptTemplate:
    return PromptTemplate(name, final_answer)


def _pattern(text: object, groups: int, path: str) -> re.Pattern[str]:
    """Returns a compiled pattern with this number of groups."""
    rule = f"it is one of {', '.join(_RULES)}, or " if groups else "a format is "
    rule += f"a regular expression with {groups} capturing groups"
    plain = isinstance(text, str) and all(c.isprintable() or c in "\n\t" for c in text)
    require(plain, path, text, rule, "write \\\\b for \\b in a string of a Jinja file")
    try:
        pattern = re.compile(str(text))
    except re.error as error:
        raise ConfigError(f"{path} is {text!r}, but {rule} ({error}): correct it") from error
    require(pattern.groups == groups, path, text, rule, "write (?:...) for groups that do not capture")
    return pattern
