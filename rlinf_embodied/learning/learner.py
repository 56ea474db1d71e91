"""Who makes optimizer steps: a learner takes blocks' rows and makes one step of the loss's mean over all workers.

    ReplicatedLearner (here)       every worker holds all weights; sums of gradients over blocks, along one fixed tree
    ShardedLearner (sharded.py)    every worker holds a slice of weights and moments; torch's FSDP2

All workers of a group make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from rlinf_embodied.learning.optimizer import FlatOptimizer
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import LossSums, block_sums, split_sums, step_from


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Adam's constants, as AdamSettings(1e-4, (0.9, 0.99), 1.0)."""

    lr: float
    betas: tuple[float, float]
    max_grad_norm: float


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass that is still to be made, with what it will add to the loss's denominator."""

    weight: float
    run: Callable[[], LossSums]


Passes = Callable[[int, Tensor], Sequence[Pass]]  # (block, row indices [R]) -> passes over parts of these rows
Veto = Callable[[Tensor, float], bool]  # (statistics [S], weight): whether the step is left out


class Learner(Protocol):
    """A policy's optimizer over all workers; `lr` may be set at any time and counts from the next step on."""

    lr: float

    def start(self) -> None:
        """Begins an iteration: forgets what one that failed has left."""
        ...

    def add(self, block: int, rows: Tensor, passes: Passes) -> None:
        """Takes note of a block of the next step as soon as it is there; a learner may compute its part right now."""
        ...

    def step(self, rows: Mapping[int, Tensor], passes: Passes, veto: Veto | None = None) -> tuple[Tensor, float | None]:
        """Makes one step over rows of the worker's own blocks, unless `veto` or an empty minibatch forbids it.

        Returns:
            (statistics [S], summed over all blocks of all workers; norm of the gradient before clipping, None where no
            step was made).

        Raises:
            ObjectiveError: the gradient is NaN or infinite; nothing was changed.
        """
        ...

    def publish(self) -> None:
        """Lets the weights that other stages read be those of now."""
        ...

    def adopt(self) -> None:
        """Goes on from the weights that other stages read."""
        ...

    def move_state(self, device: str) -> None:
        """Moves what only the learner holds to a device."""
        ...

    def export_state(self) -> dict[str, Tensor]:
        """Returns a copy of the optimizer's state as FlatOptimizer writes it; workers but the first may return {}."""
        ...

    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `export_state` returned, of either learner and any number of workers.

        Raises:
            CheckpointError: the state is missing or that of other parameters; nothing was changed.
        """
        ...


class ReplicatedLearner:
    """All weights in every worker, which makes the same step as all others; other stages read the very same weights."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], settings: AdamSettings, num_statistics: int, reducer: Reducer
    ) -> None:
        """Starts with moments of zero.

        Raises:
            ObjectiveError: see FlatOptimizer.
        """
        self._optimizer = FlatOptimizer(
            parameters, settings.lr, betas=settings.betas, max_grad_norm=settings.max_grad_norm
        )
        self.lr = settings.lr
        self._num_statistics, self._reducer = num_statistics, reducer
        self._ready: dict[int, Tensor] = {}  # by block

    def start(self) -> None:
        """See Learner."""
        self._ready = {}

    def add(self, block: int, rows: Tensor, passes: Passes) -> None:
        """See Learner; a block's gradient depends on nothing but the block, so it is computed while others come in."""
        self._ready[block] = self._sums(block, rows, passes)

    def step(self, rows: Mapping[int, Tensor], passes: Passes, veto: Veto | None = None) -> tuple[Tensor, float | None]:
        """See Learner."""
        ready, self._ready = self._ready, {}
        sums = {b: ready.pop(b) if b in ready else self._sums(b, index, passes) for b, index in rows.items()}
        total = split_sums(self._reducer.sum_blocks(sums), self._optimizer.parameters)
        self._optimizer.lr = self.lr
        statistics, _, norm = step_from(total, self._optimizer, veto)
        return statistics, norm

    def _sums(self, block: int, rows: Tensor, passes: Passes) -> Tensor:
        parts = (one.run() for one in passes(block, rows))
        return block_sums(parts, self._optimizer.parameters, self._num_statistics)

    def publish(self) -> None:
        """See Learner: they are."""

    def adopt(self) -> None:
        """See Learner: they are its own."""

    def move_state(self, device: str) -> None:
        """See Learner."""
        self._optimizer.move_state(device)

    def export_state(self) -> dict[str, Tensor]:
        """See Learner; every worker returns it."""
        return self._optimizer.export_state()

    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """See Learner."""
        self._optimizer.import_state(state)
