"""Transitions as named columns: what the env stage gives, the replay buffer keeps and an algorithm reads.

    state           float32 [M, P]            state vectors that the policy saw, side by side
    action          float32 [M, A]            what was done, in [-1, 1]
    reward          float32 [M]               of the step
    next_state      float32 [M, P]            the same after the step, before any reset
    terminated      float32 [M]               1 where the task ended the episode; 0 where it continues, or time was up
    expert_action   float32 [M, A]            what the scripted expert would have done
    images.<camera> uint8 [M, H, W, 3]        what a camera showed
    instruction     uint8 [M, 256]            UTF-8, filled up with zeros (of envs with cameras)

M transitions of a block are in the order of steps, then rows.  An algorithm names the columns that it needs, and gets
those of all U updates of an iteration, [U, R, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import PROPRIO, Observation
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import Learner, Step

Columns = dict[str, Tensor]  # all of the same length M

STATE, ACTION, REWARD, NEXT_STATE, TERMINATED = "state", "action", "reward", "next_state", "terminated"
EXPERT_ACTION, IMAGES, INSTRUCTION = "expert_action", "images.", "instruction"
_TEXT = 256  # bytes


def length(columns: Columns) -> int:
    """Returns M."""
    return len(next(iter(columns.values())))


def text_column(texts: Sequence[str]) -> Tensor:
    """Returns instructions as bytes, uint8 [M, 256]; longer ones are cut off."""
    rows = [list(text.encode()[:_TEXT]) for text in texts]
    return torch.tensor([row + [0] * (_TEXT - len(row)) for row in rows], dtype=torch.uint8)


def seen_columns(cameras: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns that a policy with these cameras needs in addition to the state."""
    return (*(IMAGES + camera for camera in cameras), INSTRUCTION) if cameras else ()


def observation_of(columns: Columns) -> Observation:
    """Returns what the policy saw, from the columns of a batch; all state vectors are one."""
    states = columns[STATE]
    texts: tuple[str, ...] = ("",) * len(states)
    if INSTRUCTION in columns:
        rows = columns[INSTRUCTION].cpu().tolist()
        texts = tuple(bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows)
    images = {name.removeprefix(IMAGES): column for name, column in columns.items() if name.startswith(IMAGES)}
    return Observation({PROPRIO: states}, texts, images)


def each_update(data: Mapping[int, Columns]) -> Iterator[dict[int, Columns]]:
    """Yields the batch of each update by block, from columns [U, R, ...]."""
    for k in range(length(next(iter(data.values())))):
        yield {block: {name: column[k] for name, column in columns.items()} for block, columns in data.items()}


def step_on(learner: Learner, batch: Mapping[int, Columns], sums: Callable[..., LossSums], *arguments: object) -> Step:
    """Makes a step on a batch, one pass per block: sums(columns, *arguments)."""
    rows = {block: torch.arange(length(columns)) for block, columns in batch.items()}
    return learner.step(rows, lambda b, r: [Pass(float(len(r)), partial(sums, batch[b], *arguments))])
