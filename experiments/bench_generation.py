"""Tokens per second of generation against transformers' own `generate`: same model, prompts and lengths, one process.

    OMP_NUM_THREADS=1 python experiments/bench_generation.py [--prompts 32] [--group 8] [--rounds 5] [--slots 256]

Runs alternate and are timed in CPU seconds, so that other programs on the machine disturb both alike.  `full` lets
every row run to its last token; `ends` stops rows at the end token, which an untrained model says once in 25 tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from transformers import GenerationConfig

from policies.causal_lm import CausalLM
from rlinf_embodied.config import TinyLMConfig
from rlinf_embodied.reasoning.batch import GenerationBlock, Noise, Prompt, Sampling
from rlinf_embodied.reasoning.generation import generate


def make_block(policy: CausalLM, num_prompts: int, group_size: int) -> GenerationBlock:
    """Returns sums of five to seven one-digit numbers."""
    rng = random.Random(0)

    def text() -> str:
        terms = [rng.choice("+-") + str(rng.randint(1, 9)) for _ in range(rng.randint(4, 6))]
        return f"{rng.randint(1, 9)}{''.join(terms)}="

    return GenerationBlock(tuple(Prompt(i, tuple(policy.encode(text()))) for i in range(num_prompts)), group_size)


def ours(policy: CausalLM, block: GenerationBlock, new_tokens: int, slots: int, iteration: int) -> int:
    groups = generate(policy, block, Sampling(new_tokens), Noise(0, iteration), num_slots=slots)
    return sum(int(group.lengths.sum()) for group in groups)


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


def median_rate(runs: dict[str, Callable[[int], int]], rounds: int) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(-1, rounds):  # the first one warms up
        for name, run in runs.items():
            start = time.process_time()
            count = run(round_)
            if round_ >= 0:
                rates[name].append(count / (time.process_time() - start))
    return {name: sorted(values)[len(values) // 2] for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 32), ("group", 8), ("new-tokens", 52), ("rounds", 5), ("slots", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = CausalLM.tiny(TinyLMConfig(), seed=0)
    block = make_block(policy, args.prompts, args.group)
    spec = policy.spec
    for case, ends in (("full", False), ("ends", True)):
        policy.spec = spec if ends else replace(spec, eos_ids=(spec.vocab_size,))  # a token that is never said
        rates = median_rate(
            {
                "ours": lambda i: ours(policy, block, args.new_tokens, args.slots, i),
                "transformers": lambda i, ends=ends: theirs(policy, block, args.new_tokens, ends),
            },
            args.rounds,
        )
        ratio = rates["ours"] / rates["transformers"]
        print(f"{case}: " + ", ".join(f"{k} {v:,.0f} tokens/s" for k, v in rates.items()) + f", ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
