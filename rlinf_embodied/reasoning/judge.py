"""Rewards: which completions are right.

A verdict is a pure function of (completion, problem): `answers.py` decides by the texts alone wherever it can, and
bounds what is left for math-verify, which runs under a limit of processor time (not of the clock) in `judge_pool.py`.
For references that are numbers, and for countdown, nothing is left that a limit could cut short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.text_forms import TextForm
from rlinf_embodied.reasoning.answers import decide, solves
from rlinf_embodied.reasoning.judge_pool import JudgePool


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What was found about B completions, in their order."""

    correct: np.ndarray  # bool [B]: the final answer is right and the completion came to its end
    formatted: np.ndarray  # bool [B]: it came to its end and follows the form
    rewards: np.ndarray  # float32 [B]: correct + format_reward * formatted


class Judge:
    """Judges completions of one text form; a context manager.

    Its processes start when a first answer needs them, on the machine where it is called.  One caller at a time.
    """

    def __init__(
        self, form: TextForm, *, num_workers: int = 1, timeout_s: float = 2.0, format_reward: float = 0.0
    ) -> None:
        """Starts nothing yet.

        Args:
            form: how completions are written.
            num_workers: processes for math-verify, at most.
            timeout_s: processor seconds that one answer may take.
            format_reward: what a completion in the right form earns, right or wrong.
        """
        self._form, self._format_reward = form, format_reward
        self._pool = JudgePool(num_workers, timeout_s)

    def __enter__(self) -> Judge:
        """Returns the judge."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends its processes."""
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that were started."""
        return self._pool.pids

    def judge(
        self, completions: Sequence[str], problems: Sequence[Problem], ended: Sequence[bool] | np.ndarray | None = None
    ) -> Verdicts:
        """Judges each completion by its problem.

        Args:
            completions: B texts, without the end-of-sequence token.
            problems: B problems; the same one may stand several times.
            ended: B flags, whether the end-of-sequence token came; a truncated completion earns nothing.  None: it came
                everywhere.

        Raises:
            WorkerError: math-verify is needed and no process for it can be started.
        """
        complete = np.ones(len(completions), bool) if ended is None else np.asarray(ended, bool)
        assert len(completions) == len(problems) == len(complete)
        formatted = np.array([self._form.is_formatted(text) for text in completions], bool) & complete
        decisions = [
            self._decide(text, problem) if whole else False
            for text, problem, whole in zip(completions, problems, complete, strict=True)
        ]
        correct = self._settle(decisions)
        rewards = correct.astype(np.float32) + np.float32(self._format_reward) * formatted
        return Verdicts(correct, formatted, rewards.astype(np.float32))

    def close(self) -> None:
        """Ends the processes; a later call starts new ones."""
        self._pool.close()

    def _decide(self, completion: str, problem: Problem) -> bool | tuple[str, str]:
        answer = self._form.final_answer(completion)
        if answer is None:
            return False
        return decide(answer, problem.answer) if problem.rule is None else solves(answer, problem.rule)

    def _settle(self, decisions: list[bool | tuple[str, str]]) -> np.ndarray:
        """Asks math-verify about what is undecided, once for each different pair."""
        pairs = list(dict.fromkeys(found for found in decisions if isinstance(found, tuple)))
        equal = dict(zip(pairs, self._pool.equal(pairs), strict=True))
        return np.array([equal[found] if isinstance(found, tuple) else found for found in decisions], bool)
