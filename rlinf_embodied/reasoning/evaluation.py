"""Evaluation on held-out problems: greedy answers, samples, and answers whose beginning is given.

greedy    one answer per problem at temperature 0: accuracy with Wilson's interval
sampled   n answers per problem at the training's temperature: pass@k, unbiased (Chen et al. 2021, arXiv 2107.03374)
forced    greedy, with the first token of a chain of thought given (forced prefix): what the policy could do
          already, had it only shown its working
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import AnswerEvalConfig, DataConfig, GenerationConfig, RewardConfig
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import prompt_template
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.reasoning.batch import GenerationBlock, Noise, Prompt, SamplingParams
from rlinf_embodied.reasoning.generation_stage import LanguageStage, LanguageStageConfig
from rlinf_embodied.reasoning.verifier import Verifier, reward_function
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.metrics import Z95, Rate
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import StageSpec, Workflow

STAGE = "answers"


class Mode(StrEnum):
    """How problems are answered."""

    greedy = "greedy"
    sampled = "sampled"
    forced = "forced"


@dataclass(frozen=True, slots=True)
class AnswerStageConfig:
    """What the stage needs to know."""

    model: LanguageStageConfig
    data: DataConfig
    generation: GenerationConfig
    reward: RewardConfig
    eval: AnswerEvalConfig
    num_problems: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, for people."""

    question: str
    answer: str  # the right one
    completion: str
    correct: bool


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """What a worker found out about its problems, by block."""

    correct: dict[int, tuple[tuple[bool, ...], ...]]  # of each problem's answers
    earned: dict[int, float]  # sum over the block's answers
    tokens: int
    truncated: int
    shown: dict[int, tuple[Answer, ...]]


class AnswerStage(LanguageStage):
    """Answers held-out problems and scores the answers.

    It holds the weights on the device only while it does, so that training's switches free the memory.
    """

    _user = STAGE

    def __init__(self, config: AnswerStageConfig) -> None:
        super().__init__(config.model)
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Loads the model, opens the problems, makes the verifier."""
        super().setup(context)
        config = self._config
        self._prompt_template = prompt_template(config.data.prompt_template)
        self._source = problem_source(config.data, config.data.seed)
        reward = config.reward
        self._verifier = Verifier(
            self._prompt_template,
            num_workers=reward.num_workers,
            timeout_s=reward.timeout_s,
            function=reward_function(reward),
            concurrency=reward.concurrency,
        )
        self._shared.leave(self._user)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Answers the problems of one of its blocks: the step_context's message holds the mode, and which one."""
        mode, number = str(step_context.message).split()
        self._shared.enter(self._user)
        try:
            blocks = sorted(inputs)[int(number) : int(number) + 1]
            return Output(dict.fromkeys(inputs), self._run(Mode(mode), blocks))
        finally:
            self._shared.leave(self._user)

    def _run(self, mode: Mode, blocks: Sequence[int]) -> AnswerReport:
        correct, earned, shown, tokens, truncated = {}, {}, {}, 0, 0
        for block in blocks:
            problems = self._problems(block)
            texts, lengths, ended = self._answers(problems, mode)
            size = len(texts) // len(problems)
            every = [problem for problem in problems for _ in range(size)]
            verified = self._verifier.verify(texts, every, ended)
            right, earned[block] = verified.correct, float(verified.raw.sum(dtype=np.float64))
            correct[block] = tuple(tuple(row) for row in right.reshape(-1, size).tolist())
            first = range(0, len(texts), size)
            shown[block] = tuple(Answer(every[i].question, every[i].answer, texts[i], bool(right[i])) for i in first)
            tokens, truncated = tokens + sum(lengths), truncated + len(ended) - sum(ended)
        limit = self._config.eval.num_shown if mode is Mode.greedy else 0
        per_block = self._config.eval.problems_per_block
        few = {block: rows[: max(0, limit - block * per_block)] for block, rows in shown.items()}
        return AnswerReport(correct, earned, tokens, truncated, few)

    def _problems(self, block: int) -> list[Problem]:
        size = self._config.eval.problems_per_block
        start = block * size
        return self._source.batch(Split.test, start, min(size, self._config.num_problems - start))

    def _answers(self, problems: Sequence[Problem], mode: Mode) -> tuple[list[str], list[int], list[bool]]:
        """Returns texts, lengths in tokens, and whether each came to its end; problem by problem."""
        config, policy = self._config.generation, self._shared.policy
        begun = {p.id: self._forced_prefix(p) if mode is Mode.forced else [] for p in problems}
        prompts = [Prompt(p.id, (*policy.encode(self._prompt_template.prompt(p)), *begun[p.id])) for p in problems]
        sampled = mode is Mode.sampled
        group_size = self._config.eval.num_samples if sampled else 1
        longest = config.max_new_tokens - max(map(len, begun.values()))
        sampling = SamplingParams(longest, config.temperature if sampled else 0.0, config.top_p if sampled else 1.0)
        noise = Noise(self._model.seed, 0, "evaluation")
        block = GenerationBlock(tuple(prompts), group_size)
        groups = self._generate(block, sampling, noise, config, self._config.eval.engine)
        texts, lengths, ended = [], [], []
        for group in groups:
            for row, length in zip(group.tokens.tolist(), group.lengths.tolist(), strict=True):
                texts.append(policy.decode([*begun[group.prompt.id], *row[:length]]))
                lengths.append(length)
            ended += group.ended.tolist()
        return texts, lengths, ended

    def _forced_prefix(self, problem: Problem) -> list[int]:
        """Returns the first token of a chain of thought, nothing where the problem comes without its steps."""
        if not problem.solution:
            return []
        return self._shared.policy.encode_completion(self._prompt_template.completion(problem, chain_of_thought=True))[
            :1
        ]


