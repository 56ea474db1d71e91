"""The learner of both workflows: one optimizer step on the mean loss over rows of blocks.

    Pass (gradients.py)     created by the workflow: a part of a block's rows; summed loss, weight, statistics
    Learner                 every worker holds all weights; sums of gradients over blocks, along one fixed tree
    ShardedLearner          (sharded.py) every worker holds a shard of weights and moments, by torch's FSDP2
    fit (update.py)         the steps of an iteration: epochs of minibatches, with early stopping

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
    weight: float  # the denominator of the loss; 0: the minibatch is empty
    norm: float | None = None  # gradient norm before clipping; None: no step was made
    stopped: bool = False  # whether early_stop ended the update


EarlyStop = Callable[[Step], bool]  # whether to end an update before this step


class Learner:
    """The optimizer of replicated parameters, which all workers step identically.

    Other stages read the same parameters.
    """

    rates: dict[str, float]  # by parameter group; changes apply from the next step on
    statistics: tuple[str, ...]  # names of the passes' statistics, in order

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

        `parameters` with their `settings` are the first group, `more` the further ones; `compiled` describes the
        requirements of `compile`.
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
        """Begins an iteration; discards the state of a failed one."""
        self._sum = BlockSum(self.reducer)

    def add(self, block: int, rows: Tensor, passes: Passes) -> None:
        """Adds a block of the next step as soon as it is available; its gradient depends only on the block."""
        self._add({block: rows}, passes)

    def _add(self, rows: Mapping[int, Tensor], passes: Passes) -> None:
        present = {block: index for block, index in rows.items() if len(index)}
        parameters, number = self._optimizer.parameters, len(self.statistics)
        sums = block_sums(passes(present) if present else (), parameters, number, self._differentiate)
        self._sum.add(rows, sums)

    def step(
        self,
        rows: Mapping[int, Tensor],
        passes: Passes,
        early_stop: EarlyStop | None = None,
        only: Collection[str] | None = None,
    ) -> Step:
        """Makes one step on rows of the worker's blocks, for all parameter groups or `only` some.

        No step is made if the minibatch is empty, the gradient is zero (moments would decay, and momentum would move
        the weights), or `early_stop` returns true.

        Raises:
            ObjectiveError: the gradient is NaN or infinite; nothing was changed.
        """
        remaining = {block: rows[block] for block in sorted(set(rows) - self._sum.added)}  # keeps the fewest gradients
        if self.reducer.exact:
            for block, index in remaining.items():
                self.add(block, index, passes)
        elif remaining:  # in one pass: a GPU takes about as long for few rows as for many
            self._add(remaining, passes)
        total = self._sum.total()
        self.start()
        weight, *sums = total[self._size :].tolist()
        step = Step(dict(zip(self.statistics, sums, strict=True)), weight)
        if weight == 0:
            return step
        if early_stop is not None and early_stop(step):
            return replace(step, stopped=True)
        norm = self._optimizer.step(total[: self._size].div_(weight), only)  # no second vector
        return replace(step, norm=norm or None)

    def publish(self) -> None:
        """Updates the weights that other stages read; here they are the same parameters."""

    def adopt(self) -> None:
        """Continues from the weights that other stages read; here they are the same parameters."""

    def move_state(self, device: str) -> None:
        """Moves the optimizer's state to a device."""
        self._optimizer.move_state(device)

    def export_state(self) -> dict[str, Tensor]:
        """Returns the optimizer's state as FlatOptimizer does; {} in workers but the first."""
        return self._optimizer.export_state() if self.reducer.group.rank == 0 else {}

    def export_part(self) -> dict[str, Tensor]:
        """Returns this worker's part of the state, without communication."""
        return self._optimizer.export_state((self.reducer.group.rank, self.reducer.group.size))

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Joins the parts of all workers to the full state."""
        moments = {name: torch.cat([part[name] for part in parts]) for name in ("mean", "square")}
        return {"steps": parts[0]["steps"], **moments}

    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state of `export_state`, of any learner and number of workers.

        Raises:
            CheckpointError: the state is missing or that of other parameters; nothing was changed.
        """
        self.start()
        self._optimizer.import_state(state)
