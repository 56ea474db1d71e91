"""The work that every arm does: problems, hyperparameters, the model to start from, how it is scored.

The tokenizer pads with its end token.  Ours excludes a separate padding token from the distribution, TRL does not;
with this tokenizer nothing is excluded on either side, and both sample from the same distribution.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from policies.causal_lm import CausalLM
from policies.text_codec import EOS
from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import LanguagePolicyConfig
from rlinf_embodied.config.reasoning import GenerationConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.reasoning.batch import GenerationBlock, Prompt, Rewards
from rlinf_embodied.reasoning.engine import Generated, generate
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.reasoning.reward_stage import Verifier
from rlinf_embodied.training.trainer import Trainer

FORM = PromptTemplate("compact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step consists of: the same for ours, TRL and the no-framework baseline."""

    start: str = "runs/bench_llm/start"  # folder of the model and tokenizer
    worked: float = 0.3  # share of chains of thought in the warm start; the rest are direct answers
    level: str = "sum4-6-9"
    seed: int = 0  # of sampling and of the training problems
    data_seed: int = 0  # of the test problems
    prompts: int = 32
    group: int = 8
    new_tokens: int = 52
    temperature: float = 1.0
    lr: float = 1e-4
    clip: float = 0.2
    max_grad_norm: float = 1.0
    steps: int = 40


def step_problems(work: Work, step: int) -> list[Problem]:
    """Returns the problems of a step, the same for every arm."""
    return GeneratedProblems(work.level, work.seed).batch(Split.train, step * work.prompts, work.prompts)


# ------------------------------------------------------------------------------------------------------------ the start
def make_start(work: Work, steps: int = 1600, examples: int = 20_000) -> None:
    """Writes the model that all arms start from, unless it is there: a supervised warm start.

    The small model that our trainer makes has a padding token of its own, which stays untrained; this one has none.
    """
    folder = Path(work.start)
    if (folder / "config.json").is_file():
        return
    shaped = CausalLM.from_config(LanguagePolicyConfig(), None, work.seed)
    shaped.codec.tokenizer.pad_token = EOS
    shaped.model.config.pad_token_id = shaped.codec.tokenizer.eos_token_id
    with tempfile.TemporaryDirectory() as aside:
        CausalLM(shaped.model, shaped.codec).save(Path(aside) / "new")
        words = [
            *("algorithm=sft", "policy=folder", f"policy.folder={aside}/new", f"run.dir={aside}/run"),
            *(f"run.seed={work.seed}", f"data.seed={work.data_seed}", f"data.level={work.level}"),
            *("algorithm.lr=3e-3", f"algorithm.steps={steps}", f"algorithm.num_examples={examples}"),
            *(f"algorithm.chain_of_thought_share={work.worked}", "eval.num_problems=1", "eval.num_samples=0"),
            *("run.exact=exact", "cluster=serial", "plan=collocated", "checkpoint.every=0"),
        ]
        Trainer(ReasoningJob(compose_math(words))).run()
        shutil.copytree(Path(aside) / "run/checkpoints/latest", folder)


# ---------------------------------------------------------------------------------------- generation and the verifier
def prompts_of(policy: CausalLM, problems: Sequence[Problem], samples: int) -> tuple[Prompt, ...]:
    encode = lambda problem: tuple(policy.codec.encode_chat(policy.codec.chat(FORM.prompt(problem))))  # noqa: E731
    prompts = [Prompt(problem.id, encode(problem)) for problem in problems]
    return tuple(replace(prompt, sample=sample) for prompt in prompts for sample in range(samples))


def generated(policy: CausalLM, problems: Sequence[Problem], work: Work, slots: int, index: int) -> list[Generated]:
    """Returns the completions of a step, `work.group` for each of its problems."""
    block = GenerationBlock(
        prompts=prompts_of(policy, problems, work.group),
        sampling=GenerationConfig(
            max_new_tokens=work.new_tokens, temperature=work.temperature or 1.0, max_num_seqs=slots
        ),
        greedy=work.temperature == 0,
        seed=work.seed,
        iteration=index,
    )
    return generate(ExactEngine(policy), block)


def scored(policy: CausalLM, verifier: Verifier, rows: Sequence[Generated], problems: Sequence[Problem]) -> Rewards:
    """Returns what each completion earned."""
    texts, ended = [policy.codec.decode(row.tokens) for row in rows], [row.ended for row in rows]
    size = len(rows) // len(problems)
    verified = verifier.verify(texts, [problem for problem in problems for _ in range(size)], ended)
    rewards, correct = (torch.from_numpy(a).reshape(-1, size) for a in (verified.raw, verified.correct))
    return Rewards(rewards, correct)


def greedy_accuracy(folder: Path, work: Work, count: int) -> float:
    """Returns the share of `count` test problems that the model in a folder solves greedily."""
    policy = CausalLM.from_config(LanguagePolicyConfig(), folder, 0)
    problems = GeneratedProblems(work.level, work.data_seed).batch(Split.test, 0, count)
    rows = generated(policy, problems, replace(work, group=1, temperature=0.0), 256, 0)
    with Verifier(FORM) as verifier:
        return float(scored(policy, verifier, rows, problems).raw.float().mean())


# --------------------------------------------------------------------------------------------------- what an arm leaves
@dataclass(frozen=True, slots=True)
class Step:
    """A step that has just ended."""

    tokens: int  # generated
    at: float = field(default_factory=time.perf_counter)  # seconds on a clock of this machine
    busy: float = field(default_factory=time.process_time)  # processor seconds of this process
