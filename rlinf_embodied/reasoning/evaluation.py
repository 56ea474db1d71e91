"""Evaluation on held-out problems.

greedy    one greedy answer per held-out problem: accuracy with Wilson's interval
sampled   n answers per held-out problem, sampled as in training: avg@n, maj@n, and unbiased pass@k (Chen et al. 2021,
          arXiv 2107.03374)
<name>    the metrics of `sampled` for each of eval.sets, with separate problems and sampling
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EvalSetConfig, EvaluateAnswersConfig, MathConfig, RecoveryConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.config.reasoning import GREEDY, SAMPLED
from rlinf_embodied.data.problems import Split
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.reasoning.agents import agent_of
from rlinf_embodied.reasoning.answers import majority_is_right
from rlinf_embodied.reasoning.batch import (
    Completions,
    GenerationBlock,
    GenerationReport,
    PromptedProblem,
    Sample,
    ScoredGroup,
    generation_report,
    in_order,
)
from rlinf_embodied.reasoning.custom_reward import reward_function
from rlinf_embodied.reasoning.episodes import episodes_of, run_episodes
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.generation_stage import LanguageStage
from rlinf_embodied.reasoning.policy_folder import StageConfig, sampling_copy
from rlinf_embodied.reasoning.prompt_stage import Prompts
from rlinf_embodied.reasoning.reward_stage import Verifier
from rlinf_embodied.reasoning.tool_calls import ToolCalls
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import Session, find_cluster, make_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.metrics import Rate, mean_interval, percent
from rlinf_embodied.telemetry.run_folder import RunFolder, library_versions
from rlinf_embodied.telemetry.tables import markdown_table
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.workflow.graph import StageSpec, Workflow

STAGE = "answers"
_MAX_DRAWS = 20  # per held-out problem, until its question is a new one


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """Problems of an evaluation in blocks, and how answers are sampled."""

    name: str
    config: MathConfig  # the run's config with the set's sections data and generation
    problems: Sequence[PromptedProblem]
    per_block: int
    num_samples: int  # per problem
    greedy: bool

    @property
    def num_blocks(self) -> int:
        return -(-len(self.problems) // self.per_block)

    def block(self, number: int) -> list[PromptedProblem]:
        """Returns the problems of a block; an empty list after the last block."""
        return list(self.problems[number * self.per_block :][: self.per_block])


def problem_sets(config: MathConfig, folder: str | None) -> dict[str, ProblemSet]:
    """Returns the held-out problems, answered greedily and sampled, and the sets of eval.sets.

    The latter are spread over at least as many blocks as the former.

    Raises:
        ConfigError: a set has an unknown key or an invalid value, or no problems.
        DataError: a file cannot be used.
    """
    settings, sets = config.eval, dict[str, ProblemSet]()
    greedy = EvalSetConfig(greedy=True, num_problems=settings.num_problems)
    for name, set_config in {GREEDY: greedy, **settings.sets}.items():
        changed = _with_changes(config, name, set_config)
        problems = _distinct(Prompts(changed, folder, Split.test), set_config.num_problems)
        per_block = settings.problems_per_block
        if sets:
            per_block = min(per_block, -(-len(problems) // sets[GREEDY].num_blocks))
        sets[name] = ProblemSet(name, changed, problems, per_block, set_config.num_samples, set_config.greedy)
    if settings.num_samples:
        sets[SAMPLED] = replace(sets[GREEDY], name=SAMPLED, num_samples=settings.num_samples, greedy=False)
    return sets


def _with_changes(config: MathConfig, name: str, set_config: EvalSetConfig) -> MathConfig:
    """Returns a config with a set's changes to the sections data and generation."""
    changed = copy.copy(config)  # not `replace`, which would check the sections as those of a training
    for section in ("data", "generation"):
        base, values = getattr(config, section), getattr(set_config, section)
        known = [entry.name for entry in fields(base)]
        unknown = ", ".join(key for key in values if key not in known)
        path, action = f"eval.sets.{name}.{section}", f"use some of {', '.join(known)}"
        require(not unknown, path, values, f"{section} has no {unknown}", action)
        try:
            setattr(changed, section, replace(base, **values))
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"eval.sets.{name}: {error}") from error
    return changed


