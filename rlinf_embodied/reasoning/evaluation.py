"""Evaluation on held-out problems.

greedy    one answer per problem at temperature 0: accuracy with Wilson's interval
sampled   n answers per problem at the training's temperature: pass@k, unbiased (Chen et al. 2021, arXiv 2107.03374)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EvaluateAnswersConfig, MathConfig, RecoveryConfig
from rlinf_embodied.data.problems import Split
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.reasoning.batch import GenerationBlock, GenerationReport, Sample, ScoredGroup, in_order
from rlinf_embodied.reasoning.generation import Decoding
from rlinf_embodied.reasoning.generation_stage import LanguageStage, generation_report
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.prompt_stage import Prompts
from rlinf_embodied.reasoning.reward_stage import Verifier, reward_function, scored
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import Session, find_cluster, make_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.metrics import Rate
from rlinf_embodied.telemetry.run_folder import RunFolder, library_versions
from rlinf_embodied.telemetry.tables import markdown_table
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.workflow.graph import StageSpec, Workflow

STAGE = "answers"


def held_out(made: StageConfig) -> tuple[Prompts, int]:
    """Returns the held-out problems, and how many are asked."""
    problems, most = Prompts.of(made.config, made.folder, Split.test), made.config.eval.num_problems
    size = problems.size()
    return problems, most if size is None else min(size, most)


class AnswerStage(LanguageStage):
    """Answers held-out problems and scores the answers.

    It holds the weights on the device only while it does, so that training's switches free the memory.
    """

    _user = STAGE

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        self._problems, self._number = held_out(self._made)
        self._reward = replace(self._config.reward, format_reward=0.0, overlong_tokens=0)  # the answer alone counts
        self._verifier = Verifier(PromptTemplate.of(self._config.data), self._reward)
        self._shared.leave(self._user)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Answers the problems of its blocks, sampled if the message says so; reports (GenerationReport, groups)."""
        sampled, made, groups = bool(step_context.message), [], list[ScoredGroup]()
        config, per_block = self._config, self._config.eval.problems_per_block
        longest = config.generation.max_new_tokens
        self._shared.enter(self._user)
        try:
            for block in sorted(inputs):
                first = block * per_block
                asked = self._problems.batch(first, min(per_block, self._number - first))
                rows = GenerationBlock(
                    prompts=tuple(prompt for _, prompt in asked),
                    group_size=config.eval.num_samples if sampled else 1,
                    sampling=config.generation,
                    seed=config.run.seed,
                    iteration=0,
                    purpose="evaluation",
                    greedy=not sampled,
                )
                answers = Decoding(self._shared.policy, rows).run()
                made.append(self._completions([problem for problem, _ in asked], answers))
                _, found = scored(self._verifier, self._reward, longest, block, made[-1])
                for group, (problem, _), text in zip(found, asked, made[-1].texts, strict=False):
                    shown = not sampled and first + group.index < config.eval.num_shown
                    sample = Sample(problem.question, problem.answer, text, group.correct[0])
                    groups.append(replace(group, shown=sample) if shown else group)
        finally:
            self._shared.leave(self._user)
        return Output(dict.fromkeys(inputs), (generation_report(made, {}), groups))


# -------------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class AnswerResult:
    """What an evaluation found."""

    accuracy: Rate  # of greedy answers
    length: float  # mean tokens of a greedy answer
    truncated: float  # share of greedy answers that were cut off
    reward: float | None  # mean value of reward._target_ over greedy answers; None: it is not used
    sampled: dict[str, Any]  # see `sampled_result`; empty where nothing was sampled
    shown: tuple[Sample, ...]
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def score(self) -> float:
        return self.accuracy.value

    def summary(self) -> dict[str, object]:
        found: dict[str, object] = {**self.accuracy.summary("accuracy"), "num_problems": self.accuracy.number}
        found |= {"length": self.length, "truncated": self.truncated}
        return found | ({} if self.reward is None else {"reward": self.reward}) | self.sampled

    def metrics(self) -> dict[str, float]:
        rewards = {} if self.reward is None else {"eval/reward": self.reward}
        return {"eval/accuracy": self.accuracy.value, "eval/length": self.length, **rewards}

    def __str__(self) -> str:
        """Returns, for example, "63.0 % [60.0, 66.0] of 1000 problems, pass@1 58.2 %, pass@8 81.0 %"."""
        text = f"{self.accuracy} of {self.accuracy.number} problems"
        if self.reward is not None:
            text += f", reward {self.reward:.3f}"
        for k in (1, self.sampled["num_samples"]) if self.sampled else ():
            text += f", pass@{k} {100 * self.sampled[f'pass@{k}']:.1f} %"
        return text

    def table(self) -> str:
        """Returns sample answers as a Markdown table."""
        cell = lambda text: f"`{text}`".replace("\n", "<br>")  # noqa: E731
        rows = [[*map(cell, (a.prompt, a.answer, a.completion)), "yes" if a.correct else "no"] for a in self.shown]
        return markdown_table(["problem", "answer", "completion", "right"], rows) + "\n"


