"""The one learner of both workflows: it takes blocks' rows and makes one optimizer step of the loss's mean.

    Pass (gradients.py)     from the workflow: a part of a block's rows, its loss as a sum, weight, statistics
    Learner                 every worker holds all weights; sums of gradients over blocks, along one fixed tree
    ShardedLearner          (sharded.py) every worker holds a slice of weights and moments; torch's FSDP2
    fit (update.py)         the steps of an iteration: epochs of minibatches until they are over or one stops it early

All workers of a group make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from rlinf_embodied.learning.gradients import Passes, block_sums, compiled, differentiated
from rlinf_embodied.learning.optimizer import AdamSettings, FlatOptimizer, ParameterGroup
from rlinf_embodied.learning.reduce import BlockSum, Reducer


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a minibatch, as Step({"loss": 3.5}, 7.0, 0.2): sums over all blocks of all workers."""

    sums: Mapping[str, float]  # the learner's statistics by name
    weight: float  # the denominator of the loss; 0: nothing to learn from
    norm: float | None = None  # of the gradient before clipping; None: no step was made
    stopped: bool = False  # by an early stop, which ends the update


EarlyStop = Callable[[Step], bool]  # whether an update ends before this step is made


class Learner:
    """The optimizer of some parameters, which every worker holds whole and steps alike.

    Other stages read the very same weights.
    """

    rates: dict[str, float]  # by group of parameters; may be changed at any time, for the next step on
    statistics: tuple[str, ...]  # names of what passes add up beyond the loss, in their order

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        settings: AdamSettings,
        statistics: Sequence[str],
        reducer: Reducer,
        *,
        more: Mapping[str, ParameterGroup] = MappingProxyType({}),
        compile: bool = False,
    ) -> None:
        """Starts with moments of zero.

        `parameters` with their `settings` are the first group, `more` are further ones; see `compiled` for what
        `compile` asks of passes.
        """
        self._optimizer = FlatOptimizer({"main": ParameterGroup(parameters, settings), **more})
        self.rates, self.statistics, self.reducer = self._optimizer.rates, tuple(statistics), reducer
        self._size = sum(p.numel() for p in self._optimizer.parameters)
        self._differentiate = compiled(str(self._optimizer.parameters[0].device)) if compile else differentiated
        self.start()

    @property
    def lr(self) -> float:
        """The rate of the first group of parameters."""
        return next(iter(self.rates.values()))

    @lr.setter
    def lr(self, value: float) -> None:
        self.rates[next(iter(self.rates))] = value

    def start(self) -> None:
        """Begins an iteration: forgets what one that failed has left."""
        self._sum = BlockSum(self.reducer)

    def add(self, block: int, rows: Tensor, passes: Passes) -> None:
        """Takes a block of the next step as soon as it is there: its gradient depends on nothing but the block."""
        made = passes(block, rows) if len(rows) else ()
        parameters, number = self._optimizer.parameters, len(self.statistics)
        self._sum.add(block, block_sums(made, parameters, number, self._differentiate))

    def step(
        self,
        rows: Mapping[int, Tensor],
        passes: Passes,
        early_stop: EarlyStop | None = None,
        only: Collection[str] | None = None,
    ) -> Step:
        """Makes one step over rows of the worker's own blocks, of all groups of parameters or `only` some.

        None is made where the minibatch is empty, the gradient is zero (moments would decay, and momentum would move
        the weights), or `early_stop` returns true.

        Raises:
            ObjectiveError: the gradient is NaN or infinite; nothing was changed.
        """
        for block in sorted(set(rows) - self._sum.added):  # in the order in which the fewest gradients are kept
            self.add(block, rows[block], passes)
        total = self._sum.total()
        self.start()
        weight, *sums = total[self._size :].tolist()
        found = Step(dict(zip(self.statistics, sums, strict=True)), weight)
        if weight == 0:
            return found
        if early_stop is not None and early_stop(found):
            return replace(found, stopped=True)
        norm = self._optimizer.step(total[: self._size].div_(weight), only)  # no second vector
        return replace(found, norm=norm or None)

    def publish(self) -> None:
        """Makes the weights that other stages read those of now: here they are the same."""

    def adopt(self) -> None:
        """Continues from the weights that other stages read: here they are the same."""

    def move_state(self, device: str) -> None:
        """Moves what only the learner holds to a device."""
        self._optimizer.move_state(device)

    def export_state(self) -> dict[str, Tensor]:
        """Returns a copy of the optimizer's state as FlatOptimizer writes it; {} in workers but the first."""
        return self._optimizer.export_state() if self.reducer.group.rank == 0 else {}

    def export_part(self) -> dict[str, Tensor]:
        """Returns a copy of this worker's part of the state; nothing is exchanged."""
        return self._optimizer.export_state((self.reducer.group.rank, self.reducer.group.size))

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Returns the state of which all workers together returned these parts."""
        moments = {name: torch.cat([part[name] for part in parts]) for name in ("mean", "square")}
        return {"steps": parts[0]["steps"], **moments}

    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `export_state` returned, of any learner and number of workers.

        Raises:
            CheckpointError: the state is missing or that of other parameters; nothing was changed.
        """
        self.start()
        self._optimizer.import_state(state)
