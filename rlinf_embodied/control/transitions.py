"""Transitions as named columns: what the env stage tells, the replay buffer keeps and a learner reads.

    state           float32 [M, P]   what the policy saw
    action          float32 [M, A]   what was done, in [-1, 1]
    reward          float32 [M]      of the step
    next_state      float32 [M, P]   what was seen then, before any reset
    terminated      float32 [M]      1 where the task ended the episode; 0 where it goes on, or time was up

M transitions of a block are in the order of steps, then rows.  A workflow declares which columns it wants.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Columns = dict[str, Tensor]  # all of the same length M

STATE, ACTION, REWARD, NEXT_STATE, TERMINATED = "state", "action", "reward", "next_state", "terminated"
ALL = (STATE, ACTION, REWARD, NEXT_STATE, TERMINATED)


def length(columns: Columns) -> int:
    """Returns M."""
    return len(next(iter(columns.values())))


def joined(parts: Sequence[Columns]) -> Columns:
    """Returns the transitions of all parts, in order."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
