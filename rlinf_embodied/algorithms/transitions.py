"""Transitions as named columns: what the env stage gives, the replay buffer keeps and an algorithm reads.

    state           float32 [M, P]            proprioception that the policy saw
    action          float32 [M, A]            what was done, in [-1, 1]
    reward          float32 [M]               of the step
    next_state      float32 [M, P]            proprioception after the step, before any reset
    terminated      float32 [M]               1 where the task ended the episode; 0 where it continues, or time was up
    expert_action   float32 [M, A]            what the scripted expert would have done
    images          uint8 [M, K, S, S, 3]     what K cameras showed (of envs with cameras)
    instruction     uint8 [M, 256]            UTF-8, filled up with zeros (of envs with cameras)

M transitions of a block are in the order of steps, then rows.  An algorithm names the columns that it needs, and gets
those of all U updates of an iteration, [U, R, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import Learner, Step

Columns = dict[str, Tensor]  # all of the same length M

STATE, ACTION, REWARD, NEXT_STATE, TERMINATED = "state", "action", "reward", "next_state", "terminated"
EXPERT_ACTION, IMAGES, INSTRUCTION = "expert_action", "images", "instruction"
SEEN = (IMAGES, INSTRUCTION)  # what a policy that sees needs in addition
_TEXT = 256  # bytes


def length(columns: Columns) -> int:
    """Returns M."""
    return len(next(iter(columns.values())))


def text_column(texts: Sequence[str]) -> Tensor:
    """Returns instructions as bytes, uint8 [M, 256]; longer ones are cut off."""
    rows = [list(text.encode()[:_TEXT]) for text in texts]
    return torch.tensor([row + [0] * (_TEXT - len(row)) for row in rows], dtype=torch.uint8)


def observation_of(columns: Columns) -> Observation:
    """Returns what the policy saw, from the columns of a batch."""
    states = columns[STATE]
    if INSTRUCTION not in columns:
        return Observation(states, ("",) * len(states))
    texts = tuple(bytes(row).rstrip(b"\0").decode(errors="ignore") for row in columns[INSTRUCTION].cpu().tolist())
    return Observation(states, texts, columns[IMAGES])


def each_update(data: Mapping[int, Columns]) -> Iterator[dict[int, Columns]]:
    """Yields the batch of each update by block, from columns [U, R, ...]."""
    for k in range(length(next(iter(data.values())))):
        yield {block: {name: column[k] for name, column in columns.items()} for block, columns in data.items()}


def step_on(learner: Learner, batch: Mapping[int, Columns], sums: Callable[..., LossSums], *arguments: object) -> Step:
    """Makes a step on a batch, one pass per block: sums(columns, *arguments)."""
    rows = {block: torch.arange(length(columns)) for block, columns in batch.items()}
    return learner.step(rows, lambda b, r: [Pass(float(len(r)), partial(sums, batch[b], *arguments))])