def sampled_result(correct: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Returns num_samples, and pass@k for k = 1, 2, 4, ... and that number, from [N][n] scored answers.

    pass@k is the share of problems that one of k answers solves.
    """
    size = len(correct[0])
    found: dict[str, float] = {"num_samples": size}
    for k in sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k < size} | {size}):
        missed = [math.comb(size - sum(row), k) / math.comb(size, k) for row in correct]
        found[f"pass@{k}"] = 1.0 - sum(missed) / len(missed)
    return found


class AnswerEvaluation:
    """The evaluation workflow on all devices of a session."""

    stage = STAGE

    def __init__(
        self, made: StageConfig, session: Session, cluster: Cluster, last_step: int, folder: RunFolder | None = None
    ) -> None:
        """Builds the stage; samples are drawn at the steps 0 and `last_step` only, answers shown in the folder."""
        self._config, self._last_step, self._folder = made.config, last_step, folder
        blocks = -(-held_out(made)[1] // made.config.eval.problems_per_block)
        workflow = Workflow("evaluation", blocks, {STAGE: StageSpec(STAGE, f"{__name__}.AnswerStage", made)})
        self.executor = Executor.on_all_devices(workflow, session, cluster)

    def run(self, step: int, best: float | None = None) -> AnswerResult:
        """Answers every problem, whatever the best score so far."""
        result = self.executor.run(StepContext(step, message=False))
        reports = cast("list[tuple[GenerationReport, list[ScoredGroup]]]", result.all_of(STAGE, tuple))
        groups, sampled = in_order(found for _, found in reports), {}
        if self._config.eval.num_samples and step in (0, self._last_step):
            drawn = self.executor.run(StepContext(step, message=True)).all_of(STAGE, tuple)
            sampled = sampled_result([group.correct for group in in_order(found for _, found in drawn)])
        number, own_reward = len(groups), self._config.reward._target_ is not None
        found = AnswerResult(
            accuracy=Rate(sum(group.correct[0] for group in groups), number),
            length=sum(report.tokens for report, _ in reports) / number,
            truncated=sum(report.truncated for report, _ in reports) / number,
            reward=sum(group.reward for group in groups) / number if own_reward else None,
            sampled=sampled,
            shown=tuple(group.shown for group in groups if group.shown is not None),
            spans=tuple(result.spans),
        )
        if self._folder is not None:
            self._folder.write_text("samples.md", found.table())
        return found


# ---------------------------------------------------------------------------------------------------------- the command
def evaluate_command(config: EvaluateAnswersConfig) -> dict[str, Any]:
    """Evaluates what the config names; prints the result and returns it as written to eval_info.json.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: reward._target_ or data._target_ cannot be used.
    """
    reward_function(config.reward)
    problem_source(config.data, config.data.seed)
    folder = RunFolder(Path(config.run.dir or f"runs/evaluate-math-{time.strftime('%Y%m%d-%H%M%S')}"))
    cluster = find_cluster(config.cluster)
    checkpoint = str(Path(config.checkpoint).expanduser())
    made = StageConfig(cast(MathConfig, config), checkpoint)  # it has the sections that an evaluation reads
    view = LiveView(1)
    with closing(make_session(config.cluster)) as session:
        run = lambda: AnswerEvaluation(made, session, cluster, 0, folder).run(0)  # noqa: E731
        result = Recovery(session, RecoveryConfig(), view.note).repeat("evaluation", run, session.clear)
    sections = {name: asdict(getattr(config, name)) for name in ("data", "generation", "reward", "eval")}
    content = result.summary() | {"checkpoint": config.checkpoint, **sections, "versions": library_versions()}
    folder.write_json("eval_info.json", content)
    source = config.data._target_ or ", ".join(config.data.files.values()) or config.data.level
    print(f"{source}: greedy {result}\n{result.table()}written to {folder.path / 'eval_info.json'} and samples.md")
    return folder.read_json("eval_info.json")