# -------------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class Sampled:
    """What n answers per problem gave; intervals are normal ones of 95 % over problems."""

    num_samples: int
    pass_at: dict[int, float]  # k -> share of problems that one of k answers solves
    intervals: dict[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class AnswerResult:
    """What an evaluation found."""

    accuracy: Rate  # of greedy answers
    num_asked: int  # eval.num_problems: more than there are for tests, where all of these were taken
    length: float  # mean tokens of a greedy answer
    truncated: float  # share of greedy answers that were cut off
    reward: float | None  # mean of what reward._target_ said of greedy answers; None: it is not used
    sampled: Sampled | None
    forced: Rate | None
    shown: tuple[Answer, ...]
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def score(self) -> float:
        """The share of right greedy answers."""
        return self.accuracy.value

    def summary(self) -> dict[str, object]:
        """Returns the JSON form."""
        found: dict[str, object] = {
            **self.accuracy.summary("accuracy"),
            "num_problems": self.accuracy.number,
            "num_asked": self.num_asked,
            "length": self.length,
            "truncated": self.truncated,
        }
        if self.reward is not None:
            found["reward"] = self.reward
        if self.sampled is not None:
            found["num_samples"] = self.sampled.num_samples
            for k, value in self.sampled.pass_at.items():
                found |= {f"pass@{k}": value, f"pass@{k}_interval": list(self.sampled.intervals[k])}
        if self.forced is not None:
            found |= self.forced.summary("forced_accuracy")
        return found

    def metrics(self) -> dict[str, float]:
        """Returns what goes to the learning curve."""
        rewards = {} if self.reward is None else {"eval/reward": self.reward}
        return {"eval/accuracy": self.accuracy.value, "eval/length": self.length, **rewards}

    def __str__(self) -> str:
        """Returns, for example, "63.0 % [60.0, 66.0] of 1000 problems, pass@1 58.2 %, pass@8 81.0 %"."""
        text = f"{self.accuracy} of {self.accuracy.number} problems"
        if self.accuracy.number < self.num_asked:
            text += f" (all there are for tests: eval.num_problems asks for {self.num_asked})"
        if self.reward is not None:
            text += f", reward {self.reward:.3f}"
        for k in (1, self.sampled.num_samples) if self.sampled else ():
            text += f", pass@{k} {100 * self.sampled.pass_at[k]:.1f} %" if self.sampled else ""
        return text + (f", with a forced prefix {100 * self.forced.value:.1f} %" if self.forced else "")

    def table(self) -> str:
        """Returns sample answers as a Markdown table."""
        escape = lambda text: text.replace("|", "\\|").replace("\n", "<br>")  # noqa: E731
        rows = []
        for a in self.shown:
            cells = [f"`{escape(text)}`" for text in (a.question, a.answer, a.completion)]
            rows.append("| " + " | ".join([*cells, "yes" if a.correct else "no"]) + " |")
        return "\n".join(["| problem | answer | completion | right |", "|---|---|---|---|", *rows]) + "\n"


def sampled_result(correct: Sequence[Sequence[bool]]) -> Sampled:
    """Returns pass@k for k = 1, 2, 4, ... and the number of samples, from [N][n] scored answers."""
    counts, size = np.array([sum(row) for row in correct]), len(correct[0])
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k < size} | {size})
    pass_at, intervals = {}, {}
    for k in ks:
        missed = np.array([math.comb(size - int(c), k) / math.comb(size, k) for c in counts])
        solved = 1.0 - missed
        half = Z95 * float(solved.std(ddof=1)) / math.sqrt(len(solved)) if len(solved) > 1 else 1.0
        pass_at[k] = float(solved.mean())
        intervals[k] = (max(0.0, pass_at[k] - half), min(1.0, pass_at[k] + half))
    return Sampled(size, pass_at, intervals)