def _distinct(prompts: Prompts, number: int) -> list[PromptedProblem]:
    """Returns the first `number` distinct questions, or fewer if a level has no more.

    Questions that counted twice would make intervals too narrow.
    """
    questions = dict[str, PromptedProblem]()
    for start in range(0, _MAX_DRAWS * number, number):
        problems = prompts.batch(start, number)
        for prompted in problems:
            questions.setdefault(prompted[0].key, prompted)
        if len(questions) >= number or len(problems) < number:
            break
    return list(questions.values())[:number]


class AnswerStage(LanguageStage):
    """Answers problems and scores the answers.

    The weights are on the device only meanwhile, so that training can free the memory.
    """

    _user = STAGE

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        self._sets = problem_sets(self._config, self._stage_config.folder)
        reward = replace(self._config.reward, format_reward=0.0, overlong_tokens=0)  # scores answers only
        verifiers = {n: Verifier(PromptTemplate.of(s.config.data), reward) for n, s in self._sets.items()}
        self._verifiers = verifiers | {SAMPLED: verifiers[GREEDY]}  # shared, since each may start a process
        self._calls = ToolCalls(self._config.tool)
        self._shared.leave(self._user)

    def leave(self) -> None:
        self._calls.close()

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Answers blocks of the problem set that the message names; reports (GenerationReport, groups)."""
        problem_set = self._sets[cast(str, step_context.message)]
        answers, groups = list[Completions](), list[ScoredGroup]()
        self._shared.enter(self._user)
        try:
            for block in sorted(inputs):
                if problems := problem_set.block(block):
                    answers.append(self._answer(problem_set, problems))
                    groups += self._score(problem_set, block, answers[-1])
        finally:
            self._shared.leave(self._user)
        return Output(dict.fromkeys(inputs), (generation_report(answers, {}), groups) if answers else None)

    def _answer(self, problem_set: ProblemSet, problems: Sequence[PromptedProblem]) -> Completions:
        policy, size, config, name = self._shared.policy, problem_set.num_samples, problem_set.config, problem_set.name
        purpose = "evaluation" if name in (GREEDY, SAMPLED) else f"evaluation/{name}"
        settings = config.generation, config.run.seed, 0, purpose, problem_set.greedy
        requests = GenerationBlock((), *settings, records_support=False)
        with closing(episodes_of(problems, size, config, policy.codec, self._calls)) as episodes:
            return run_episodes(ExactEngine(policy, self._shared.version), episodes, size, requests)

    def _score(self, problem_set: ProblemSet, block: int, completions: Completions) -> Iterator[ScoredGroup]:
        """Yields the groups of a block with majorities, and a sample for each of the first greedy problems."""
        name, size, first = problem_set.name, problem_set.num_samples, block * problem_set.per_block
        verifier, max_new_tokens = self._verifiers[name], problem_set.config.generation.max_new_tokens
        _, groups = verifier.score(block, completions, max_new_tokens)
        ended, rows = completions.ended[completions.last_rows()].tolist(), completions.rows.completions()
        final_answer = verifier.template.final_answer
        answers = [final_answer(t) if e else None for t, e in zip(completions.texts, ended, strict=True)]
        for k, (group, problem) in enumerate(zip(groups, completions.problems, strict=True)):
            sample = None
            if name == GREEDY and first + k < self._config.eval.num_shown:
                own_rows = [row for row, index in zip(rows, completions.samples, strict=True) if index // size == k]
                text = "\n".join(map(self._shared.policy.codec.decode, own_rows))
                sample = Sample(problem.question, problem.answer, text, group.correct[0])
            majority = majority_is_right(answers[k * size : (k + 1) * size], group.correct)
            yield replace(group, majority=majority, sample=sample)


# -------------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class AnswerResult:
    """The result of an evaluation."""

    accuracy: Rate  # of greedy answers
    length: float  # mean number of tokens of a greedy answer
    truncated: float  # fraction of greedy answers that were cut off
    reward: float | None  # mean reward._target_ of greedy answers; None: there is no custom reward
    sampled: dict[str, Any]  # see `sampled_result`; empty if nothing was sampled
    sets: dict[str, dict[str, Any]]  # the same for each of eval.sets
    samples: tuple[Sample, ...]
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def score(self) -> float:
        return self.accuracy.value

    def summary(self) -> dict[str, object]:
        return {
            **self.accuracy.summary("accuracy"),
            "num_problems": self.accuracy.number,
            "length": self.length,
            "truncated": self.truncated,
            **({} if self.reward is None else {"reward": self.reward}),
            **self.sampled,
            **({"sets": self.sets} if self.sets else {}),
        }

    def metrics(self) -> dict[str, float]:
        metrics = {"eval/accuracy": self.accuracy.value, "eval/length": self.length}
        if self.reward is not None:
            metrics["eval/reward"] = self.reward
        for name, result in self.sets.items():
            metrics |= {f"eval/{name}/{key}": value for key, value in result.items() if isinstance(value, float)}
        return metrics

    def __str__(self) -> str:
        """Returns, for example, "63.0 % [60.0, 66.0] of 1000 problems, pass@1 58.2 %, pass@8 81.0 %"."""
        text = f"{self.accuracy} of {self.accuracy.number} problems"
        if self.reward is not None:
            text += f", reward {self.reward:.3f}"
        for k in (1, self.sampled["num_samples"]) if self.sampled else ():
            text += f", pass@{k} {100 * self.sampled[f'pass@{k}']:.1f} %"
        for name, result in self.sets.items():
            n = result["num_samples"]
            text += f"; {name}: avg@{n} {percent(result, f'avg@{n}')} of {result['num_problems']} problems"
            text += f", maj@{n} {100 * result[f'maj@{n}']:.1f} %, pass@{n} {100 * result[f'pass@{n}']:.1f} %"
        return text

    def table(self) -> str:
        """Returns sample answers as a Markdown table."""
        cell = lambda text: f"`{text}`".replace("\n", "<br>")  # noqa: E731
        rows = [[*map(cell, (a.prompt, a.answer, a.completion)), "yes" if a.correct else "no"] for a in self.samples]
        return markdown_table(["problem", "answer", "completion", "right"], rows) + "\n"


def sampled_result(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Returns num_samples (n), avg@n with its 95 % interval, maj@n, and pass@k for k = 1, 2, 4, ... and n.

    avg@n is the mean fraction of right answers (interval: normal, over problems), maj@n the fraction of problems whose
    most frequent answer is right, and pass@k that of problems of which one of k answers is right.
    """
    correct = [group.correct for group in groups]
    size, number, shares = len(correct[0]), len(correct), [sum(row) / len(row) for row in correct]
    low, high = mean_interval(shares)
    result: dict[str, Any] = {"num_samples": size, f"avg@{size}": sum(shares) / number}
    result[f"avg@{size}_interval"] = [max(0.0, low), min(1.0, high)]
    result[f"maj@{size}"] = sum(bool(group.majority) for group in groups) / number
    for k in sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k < size} | {size}):
        failures = [math.comb(size - sum(row), k) / math.comb(size, k) for row in correct]
        result[f"pass@{k}"] = 1.0 - sum(failures) / number
    return result


