"""Tokens per second of generation against transformers' own `generate`: same model, prompts and lengths, one process.

    python -m experiments.bench.generation [prompts=32] [group=8] [new_tokens=52] [rounds=5] [slots=256] [out=<json>]

Runs alternate and are timed in CPU seconds, so that other programs on the machine disturb both alike.  `full` lets
every row run to its last token; `ends` stops rows at the end token, which an untrained model says once in 25 tokens.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import torch
from transformers import GenerationConfig

from experiments.bench.harness import Benchmark, Report, Run, Spread, alternate, ratios
from policies.causal_lm import CausalLM
from rlinf_embodied.config import TinyLMConfig
from rlinf_embodied.reasoning.batch import GenerationBlock, Noise, Prompt, SamplingParams
from rlinf_embodied.reasoning.generation import generate


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    prompts: int = 32
    group: int = 8
    new_tokens: int = 52
    rounds: int = 5
    slots: int = 256
    out: str = ""


def make_block(policy: CausalLM, num_prompts: int, group_size: int) -> GenerationBlock:
    """Returns sums of five to seven one-digit numbers."""
    rng = random.Random(0)

    def text() -> str:
        terms = [rng.choice("+-") + str(rng.randint(1, 9)) for _ in range(rng.randint(4, 6))]
        return f"{rng.randint(1, 9)}{''.join(terms)}="

    return GenerationBlock(tuple(Prompt(i, tuple(policy.encode(text()))) for i in range(num_prompts)), group_size)


@torch.no_grad()
def theirs(policy: CausalLM, block: GenerationBlock, new_tokens: int, ends: bool) -> int:
    """Returns the tokens that transformers generated, those behind an end token not counted."""
    longest = max(len(prompt.tokens) for prompt in block.prompts)
    padded = [[0] * (longest - len(prompt.tokens)) + list(prompt.tokens) for prompt in block.prompts]
    rows = torch.tensor(padded).repeat_interleave(block.group_size, 0)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        eos_token_id=1 if ends else None,
        bos_token_id=None,
    )
    run = cast(Callable[..., torch.Tensor], policy.model.generate)
    out = run(rows, attention_mask=(rows != 0).long(), generation_config=config)
    ended = (out[:, longest:] == 1).long() if ends else torch.zeros_like(out[:, longest:])
    return int((ended.cumsum(1) - ended == 0).sum())


def rates(policy: CausalLM, block: GenerationBlock, own: Options, ends: bool) -> dict[str, list[float]]:
    """Returns tokens per CPU second by round; the first round warms up."""
    numbers = count(-1)

    def ours() -> int:
        groups = generate(
            policy, block, SamplingParams(own.new_tokens), Noise(0, next(numbers)), max_num_seqs=own.slots
        )
        return sum(int(group.lengths.sum()) for group in groups)

    def rate(generated: Callable[[], int]) -> float:
        start = time.process_time()
        return generated() / (time.process_time() - start)

    arms = {
        "ours": lambda: rate(ours),
        "transformers": lambda: rate(lambda: theirs(policy, block, own.new_tokens, ends)),
    }
    return alternate(arms, own.rounds, warm_up=1, quiet=True)


def measure(run: Run[Options]) -> Report:
    """Measures both cases."""
    policy, content, lines = CausalLM.tiny(TinyLMConfig(), seed=0), {}, []
    block, spec = make_block(policy, run.options.prompts, run.options.group), policy.spec
    for case, ends in (("full", False), ("ends", True)):
        policy.spec = spec if ends else replace(spec, eos_ids=(spec.vocab_size,))  # a token that is never said
        found = rates(policy, block, run.options, ends)
        ratio, spreads = ratios(found["ours"], found["transformers"]), {k: Spread.of(v) for k, v in found.items()}
        said = ", ".join(f"{name} {spread.median:,.0f} tokens/s" for name, spread in spreads.items())
        lines.append(f"{case}: {said}, ratio {ratio:.2f}")
        content[case] = {"tokens_per_cpu_s": spreads, "ratio": ratio}
    return Report(content=content, text="\n".join(lines))


BENCHMARK = Benchmark("generation", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
