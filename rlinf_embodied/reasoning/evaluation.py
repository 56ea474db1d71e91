"""Evaluation on held-out problems.

greedy    one answer per problem at temperature 0: accuracy with Wilson's interval
sampled   n answers per problem at the training's temperature: pass@k, unbiased (Chen et al. 2021, arXiv 2107.03374)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EvaluateAnswersConfig, MathConfig, RecoveryConfig
from rlinf_embodied.data.problems import Split
from rlinf_embodied.data.prompt_templates import PROMPT_TEMPLATES
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.reasoning.batch import GenerationBlock, Noise, Sample, SamplingParams
from rlinf_embodied.reasoning.generation_stage import LanguageStage
from rlinf_embodied.reasoning.policy_folder import FILE, StageConfig, trained_on
from rlinf_embodied.reasoning.prompt_stage import Asked, Prompts
from rlinf_embodied.reasoning.reward_stage import Verifier, reward_function
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.session import Session, find_cluster, open_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.metrics import Z95, Rate
from rlinf_embodied.telemetry.run_folder import RunFolder, library_versions
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.workflow.graph import StageSpec, Workflow

STAGE = "answers"


def held_out(made: StageConfig) -> tuple[Prompts, int]:
    """Returns the held-out problems, and how many are asked."""
    problems, most = Prompts.of(made.config, made.folder, Split.test), made.config.eval.num_problems
    size = problems.size()
    return problems, most if size is None else min(size, most)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to a block of problems."""

    correct: tuple[tuple[bool, ...], ...]  # of each problem's answers
    earned: float  # sum over all of them
    tokens: int
    truncated: int
    shown: tuple[Sample, ...]


class AnswerStage(LanguageStage):
    """Answers held-out problems and scores the answers.

    It holds the weights on the device only while it does, so that training's switches free the memory.
    """

    _user = STAGE

    def setup(self, context: StageContext) -> None:
        """Loads the model, opens the problems, makes the verifier."""
        super().setup(context)
        self._problems, self._number = held_out(self._made)
        self._verifier = Verifier(PROMPT_TEMPLATES[self._config.data.prompt_template], self._config.reward)
        self._shared.leave(self._user)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Answers the problems of its blocks; the step_context's message says whether answers are sampled."""
        sampled = bool(step_context.message)
        self._shared.enter(self._user)
        try:
            return Output(dict.fromkeys(inputs), {block: self._run(sampled, block) for block in sorted(inputs)})
        finally:
            self._shared.leave(self._user)

    def _run(self, sampled: bool, block: int) -> Answers:
        per_block = self._config.eval.problems_per_block
        first = block * per_block
        asked = self._problems.batch(first, min(per_block, self._number - first))
        texts, lengths, ended = self._answers(asked, sampled)
        size = len(texts) // len(asked)
        every = [problem for problem, _ in asked for _ in range(size)]
        verified = self._verifier.verify(texts, every, ended)
        right = verified.correct
        limit = max(0, self._config.eval.num_shown - first) * size if not sampled else 0
        return Answers(
            tuple(tuple(row) for row in right.reshape(-1, size).tolist()),
            float(verified.raw.sum(dtype=np.float64)),
            sum(lengths),
            len(ended) - sum(ended),
            tuple(
                Sample(every[i].question, every[i].answer, texts[i], float(verified.raw[i]), float(right[i]))
                for i in range(0, min(len(texts), limit), size)
            ),
        )

    def _answers(self, asked: Sequence[Asked], sampled: bool) -> tuple[list[str], list[int], list[bool]]:
        """Returns texts, lengths in tokens, and whether each came to its end; problem by problem."""
        config = self._config.generation
        sampling = SamplingParams(config.max_new_tokens, config.temperature if sampled else 0.0)
        noise = Noise(self._config.run.seed, 0, "evaluation")
        prompts = tuple(prompt for _, prompt in asked)
        block = GenerationBlock(prompts, self._config.eval.num_samples if sampled else 1)
        texts, lengths, ended = [], [], []
        for group in self._generate(block, sampling, noise, self._config.eval.engine):
            lengths += group.lengths.tolist()
            texts += self._texts(group)
            ended += group.ended.tolist()
        return texts, lengths, ended


# -------------------------------------------------------------------------------------------------------------- results
@dataclass(frozen=True, slots=True)
class AnswerResult:
    """What an evaluation found."""

    accuracy: Rate  # of greedy answers
    num_asked: int  # eval.num_problems: more than there are for tests, where all of these were taken
    length: float  # mean tokens of a greedy answer
    truncated: float  # share of greedy answers that were cut off
    reward: float | None  # mean value of reward._target_ over greedy answers; None: it is not used
    sampled: dict[str, Any]  # see `sampled_result`; empty where nothing was sampled
    shown: tuple[Sample, ...]
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
        return found | self.sampled

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
        for k in (1, self.sampled["num_samples"]) if self.sampled else ():
            text += f", pass@{k} {100 * self.sampled[f'pass@{k}']:.1f} %"
        return text

    def table(self) -> str:
        """Returns sample answers as a Markdown table."""
        cell = lambda text: "`" + text.replace("|", "\\|").replace("\n", "<br>") + "`"  # noqa: E731
        rows = [
            f"| {cell(a.prompt)} | {cell(a.answer)} | {cell(a.completion)} | {'yes' if a.correct else 'no'} |"
            for a in self.shown
        ]
        return "\n".join(["| problem | answer | completion | right |", "|---|---|---|---|", *rows]) + "\n"


