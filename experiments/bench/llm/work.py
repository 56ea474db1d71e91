"""The work that every arm does: problems, hyperparameters, the model to start from, how it is scored.

The tokenizer pads with its end token.  Ours excludes a separate padding token from the distribution, TRL does not;
with this tokenizer nothing is excluded on either side, and both sample from the same distribution.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from policies.causal_lm import CausalLM
from policies.text_codec import EOS
from rlinf_embodied.algorithms.log_probs import token_log_probs
from rlinf_embodied.config import TinyLMConfig
from rlinf_embodied.config.reasoning import GenerationConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import CompactTemplate
from rlinf_embodied.randomness import permutation, uniform
from rlinf_embodied.reasoning.batch import GenerationBlock, Group, Prompt, Rewards, Sequences, dynamic_batches
from rlinf_embodied.reasoning.fine_tuning import cosine_with_warmup
from rlinf_embodied.reasoning.generation import Decoding
from rlinf_embodied.reasoning.reward_stage import Verifier

FORM = CompactTemplate()


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

    def arguments(self) -> list[str]:
        """Returns the `key=value` arguments that make an equal object."""
        return [f"{field.name}={getattr(self, field.name)}" for field in fields(Work)]

    @classmethod
    def of(cls, work: Work, **own: object) -> Self:
        """Returns settings of this work with further values."""
        return cls(**{field.name: getattr(work, field.name) for field in fields(Work)}, **own)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSettings(Work):
    """The arguments of an arm."""

    steps: int = 20
    out: str = ""


def step_problems(work: Work, step: int) -> list[Problem]:
    """Returns the problems of a step, the same for every arm."""
    return GeneratedProblems(work.level, work.seed).batch(Split.train, step * work.prompts, work.prompts)


# ------------------------------------------------------------------------------------------------------------ the start
def make_start(work: Work, steps: int = 1600, batch: int = 32, examples: int = 20_000) -> None:
    """Writes the model that all arms start from, unless it is there: a supervised warm start.

    AdamW at 3e-3, 20 steps up and a cosine down to a tenth; the loss is that of the completions' tokens.
    The trainer's own warm start would not do: it leaves a padding token out of the distribution, and so untrained.
    """
    folder = Path(work.start)
    if (folder / "config.json").is_file():
        return
    torch.set_num_threads(1)
    shaped = CausalLM.tiny(TinyLMConfig(), seed=work.seed)
    shaped.tokenizer.pad_token = EOS
    shaped.model.config.pad_token_id = shaped.tokenizer.eos_token_id
    policy = CausalLM(shaped.model, shaped.tokenizer)
    pairs = _pairs(policy, work, examples)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        epoch, place = divmod(step * batch, examples // batch * batch)
        rows = permutation(work.seed, "bench start", epoch, size=examples)[place : place + batch]
        for settings in optimizer.param_groups:
            settings["lr"] = cosine_with_warmup(step, steps, 3e-3)
        optimizer.zero_grad()
        _supervised_loss(policy, [pairs[row] for row in rows])
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    policy.save(partial)
    partial.rename(folder)


def _pairs(policy: CausalLM, work: Work, examples: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    problems = GeneratedProblems(work.level, work.data_seed + 1).batch(Split.train, 0, examples)
    show = uniform(work.seed, "bench worked", np.arange(examples)) < work.worked
    return [
        (tuple(policy.encode(FORM.prompt(problem))), tuple(policy.encode_completion(FORM.completion(problem, bool(w)))))
        for problem, w in zip(problems, show, strict=True)
    ]


def _supervised_loss(policy: CausalLM, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Adds the gradient of the mean of -log p over the completions' tokens."""
    sequences = Sequences(tuple(p for p, _ in pairs), tuple(c for _, c in pairs))
    count = sum(len(completion) for _, completion in pairs)
    for rows in dynamic_batches(sequences.lengths(), 600):  # direct answers apart from chains of thought
        batch = sequences.batch(rows, policy.spec.pad_id)
        logits = policy.module(input_ids=batch.tokens[:, :-1], use_cache=False).logits
        places = torch.arange(1, batch.tokens.shape[1])
        mask = (places >= batch.prompt_lengths[:, None]) & (places < batch.lengths[:, None])
        (-token_log_probs(logits, batch.tokens[:, 1:], 1.0)[mask].sum() / count).backward()


# ---------------------------------------------------------------------------------------- generation and the verifier
def generated(policy: CausalLM, problems: Sequence[Problem], work: Work, slots: int, index: int) -> list[Group]:
    """Returns the groups of a step, in the order of its problems."""
    prompts = tuple(Prompt(problem.id, tuple(policy.encode(FORM.prompt(problem)))) for problem in problems)
    block = GenerationBlock(
        prompts=prompts,
        group_size=work.group,
        sampling=GenerationConfig(
            max_new_tokens=work.new_tokens, temperature=work.temperature or 1.0, max_num_seqs=slots
        ),
        greedy=work.temperature == 0,
        seed=work.seed,
        iteration=index,
    )
    return list(Decoding(policy, block).run())


def scored(policy: CausalLM, verifier: Verifier, groups: Sequence[Group], problems: Sequence[Problem]) -> Rewards:
    """Returns what each completion earned."""
    texts = [policy.decode(row) for row in Sequences.of(groups).completions]
    size = len(texts) // len(groups)
    ended = torch.cat([group.ended for group in groups]).numpy()
    verified = verifier.verify(texts, [problem for problem in problems for _ in range(size)], ended)
    rewards, correct = (torch.from_numpy(a).reshape(len(groups), size) for a in (verified.rewards, verified.correct))
    return Rewards(rewards, correct)


def greedy_accuracy(folder: Path, work: Work, count: int) -> float:
    """Returns the share of `count` test problems that the model in a folder solves greedily."""
    torch.set_num_threads(1)
    policy = CausalLM.load(folder)
    problems = GeneratedProblems(work.level, work.data_seed).batch(Split.test, 0, count)
    groups = generated(policy, problems, replace(work, group=1, temperature=0.0), 256, 0)
    with Verifier(FORM) as verifier:
        return float(scored(policy, verifier, groups, problems).raw.float().mean())


# --------------------------------------------------------------------------------------------------- what an arm leaves
class StepLog:
    """Writes one line per step into <folder>/steps.jsonl: end of the step, tokens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "steps.jsonl").open("w", encoding="utf-8")

    def write(self, tokens: int) -> None:
        """Adds a step that ends now."""
        self._file.write(json.dumps({"at": time.perf_counter(), "tokens": tokens}) + "\n")
        self._file.flush()
