"""Calls of a tool, in threads: several at once, and none that hangs unnoticed.

asking thread    ask(answers, key, text, problem)          returns at once
tool's threads   tool(text, problem)                       at most tool.concurrency at a time
asking thread    next_answer(answers) -> key, answer       while it waits it looks for calls that are late
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from rlinf_embodied.config import ToolConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in, named_when_raised
from rlinf_embodied.telemetry.progress import progress_reported_to, report_progress

Tool = Callable[[str, Problem], str | None]  # (what the model wrote in a turn, problem) -> what it reads; None: the end
Answers = queue.SimpleQueue  # of (key, answer), or of an error
_LOOK_S = 0.2  # between two looks at the clock


def tool_of(config: ToolConfig) -> Tool | None:
    """Returns the function that tool._target_ names, None otherwise.

    Raises:
        ConfigError: it cannot be imported, or does not take (text, problem).
    """
    if config._target_ is None:
        return None
    return cast(Tool, load_plug_in(config._target_, "tool._target_", "text", "problem"))


@dataclass(slots=True)
class _Running:
    """A call in a thread."""

    about: str
    since: float  # seconds, monotonic: its start, or its last report of progress

    def progress(self) -> None:
        self.since = time.monotonic()


class ToolCalls:
    """The threads of a tool; they belong to one stage."""

    def __init__(self, tool: Tool, config: ToolConfig) -> None:
        self._tool, self._config = tool, config
        self._asked: queue.SimpleQueue = queue.SimpleQueue()  # of (answers, key, text, problem); None: the end
        self._running: dict[int, _Running] = {}  # by thread
        self._threads: list[threading.Thread] = []

    @staticmethod
    def of(config: ToolConfig) -> ToolCalls | None:
        """Returns the calls of the tool that a config names, None where there is none."""
        tool = tool_of(config)
        return None if tool is None else ToolCalls(tool, config)

    def ask(self, answers: Answers, key: object, text: str, problem: Problem) -> None:
        """Has the tool answer, when a thread is free."""
        self._asked.put((answers, key, text, problem))
        if len(self._threads) < self._config.concurrency:
            # not an executor's: the interpreter would wait for those that hang
            self._threads.append(threading.Thread(target=self._run, name="tool", daemon=True))
            self._threads[-1].start()

    def next_answer(self, answers: Answers, wait: bool) -> tuple[object, str | None] | None:
        """Returns the next answer that came; None where there is none yet, and `wait` is false.

        Raises:
            ConfigError: the tool raised, returned something else than a text or None, or is late.
        """
        while True:
            try:
                found = answers.get(wait, _LOOK_S) if wait else answers.get_nowait()
            except queue.Empty:
                self._require_in_time()
                report_progress()
                if not wait:
                    return None
                continue
            if isinstance(found, BaseException):
                raise found
            return found

    def call(self, text: str, problem: Problem) -> str | None:
        """Returns the tool's answer; raises as `next_answer` does."""
        answers: Answers = queue.SimpleQueue()
        self.ask(answers, None, text, problem)
        answer = self.next_answer(answers, wait=True)
        assert answer is not None
        return answer[1]

    def close(self) -> None:
        """Ends the threads behind the calls that they make; one that hangs ends with the process."""
        for _ in self._threads:
            self._asked.put(None)
        self._threads = []

    def _run(self) -> None:
        me = threading.get_ident()
        while (asked := self._asked.get()) is not None:
            answers, key, text, problem = asked
            about = f"asked {text[:80]!r} about {problem.question[:80]!r},"
            running = self._running[me] = _Running(about, time.monotonic())
            try:
                with progress_reported_to(running.progress):
                    answers.put((key, self._answered(text, problem, about)))
            except BaseException as error:  # noqa: BLE001 - the asking thread raises it
                answers.put(error)
            finally:
                del self._running[me]

    def _answered(self, text: str, problem: Problem, about: str) -> str | None:
        with named_when_raised(lambda raised: ConfigError(f"tool._target_, {about} raised {raised}\nCorrect it there")):
            answer = self._tool(text, problem)
        rule = "a tool returns a text that the model reads, or None at the end of an episode"
        action = f"correct it: tool._target_, {about} gave that"
        require(answer is None or isinstance(answer, str), "tool._target_", answer, rule, action)
        return answer

    def _require_in_time(self) -> None:
        """Raises where a call has neither answered nor reported progress for tool.timeout_s."""
        limit_s, now = self._config.timeout_s, time.monotonic()
        for thread, of in list(self._running.items()):
            if now - of.since > limit_s:
                frame = sys._current_frames().get(thread)
                at = "" if frame is None else "".join(traceback.format_stack(frame)[-3:]).rstrip()
                raise ConfigError(
                    f"tool.timeout_s is {limit_s:g}, but {self._config._target_}, {of.about} has neither answered nor "
                    f"reported progress for {now - of.since:.0f} s: use a larger one, correct the tool, or have it "
                    f"call rlinf_embodied.telemetry.progress.report_progress; it is at\n{at}"
                )
