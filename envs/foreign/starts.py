"""How an episode of a foreign simulator begins.

Nothing but the standard library is imported: the processes that run the simulator import this too.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_TRAINING_SEED = 1 << 30  # of reset seeds; those of evaluation lie below


@dataclass(frozen=True, slots=True)
class Start:
    """How an episode begins, as Start(task=3, state=17, seed=9173)."""

    task: int  # its number among the tasks that the process knows
    state: int | None  # which of the initial states that a benchmark comes with; None: drawn from `seed`
    seed: int