def _first_right(correct: Sequence[Sequence[bool]]) -> Rate:
    return Rate(sum(row[0] for row in correct), len(correct))


class AnswerEvaluation:
    """The evaluation workflow on all devices of a session."""

    stage = STAGE

    def __init__(
        self,
        model: LanguageStageConfig,
        data: DataConfig,
        generation: GenerationConfig,
        reward: RewardConfig,
        evaluation: AnswerEvalConfig,
        session: Session,
        cluster: Cluster,
        last_step: int,
        progress: ShowProgress | None = None,
    ) -> None:
        """Builds the stage; samples are drawn at the steps 0 and `last_step` only, forced prefixes at 0.

        `progress` is called with (mode, problems done, problems in all, "").
        """
        self._progress = progress
        size = problem_source(data, data.seed).size(Split.test)
        self._eval, self._last_step, self._own_reward = evaluation, last_step, reward._target_ is not None
        number = evaluation.num_problems if size is None else min(size, evaluation.num_problems)
        config = AnswerStageConfig(model, data, generation, reward, evaluation, number)
        blocks = -(-number // evaluation.problems_per_block)
        self._number = number
        stages = {STAGE: StageSpec(STAGE, f"{__name__}.AnswerStage", config)}
        workflow = Workflow("evaluation", blocks, stages)
        self.executor = Executor.on_all_devices(workflow, session, cluster)
        owners = self.executor.plan.all_owners(workflow)[STAGE]
        self._rounds = max(owners.count(worker) for worker in owners)

    def run(self, step: int) -> AnswerResult:
        """Answers every problem."""
        greedy, spans, shown, totals = self._answers(step, Mode.greedy)
        sampled = forced = None
        if self._eval.num_samples and step in (0, self._last_step):
            sampled = sampled_result(self._answers(step, Mode.sampled)[0])
        if self._eval.forced_prefix and step == 0:
            forced = _first_right(self._answers(step, Mode.forced)[0])
        number = len(greedy)
        return AnswerResult(
            *(_first_right(greedy), self._eval.num_problems),
            *(totals[0] / number, totals[1] / number),
            totals[2] / number if self._own_reward else None,
            *(sampled, forced, shown, spans),
        )

    def _answers(
        self, step: int, mode: Mode
    ) -> tuple[list[tuple[bool, ...]], tuple[Span, ...], tuple[Answer, ...], tuple[int, int, float]]:
        """Returns who is right by problem, spans, answers to show, and (tokens, truncated answers, rewards)."""
        reports: list[AnswerReport] = []
        spans: list[Span] = []
        for number in range(self._rounds):
            result = self.executor.run(StepContext(step, message=f"{mode.value} {number}"))
            reports += result.all_of(STAGE, AnswerReport)
            spans += result.spans
            if self._progress is not None:
                done = sum(len(rows) for report in reports for rows in report.correct.values())
                self._progress(f"{mode.value} answers", done, self._number, "")
        blocks = sorted((block, rows) for report in reports for block, rows in report.correct.items())
        shown = sorted((block, rows) for report in reports for block, rows in report.shown.items())
        earned = sorted(item for report in reports for item in report.earned.items())
        tokens, truncated = sum(report.tokens for report in reports), sum(report.truncated for report in reports)
        return (
            [row for _, rows in blocks for row in rows],
            tuple(spans),
            tuple(answer for _, answers in shown for answer in answers),
            (tokens, truncated, sum(value for _, value in earned)),
        )
