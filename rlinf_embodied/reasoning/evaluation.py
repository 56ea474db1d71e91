"""Evaluation on held-out problems.

greedy    one answer per held-out problem at temperature 0: accuracy with Wilson's interval
sampled   n answers per held-out problem as in training: avg@n, maj@n, and pass@k, unbiased (Chen et al. 2021, arXiv
          2107.03374)
<name>    the same of each of eval.sets, with its own problems and sampling
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import stdev
from typing import Any, cast

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EvalSetConfig, EvaluateAnswersConfig, MathConfig, RecoveryConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Split
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.reasoning.agents import agent_of
from rlinf_embodied.reasoning.answers import majority_is_right
from rlinf_embodied.reasoning.batch import (
    Asked,
    Completions,
    GenerationBlock,
    GenerationReport,
    Sample,
    ScoredGroup,
    generation_report,
    in_order,
)
from rlinf_embodied.reasoning.custom_reward import reward_function
from rlinf_embodied.reasoning.episodes import episodes_of, run_episodes
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.generation_stage import LanguageStage
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.prompt_stage import Prompts
from rlinf_embodied.reasoning.reward_stage import Verifier, scored
from rlinf_embodied.reasoning.tool_calls import ToolCalls, tool_of
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import Session, find_cluster, make_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.metrics import Rate, percent
from rlinf_embodied.telemetry.run_folder import RunFolder, library_versions
from rlinf_embodied.telemetry.tables import markdown_table
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.workflow.graph import StageSpec, Workflow

STAGE = "answers"
_MOST_DRAWS = 20  # per held-out problem, until its question is a new one
GREEDY, SAMPLED = "greedy", "sampled"  # the ways in which the held-out problems are answered


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """Problems of an evaluation in blocks, and how they are answered."""

    name: str
    config: MathConfig  # the run's, with the sections data and generation of the set
    problems: Sequence[Asked]
    per_block: int
    num_samples: int  # per problem
    greedy: bool

    @property
    def num_blocks(self) -> int:
        return -(-len(self.problems) // self.per_block)

    def block(self, number: int) -> list[Asked]:
        """Returns the problems of a block; none behind the last one."""
        return list(self.problems[number * self.per_block :][: self.per_block])


def problem_sets(config: MathConfig, folder: str | None) -> dict[str, ProblemSet]:
    """Returns the held-out problems, greedily answered and sampled, and the sets of eval.sets.

    The latter are spread over as many blocks as the former at least.

    Raises:
        ConfigError: a set has an unknown key or a wrong value, or its problems cannot be had.
        DataError: a file cannot be used.
    """
    own, found = config.eval, dict[str, ProblemSet]()
    for name, given in {GREEDY: EvalSetConfig(greedy=True, num_problems=own.num_problems), **own.sets}.items():
        changed = copy.copy(config)  # not `replace`: no training has these sections
        for section in ("data", "generation"):
            before, values = getattr(config, section), getattr(given, section)
            known = [entry.name for entry in fields(before)]
            unknown = ", ".join(key for key in values if key not in known)
            path, action = f"eval.sets.{name}.{section}", f"use some of {', '.join(known)}"
            require(not unknown, path, values, f"{section} has no {unknown}", action)
            try:
                setattr(changed, section, replace(before, **values))
            except (ConfigError, TypeError) as error:
                raise ConfigError(f"eval.sets.{name}: {error}") from error
        problems = _distinct(Prompts.of(changed, folder, Split.test), given.num_problems)
        most = own.problems_per_block
        per_block = min(most, -(-len(problems) // found[GREEDY].num_blocks)) if found else most
        found[name] = ProblemSet(name, changed, problems, per_block, given.num_samples, given.greedy)
    if own.num_samples:
        found[SAMPLED] = replace(found[GREEDY], name=SAMPLED, num_samples=own.num_samples, greedy=False)
    return found


def _distinct(prompts: Prompts, number: int) -> list[Asked]:
    """Returns the first `number` distinct questions; a level with few of them has fewer.

    A question that counted twice would make intervals too narrow.
    """
    questions = dict[str, Asked]()
    for start in range(0, _MOST_DRAWS * number, number):
        drawn = prompts.batch(start, number)
        for asked in drawn:
            questions.setdefault(asked[0].key, asked)
        if len(questions) >= number or len(drawn) < number:
            break
    return list(questions.values())[:number]


class AnswerStage(LanguageStage):
    """Answers problems and scores the answers.

    It holds the weights on the device only while it does, so that training's switches free the memory.
    """

    _user = STAGE

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        self._sets = problem_sets(self._config, self._made.folder)
        self._reward = replace(self._config.reward, format_reward=0.0, overlong_tokens=0)  # the answer alone counts
        verifiers = {n: Verifier(PromptTemplate.of(s.config.data), self._reward) for n, s in self._sets.items()}
        self._verifiers = verifiers | {SAMPLED: verifiers[GREEDY]}  # it may start a process
        self._calls = ToolCalls.of(self._config.tool)
        self._shared.leave(self._user)

    def leave(self) -> None:
        if self._calls is not None:
            self._calls.close()

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Answers the problems of its blocks in the set that the message names; reports (GenerationReport, groups)."""
        asked = self._sets[cast(str, step_context.message)]
        made, groups = [], list[ScoredGroup]()
        self._shared.enter(self._user)
        try:
            for block in sorted(inputs):
                if problems := asked.block(block):
                    made.append(self._answers(asked, problems))
                    groups += self._scored(asked, block, made[-1])
        finally:
            self._shared.leave(self._user)
        return Output(dict.fromkeys(inputs), (generation_report(made, {}), groups) if made else None)

    def _answers(self, of: ProblemSet, asked: Sequence[Asked]) -> Completions:
        policy, size, config = self._shared.policy, of.num_samples, of.config
        purpose = "evaluation" if of.name in (GREEDY, SAMPLED) else f"evaluation/{of.name}"
        drawn = GenerationBlock((), size, config.generation, config.run.seed, 0, purpose, of.greedy)
        with closing(episodes_of(asked, size, config, policy.codec, self._calls)) as episodes:
            return run_episodes(ExactEngine(policy, self._shared.version), episodes, drawn)

    def _scored(self, of: ProblemSet, block: int, made: Completions) -> Iterator[ScoredGroup]:
        """Yields the groups of a block with their majorities; some of the greedy set with an answer to show."""
        verifier, size, first = self._verifiers[of.name], of.num_samples, block * of.per_block
        _, found = scored(verifier, self._reward, of.config.generation.max_new_tokens, block, made)
        ended, written = made.ended[made.last_rows()].tolist(), made.rows.completions()
        answers = [verifier.template.final_answer(t) if e else None for t, e in zip(made.texts, ended, strict=True)]
        for k, (group, problem) in enumerate(zip(found, made.problems, strict=True)):
            shown = None
            if of.name == GREEDY and first + k < self._config.eval.num_shown:
                rows = [row for row, sample in zip(written, made.samples, strict=True) if sample // size == k]
                text = "\n".join(map(self._shared.policy.codec.decode, rows))
                shown = Sample(problem.question, problem.answer, text, group.correct[0])
            right = majority_is_right(answers[k * size : (k + 1) * size], group.correct)
            yield replace(group, majority=right, shown=shown)


# -------------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class AnswerResult:
    """What an evaluation found."""

    accuracy: Rate  # of greedy answers
    length: float  # mean tokens of a greedy answer
    truncated: float  # share of greedy answers that were cut off
    reward: float | None  # mean value of reward._target_ over greedy answers; None: it is not used
    sampled: dict[str, Any]  # see `sampled_result`; empty where nothing was sampled
    sets: dict[str, dict[str, Any]]  # of eval.sets, by name: as `sampled`
    shown: tuple[Sample, ...]
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def score(self) -> float:
        return self.accuracy.value

    def summary(self) -> dict[str, object]:
        found: dict[str, object] = {**self.accuracy.summary("accuracy"), "num_problems": self.accuracy.number}
        found |= {"length": self.length, "truncated": self.truncated}
        found |= {} if self.reward is None else {"reward": self.reward}
        return found | self.sampled | ({"sets": self.sets} if self.sets else {})

    def metrics(self) -> dict[str, float]:
        rewards = {} if self.reward is None else {"eval/reward": self.reward}
        found = {"eval/accuracy": self.accuracy.value, "eval/length": self.length, **rewards}
        for name, of_set in self.sets.items():
            found |= {f"eval/{name}/{key}": value for key, value in of_set.items() if isinstance(value, float)}
        return found

    def __str__(self) -> str:
        """Returns, for example, "63.0 % [60.0, 66.0] of 1000 problems, pass@1 58.2 %, pass@8 81.0 %"."""
        text = f"{self.accuracy} of {self.accuracy.number} problems"
        if self.reward is not None:
            text += f", reward {self.reward:.3f}"
        for k in (1, self.sampled["num_samples"]) if self.sampled else ():
            text += f", pass@{k} {100 * self.sampled[f'pass@{k}']:.1f} %"
        for name, of_set in self.sets.items():
            n = of_set["num_samples"]
            text += f"; {name}: avg@{n} {percent(of_set, f'avg@{n}')} of {of_set['num_problems']} problems"
            text += f", maj@{n} {100 * of_set[f'maj@{n}']:.1f} %, pass@{n} {100 * of_set[f'pass@{n}']:.1f} %"
        return text

    def table(self) -> str:
        """Returns sample answers as a Markdown table."""
        cell = lambda text: f"`{text}`".replace("\n", "<br>")  # noqa: E731
        rows = [[*map(cell, (a.prompt, a.answer, a.completion)), "yes" if a.correct else "no"] for a in self.shown]
        return markdown_table(["problem", "answer", "completion", "right"], rows) + "\n"


def sampled_result(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Returns num_samples (n), avg@n with its 95 % interval, maj@n, and pass@k for k = 1, 2, 4, ... and n.

    avg@n is the mean share of right answers (interval: normal, over problems), maj@n the share of problems whose most
    frequent answer is right, and pass@k that of problems which one of k answers solves.
    """
    correct = [group.correct for group in groups]
    size, number, shares = len(correct[0]), len(correct), [sum(row) / len(row) for row in correct]
    mean, half = sum(shares) / number, 1.96 * stdev(shares) / math.sqrt(number) if number > 1 else 0.0
    found: dict[str, Any] = {"num_samples": size, f"avg@{size}": mean}
    found[f"avg@{size}_interval"] = [max(0.0, mean - half), min(1.0, mean + half)]
    found[f"maj@{size}"] = sum(bool(group.majority) for group in groups) / number
    for k in sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k < size} | {size}):
        missed = [math.comb(size - sum(row), k) / math.comb(size, k) for row in correct]
        found[f"pass@{k}"] = 1.0 - sum(missed) / number
    return found


class AnswerEvaluation:
    """The evaluation workflow on all devices of a session."""

    stage = STAGE

    def __init__(
        self, made: StageConfig, session: Session, cluster: Cluster, last_step: int, folder: RunFolder | None = None
    ) -> None:
        """Builds the stage; held-out problems are sampled at the steps 0 and `last_step` only."""
        self._config, self._last_step, self._folder = made.config, last_step, folder
        blocks = max(asked.num_blocks for asked in problem_sets(made.config, made.folder).values())
        workflow = Workflow("evaluation", blocks, {STAGE: StageSpec(STAGE, f"{__name__}.AnswerStage", made)})
        self.executor = Executor.on_all_devices(workflow, session, cluster)

    def run(self, step: int, best: float | None = None) -> AnswerResult:
        """Answers every problem, whatever the best score so far."""
        result, reports, groups = self._answered(step, GREEDY)
        sampled = {}
        if self._config.eval.num_samples and step in (0, self._last_step):
            sampled = sampled_result(self._answered(step, SAMPLED)[2])
        number, own_reward = len(groups), self._config.reward._target_ is not None
        found = AnswerResult(
            accuracy=Rate(sum(group.correct[0] for group in groups), number),
            **_of_lengths(reports),
            reward=sum(group.reward for group in groups) / number if own_reward else None,
            sampled=sampled,
            sets={name: self._of_set(step, name) for name in self._config.eval.sets},
            shown=tuple(group.shown for group in groups if group.shown is not None),
            spans=tuple(result.spans),
        )
        if self._folder is not None:
            self._folder.write_text("samples.md", found.table())
        return found

    def _answered(self, step: int, name: str) -> tuple[IterationResult, list[GenerationReport], list[ScoredGroup]]:
        result = self.executor.run(StepContext(step, message=name))
        found = cast("list[tuple[GenerationReport, list[ScoredGroup]]]", result.all_of(STAGE, tuple))
        return result, [report for report, _ in found], in_order(groups for _, groups in found)

    def _of_set(self, step: int, name: str) -> dict[str, Any]:
        _, reports, groups = self._answered(step, name)
        return {"num_problems": len(groups)} | sampled_result(groups) | _of_lengths(reports)


def _of_lengths(reports: Sequence[GenerationReport]) -> dict[str, float]:
    """Returns the mean tokens of an answer, and the share of answers that were cut off."""
    number = sum(report.completions for report in reports)
    tokens, truncated = (sum(getattr(report, name) for report in reports) for name in ("tokens", "truncated"))
    return {"length": tokens / number, "truncated": truncated / number}


# ---------------------------------------------------------------------------------------------------------- the command
def evaluate_command(config: EvaluateAnswersConfig) -> dict[str, Any]:
    """Evaluates what the config names; prints the result and returns it as written to eval_info.json.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: a _target_ cannot be used.
    """
    reward_function(config.reward)
    tool_of(config.tool)
    agent_of(config.agent)
    problem_source(config.data, config.data.seed)
    folder = RunFolder(Path(config.run.dir or f"runs/evaluate-math-{time.strftime('%Y%m%d-%H%M%S')}"))
    cluster = find_cluster(config.cluster)
    checkpoint = str(Path(config.checkpoint).expanduser())
    made = StageConfig(cast(MathConfig, config), checkpoint)  # it has the sections that an evaluation reads
    view = LiveView(1)
    with closing(make_session(config.cluster)) as session:
        run = lambda: AnswerEvaluation(made, session, cluster, 0, folder).run(0)  # noqa: E731
        result = Recovery(session, RecoveryConfig(), view.note).repeat("evaluation", run, session.clear)
    names = ("data", "generation", "tool", "agent", "reward", "eval")
    sections = {name: asdict(getattr(config, name)) for name in names}
    content = result.summary() | {"checkpoint": config.checkpoint, **sections, "versions": library_versions()}
    folder.write_json("eval_info.json", content)
    source = config.data._target_ or ", ".join(config.data.files.values()) or config.data.level
    print(f"{source}: greedy {result}\n{result.table()}written to {folder.path / 'eval_info.json'} and samples.md")
    return folder.read_json("eval_info.json")
