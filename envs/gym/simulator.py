"""N rows, each a Gymnasium env, stepped one after the other or by several threads.

Rows over processes are a plan's affair: every worker has rows of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
from torch import Tensor

from envs.gym.options import GymnasiumOptions
from envs.gym.row import FILM_SIZE, Row
from envs.gym.rows import GymnasiumRows
from envs.gym.spaces import taken_as_numbers
from rlinf_embodied.config import EnvConfig

_LOG = logging.getLogger(__name__)


class GymnasiumSimulator(GymnasiumRows):
    """Rows of one Gymnasium id, in this process."""

    def __init__(self, config: EnvConfig, options: GymnasiumOptions, num_rows: int) -> None:
        """Makes the rows, resets each once, and steps one of them to see what `info` tells.

        Raises:
            SimulatorError: the id is unknown, its packages are missing, or its spaces cannot be used.
        """
        self.num_rows = num_rows
        size = config.obs_size if config.cameras else FILM_SIZE
        self._rows = [Row(config.task, options.make, size) for _ in range(num_rows)]
        first = self._rows[0]
        first.require_images(config.cameras)
        if (box := taken_as_numbers(first.env.observation_space)) is not None:
            _LOG.warning(
                "%s shows a Box of %s %s, which is taken as a state of so many numbers: give it the dtype uint8 and "
                "values from 0 to 255 if it is an image",
                config.task,
                box.dtype,
                list(box.shape),
            )
        super().__init__(config, first.draws)
        self.action_dim, self.categorical = first.action.dim, first.action.categorical
        self.backend = f"gymnasium {gymnasium.__version__}"
        self.history_free = first.history_free if options.history_free is None else options.history_free
        self._pool = ThreadPoolExecutor(options.threads) if options.threads > 1 else None
        self._shares = [range(part, num_rows, options.threads) for part in range(min(options.threads, num_rows))]
        self.has_success = first.tells_success() if options.success is None else options.success
        for row in self._rows:
            row.minds_success = options.success is None and not self.has_success

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Starts an episode in each of these rows."""
        seed_of = dict(zip(rows, seeds, strict=True))
        self._each(list(rows), lambda row: self._rows[row].reset(int(seed_of[row])))

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one step of these rows; a Discrete action is the largest of its entries."""
        values = actions.numpy()
        self._each(rows, lambda row: self._rows[row].step(values[row]))

    def tell(self) -> dict[str, np.ndarray]:
        """Returns what all rows tell."""
        told = [row.told() for row in self._rows]
        return {name: np.array([one[name] for one in told]) for name in told[0]}

    def look(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Returns what the policy sees of each of these rows."""
        return [self._rows[row].image() for row in rows]

    def render(self, rows: Sequence[int], size: int) -> list[np.ndarray]:
        """Returns what each of these rows draws."""
        return [self._rows[row].rendered() for row in rows]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for row in self._rows:
            row.env.close()

    def _each(self, rows: Sequence[int], run: Callable[[int], None]) -> None:
        if self._pool is None:
            for row in rows:
                run(row)
            return
        wanted = set(rows)
        share = lambda part: [run(row) for row in part if row in wanted]  # noqa: E731
        list(self._pool.map(share, self._shares))
