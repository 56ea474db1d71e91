"""What travels from a learner to generation: the share of the bytes in float32 and bfloat16, update by update.

python -m experiments.bench.weight_sync folder=models/smollm2 [updates=20] [lr=1e-6] [part_mb=268]

prints the process's peak memory over its models while float32 weights are sent at once and in parts.  Then it makes
policy-gradient updates with Adam on sums, with advantages of +1 and -1, and sends the weights after each one
(learning/weights.py) to a copy in each precision, which must then have the bits of the learner's weights, rounded.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from rlinf_embodied.command_line import main
from rlinf_embodied.config import LanguagePolicyConfig
from rlinf_embodied.execution.executor import PART_BYTES
from rlinf_embodied.execution.meter import Meter
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.learning.weights import WeightsMessage, WeightsSender, export_weights, install_weights, state_bytes
from rlinf_embodied.reasoning.policy_folder import load_policy
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.tensor_wire import copied

AT = StepContext(0)
PRECISIONS = (torch.float32, torch.bfloat16)
ROWS = 4  # sums of an update


@dataclass(kw_only=True)
class Options:
    """The keys."""

    folder: str = ""
    updates: int = 20
    lr: float = 1e-6
    part_mb: float = PART_BYTES / 1e6


def send(source: nn.Module, target: nn.Module, parts: int) -> float:
    """Sends weights in parts; returns the peak memory of the process over that before, in bytes."""
    meter = Meter(None)
    meter.setup(solo_context((0,)))
    meter.reset(AT)
    before = meter.read(AT).used_bytes
    for part in range(parts):
        sent = copied(export_weights(source, 0, part=(part, parts)))  # as in a node's object store
        install_weights(target, cast(WeightsMessage, sent))
        del sent  # before the next part is copied
    return meter.peak(AT) - before


def measure(options: Options) -> None:
    make = lambda: load_policy(LanguagePolicyConfig(), options.folder, 0, "cpu").policy  # noqa: E731
    policy, draw = make(), torch.Generator().manual_seed(0)
    copies = [make().module.to(precision) for precision in PRECISIONS]
    senders = [WeightsSender(precision) for precision in PRECISIONS]
    whole = state_bytes(policy.module)
    for parts in (1, math.ceil(whole / 1e6 / options.part_mb)):
        shown = f"float32 weights of {whole / 1e6:.1f} MB in {parts} parts"
        print(f"{shown}: peak {send(policy.module, copies[0], parts) / 1e6:.1f} MB over the models", flush=True)
    adam = torch.optim.Adam(policy.parameters(), lr=options.lr, betas=(0.9, 0.99))
    for update in range(options.updates + 1):
        shown = []
        for sender, copy, precision in zip(senders, copies, PRECISIONS, strict=True):
            start = time.process_time()
            message = sender.export(policy.module, update, follows=update > 0)
            made = time.process_time()
            install_weights(copy, message)
            seconds = made - start, time.process_time() - made
            for name, tensor in policy.module.state_dict().items():
                assert torch.equal(tensor.to(precision), copy.state_dict()[name]), f"{name} differs after {update}"
            whole = sum(p.nbytes for p in copy.parameters())
            share = f"{message.nbytes / 1e6:7.1f} of {whole / 1e6:.1f} MB ({message.nbytes / whole:6.1%})"
            shown.append(f"{str(precision)[6:]} {share}, sent {seconds[0]:.2f}, installed {seconds[1]:.2f} CPU s")
        print(f"update {update:2d}  " + "   ".join(shown), flush=True)
        texts = [torch.randint(1, 10, (2,), generator=draw).tolist() for _ in range(ROWS)]
        prompts = [policy.codec.encode_chat(policy.codec.chat(f"What is {a} + {b}?")) for a, b in texts]
        answers = [policy.codec.encode_answer(f"{a} + {b} = {a + b}") for a, b in texts]
        batch = TokenBatch.of(prompts, answers)
        advantages = 1.0 - 2.0 * (torch.arange(ROWS) % 2)
        found = policy.log_probs(batch, 1.0, with_entropy=False).log_probs
        (-(advantages[:, None] * found).sum() / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adam.step()
        adam.zero_grad()


if __name__ == "__main__":
    main(measure, Options)
