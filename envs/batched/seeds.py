"""The seeds of N rows' episodes: given by the caller, or drawn by each row from a generator of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlinf_embodied.errors import SimulatorError

FIRST_SEED = 2022  # ManiSkill builds row i with seed 2022 + i, so a single env with this one
SEED_LIMIT = 2**32  # of NumPy's RandomState
DRAWN_LIMIT = 2**31  # of what ManiSkill draws

Seeds = int | Sequence[int] | np.ndarray


class RowSeeds:
    """One generator of seeds per row, so that a row's seeds do not depend on how often other rows are reset.

    The numbers are those of ManiSkill: one seed for all rows is spread as there, and a seed that is drawn is the one
    that a stock env with `enhanced_determinism` draws after a reset with the row's seed.
    """

    def __init__(self, num_rows: int) -> None:
        """Seeds the rows' generators with 2022, 2023, ... as ManiSkill does."""
        self._generators = [np.random.RandomState(FIRST_SEED + row) for row in range(num_rows)]

    def next(self, seed: Seeds | None, rows: Sequence[int]) -> np.ndarray:
        """Returns one seed per row of `rows`, int64.

        Args:
            seed: one per row of all N (those of rows that are not asked for are not used), one that all are derived
                from, or None: each row draws.  A given seed also seeds the row's generator.
            rows: row numbers.

        Raises:
            SimulatorError: neither one seed nor N, or one outside [0, 2**32).
        """
        if seed is None:
            return np.array([self._generators[row].randint(DRAWN_LIMIT) for row in rows], dtype=np.int64)
        given = spread(seed, len(self._generators))[list(rows)]
        for row, value in zip(rows, given.tolist(), strict=True):
            self._generators[row].seed(value)
        return given


def spread(seed: Seeds, num_rows: int) -> np.ndarray:
    """Returns N seeds, int64 [N], from N of them or from one.

    Raises:
        SimulatorError: neither one seed nor N, or one outside [0, 2**32).
    """
    seeds = np.atleast_1d(np.asarray(seed)).reshape(-1)
    if len(seeds) not in (1, num_rows):
        raise SimulatorError(
            f"reset got {len(seeds)} seeds for {num_rows} envs: give one seed, or one per env (with env_idx too, which "
            "says whose seeds are used)"
        )
    if seeds.dtype.kind not in "iu" or seeds.min() < 0 or seeds.max() >= SEED_LIMIT:
        raise SimulatorError(f"reset got seed {seed}: seeds are whole numbers from 0 to 2**32 - 1")
    if len(seeds) < num_rows:
        more = np.random.RandomState(int(seeds[0])).randint(DRAWN_LIMIT, size=num_rows - 1)
        seeds = np.concatenate([seeds, more])
    return seeds.astype(np.int64)
