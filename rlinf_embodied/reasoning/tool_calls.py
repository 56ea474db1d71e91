"""Calls of a tool, in threads; a call that hangs raises an error.

calling thread   ask(text, problem) -> call      returns immediately
tool's threads   tool(text, problem)             at most tool.concurrency at a time
calling thread   ended(calls) -> some of them    while it waits it checks the time limit of running calls
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

from rlinf_embodied.config import ToolConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import load_plug_in, named_when_raised
from rlinf_embodied.telemetry.progress import progress_reported_to, report_progress

Tool = Callable[[str, Problem], str | None]  # (text of the model's turn, problem) -> answer; None ends the episode
_POLL_S = 0.2  # between two checks of tool.timeout_s


@dataclass(slots=True)
class _Running:
    """A call in a thread."""

    description: str
    since: float  # seconds, monotonic: its start, or its last report of progress

    def progress(self) -> None:
        self.since = time.monotonic()


class ToolCalls:
    """The threads of a tool; they belong to one stage."""

    def __init__(self, config: ToolConfig) -> None:
        """Loads the tool, if the config names one; starts no thread.

        Raises:
            ConfigError: it cannot be imported or called.
        """
        self._config, target = config, config._target_
        self._tool = None if target is None else load_plug_in(target, "tool._target_", "text", "problem")
        self._requests: queue.SimpleQueue = queue.SimpleQueue()  # of (call, text, problem); None ends a thread
        self._running: dict[int, _Running] = {}  # by thread
        self._threads: list[threading.Thread] = []

    def ask(self, text: str, problem: Problem) -> Future[str | None]:
        """Queues a call; its result raises a ConfigError if the tool raised, or returned neither a text nor None."""
        call: Future[str | None] = Future()
        self._requests.put((call, text, problem))
        if len(self._threads) < self._config.concurrency:
            # not in an executor: the interpreter would wait for threads that hang
            self._threads.append(threading.Thread(target=self._run, name="tool", daemon=True))
            self._threads[-1].start()
        return call

    def ended(self, calls: Collection[Future[str | None]], wait: bool) -> list[Future[str | None]]:
        """Returns those calls that have ended, with `wait` at least one.

        Raises:
            ConfigError: a call exceeded the time limit.
        """
        while not (ended := [call for call in calls if call.done()]):
            self._require_in_time()
            report_progress()
            if not wait:
                break
            futures.wait(calls, _POLL_S, futures.FIRST_COMPLETED)
        return ended

    def call(self, text: str, problem: Problem) -> str | None:
        """Returns the tool's answer; raises as `ask` and `ended` do."""
        call = self.ask(text, problem)
        self.ended([call], wait=True)
        return call.result()

    def close(self) -> None:
        """Ends each thread after its current call; a thread that hangs ends with the process."""
        for _ in self._threads:
            self._requests.put(None)
        self._threads = []

    def _run(self) -> None:
        thread = threading.get_ident()
        while (request := self._requests.get()) is not None:
            call, text, problem = request
            description = f"called with {text[:80]!r} for {problem.question[:80]!r},"
            running = self._running[thread] = _Running(description, time.monotonic())
            try:
                with progress_reported_to(running.progress):
                    call.set_result(self._answer(text, problem, description))
            except BaseException as error:  # noqa: BLE001 - the calling thread raises it
                call.set_exception(error)
            finally:
                del self._running[thread]

    def _answer(self, text: str, problem: Problem, description: str) -> str | None:
        refusal = lambda raised: ConfigError(f"tool._target_, {description} raised {raised}\nCorrect the tool")  # noqa: E731
        assert self._tool is not None
        with named_when_raised(refusal):
            answer = self._tool(text, problem)
        rule = "a tool returns a text that the model reads, or None to end the episode"
        action = f"correct the tool: tool._target_, {description} returned it"
        require(answer is None or isinstance(answer, str), "tool._target_", answer, rule, action)
        return cast("str | None", answer)

    def _require_in_time(self) -> None:
        """Raises if a running call has neither answered nor reported progress for tool.timeout_s."""
        limit_s, now = self._config.timeout_s, time.monotonic()
        for thread, call in list(self._running.items()):
            if now - call.since > limit_s:
                frame = sys._current_frames().get(thread)
                stack = "" if frame is None else "".join(traceback.format_stack(frame)[-3:]).rstrip()
                raise ConfigError(
                    f"tool.timeout_s is {limit_s:g}, but {self._config._target_}, {call.description} has neither "
                    f"answered nor reported progress for {now - call.since:.0f} s: use a larger one, correct the tool, "
                    f"or have it call rlinf_embodied.telemetry.progress.report_progress; it is at\n{stack}"
                )