def sampled_result(correct: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Returns num_samples, and pass@k for k = 1, 2, 4, ... and that number, from [N][n] scored answers.

    pass@k is the share of problems that one of k answers solves; intervals are normal ones of 95 % over problems.
    """
    counts, size = np.array([sum(row) for row in correct]), len(correct[0])
    found: dict[str, Any] = {"num_samples": size}
    for k in sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k < size} | {size}):
        missed = np.array([math.comb(size - int(c), k) / math.comb(size, k) for c in counts])
        solved = 1.0 - missed
        half = Z95 * float(solved.std(ddof=1)) / math.sqrt(len(solved)) if len(solved) > 1 else 1.0
        mean = float(solved.mean())
        found |= {f"pass@{k}": mean, f"pass@{k}_interval": [max(0.0, mean - half), min(1.0, mean + half)]}
    return found


class AnswerEvaluation:
    """The evaluation workflow on all devices of a session."""

    stage = STAGE

    def __init__(self, made: StageConfig, session: Session, cluster: Cluster, last_step: int) -> None:
        """Builds the stage; samples are drawn at the steps 0 and `last_step` only."""
        self._config, self._last_step = made.config, last_step
        _, self._number = held_out(made)
        blocks = -(-self._number // made.config.eval.problems_per_block)
        workflow = Workflow("evaluation", blocks, {STAGE: StageSpec(STAGE, f"{__name__}.AnswerStage", made)})
        self.executor = Executor.on_all_devices(workflow, session, cluster)

    def run(self, step: int, best: float | None = None) -> AnswerResult:
        """Answers every problem, whatever the best score so far."""
        evaluation, number, sampled = self._config.eval, self._number, {}
        greedy, spans = self._answers(step, sampled=False)
        if evaluation.num_samples and step in (0, self._last_step):
            answers, _ = self._answers(step, sampled=True)
            sampled = sampled_result([row for block in answers for row in block.correct])
        return AnswerResult(
            accuracy=Rate(sum(row[0] for block in greedy for row in block.correct), number),
            num_asked=evaluation.num_problems,
            length=sum(block.tokens for block in greedy) / number,
            truncated=sum(block.truncated for block in greedy) / number,
            reward=sum(b.earned for b in greedy) / number if self._config.reward._target_ is not None else None,
            sampled=sampled,
            shown=tuple(answer for block in greedy for answer in block.shown),
            spans=tuple(spans),
        )

    def _answers(self, step: int, sampled: bool) -> tuple[list[Answers], list[Span]]:
        """Returns the answers block by block, and what was timed."""
        result, found = self.executor.run(StepContext(step, message=sampled)), dict[int, Answers]()
        for report in result.all_of(STAGE, dict):
            found |= report
        return [answers for _, answers in sorted(found.items())], list(result.spans)


# ---------------------------------------------------------------------------------------------------------- the command
def evaluate_command(config: EvaluateAnswersConfig) -> dict[str, Any]:
    """Evaluates what the config names; prints the result and returns it as written to eval_info.json.

    Raises:
        CheckpointError: the checkpoint is missing, foreign or damaged.
        ConfigError: reward._target_ or data._target_ cannot be used.
    """
    checkpoint = Path(config.checkpoint).expanduser()
    if (checkpoint / FILE).exists():  # one of this project's
        trained_on(checkpoint)
    reward_function(config.reward)
    problem_source(config.data, config.data.seed)
    folder = RunFolder(Path(config.run.dir or f"runs/evaluate-math-{time.strftime('%Y%m%d-%H%M%S')}"))
    cluster = find_cluster(config.cluster)
    made = StageConfig(cast(MathConfig, config), str(checkpoint))  # it has the sections that an evaluation reads
    view = LiveView(1)
    with open_session(config.cluster) as session:
        run = lambda: AnswerEvaluation(made, session, cluster, last_step=0).run(0)  # noqa: E731
        result = Recovery(session, RecoveryConfig(), view.note).repeat("evaluation", run, session.clear)
    sections = {name: asdict(getattr(config, name)) for name in ("data", "generation", "reward", "eval")}
    content = result.summary() | {"checkpoint": config.checkpoint, **sections, "versions": library_versions()}
    folder.write_json("eval_info.json", content)
    folder.write_text("samples.md", result.table())
    source = config.data._target_ or ", ".join(config.data.files.values()) or config.data.level
    print(f"{source}: greedy {result}")
    print(result.table(), end="")
    print(f"written to {folder.path / 'eval_info.json'} and samples.md")
    return folder.read_json("eval_info.json")
