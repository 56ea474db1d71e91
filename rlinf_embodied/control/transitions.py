"""Transitions as named columns: what the env stage tells, the replay buffer keeps and a learner reads.

    state           float32 [M, P]   what the policy saw
    action          float32 [M, A]   what was done, in [-1, 1]
    reward          float32 [M]      of the step
    next_state      float32 [M, P]   what was seen then, before any reset
    terminated      float32 [M]      1 where the task ended the episode; 0 where it goes on, or time was up
    expert_action   float32 [M, A]   what the scripted expert would have done

M transitions of a block are in the order of steps, then rows.  A workflow declares which columns it wants.
"""

from __future__ import annotations

from torch import Tensor

Columns = dict[str, Tensor]  # all of the same length M

STATE, ACTION, REWARD, NEXT_STATE, TERMINATED = "state", "action", "reward", "next_state", "terminated"
EXPERT_ACTION = "expert_action"
ALL = (STATE, ACTION, REWARD, NEXT_STATE, TERMINATED)
LABELLED = (STATE, EXPERT_ACTION)  # of DAgger


def length(columns: Columns) -> int:
    """Returns M."""
    return len(next(iter(columns.values())))