class AnswerEvaluation:
    """The evaluation workflow on all devices of a session."""

    stage = STAGE

    def __init__(
        self,
        stage_config: StageConfig,
        session: Session,
        cluster: Cluster,
        folder: RunFolder | None = None,
    ) -> None:
        """Builds the stage."""
        self._config, self._folder = stage_config.config, folder
        own = sampling_copy(stage_config)
        self.shares_with = None if own is stage_config else "generation"
        sets = problem_sets(stage_config.config, stage_config.folder)
        num_blocks = max(problem_set.num_blocks for problem_set in sets.values())
        spec = StageSpec(STAGE, f"{__name__}.AnswerStage", own)
        self.executor = Executor.on_all_devices(Workflow("evaluation", num_blocks, {STAGE: spec}), session, cluster)

    def run(self, step: int, best: float | None = None, last: bool = False) -> AnswerResult:
        """Answers all problems, at step 0 and the `last` time also with sampling; `best` is ignored."""
        iteration, reports, groups = self._answer(step, GREEDY)
        sampled = {}
        if self._config.eval.num_samples and (step == 0 or last):
            sampled = sampled_result(self._answer(step, SAMPLED)[2])
        sets = dict[str, dict[str, Any]]()
        for name in self._config.eval.sets:
            _, set_reports, set_groups = self._answer(step, name)
            sets[name] = {"num_problems": len(set_groups), **sampled_result(set_groups), **_lengths(set_reports)}
        number, has_custom_reward = len(groups), self._config.reward._target_ is not None
        result = AnswerResult(
            accuracy=Rate(sum(group.correct[0] for group in groups), number),
            **_lengths(reports),
            reward=sum(group.reward for group in groups) / number if has_custom_reward else None,
            sampled=sampled,
            sets=sets,
            samples=tuple(group.sample for group in groups if group.sample is not None),
            spans=tuple(iteration.spans),
        )
        if self._folder is not None:
            self._folder.write_text("samples.md", result.table())
        return result

    def _answer(self, step: int, name: str) -> tuple[IterationResult, list[GenerationReport], list[ScoredGroup]]:
        result = self.executor.run(StepContext(step, message=name))
        reports = cast("list[tuple[GenerationReport, list[ScoredGroup]]]", result.all_of(STAGE, tuple))
        return result, [report for report, _ in reports], in_order(groups for _, groups in reports)


def _lengths(reports: Sequence[GenerationReport]) -> dict[str, float]:
    """Returns the mean number of tokens of an answer, and the fraction of answers that were cut off."""
    number = sum(report.completions for report in reports)
    tokens, truncated = (sum(getattr(report, name) for report in reports) for name in ("tokens", "truncated"))
    return {"length": tokens / number, "truncated": truncated / number}


# ---------------------------------------------------------------------------------------------------------- the command
def check_plug_ins(config: MathConfig | EvaluateAnswersConfig) -> None:
    """Imports the code that a config names.

    Raises:
        ConfigError: a _target_ cannot be used.
        DataError: a file of problems cannot be used.
    """
    reward_function(config.reward)
    ToolCalls(config.tool)
    agent_of(config.agent)
    problem_source(config.data, config.data.seed)


def evaluate_command(config: EvaluateAnswersConfig) -> dict[str, Any]:
    """Evaluates a checkpoint; prints the result and returns the content of eval_info.json.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: a _target_ cannot be used.
    """
    check_plug_ins(config)
    folder = RunFolder(Path(config.run.dir or f"runs/evaluate-math-{time.strftime('%Y%m%d-%H%M%S')}"))
    cluster = find_cluster(config.cluster)
    checkpoint = str(Path(config.checkpoint).expanduser())
    stage_config = StageConfig(cast(MathConfig, config), checkpoint)  # it has the sections that an evaluation reads
    view = LiveView(1)
    with closing(make_session(config.cluster)) as session:
        run = lambda: AnswerEvaluation(stage_config, session, cluster, folder).run(0)  # noqa: E731
        result = Recovery(session, RecoveryConfig(), view.note).repeat("evaluation", run, session.clear)
    names = ("data", "generation", "tool", "agent", "reward", "eval")
    sections = {name: asdict(getattr(config, name)) for name in names}
    content = result.summary() | {"checkpoint": config.checkpoint, **sections, "versions": library_versions()}
    folder.write_json("eval_info.json", content)
    source = config.data._target_ or ", ".join(config.data.files.values()) or config.data.level
    print(f"{source}: greedy {result}\n{result.table()}written to {folder.path / 'eval_info.json'} and samples.md")
    return folder.read_json("eval_info.json")
