"""Behaviour cloning during RL: adds a loss on chunks of demonstrations to each minibatch.

    loss = policy loss / its weight + bc_coef bc_decay^iteration (imitation loss / its chunks)

(DAPG, Rajeswaran et al. 2018, arXiv 1709.10087, eq. 7, whose demonstrations weigh 0.1 x 0.95^iteration x the largest
advantage.)  Chunks are drawn by (seed, iteration, minibatch, block), with replacement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.algorithm import Training
from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import CHUNKS, IMITATION_LOSS
from rlinf_embodied.algorithms.demonstrations import Chunks
from rlinf_embodied.algorithms.imitation import drawn_noise, require_imitation
from rlinf_embodied.interfaces.policies import ImitationPolicy
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.randomness import words


class CloningTerm:
    """Samples demonstrations and creates passes over them."""

    def __init__(self, training: Training) -> None:
        require_imitation(training)
        self._training, self._policy = training, cast(ImitationPolicy, training.policy)
        self.demonstrations: dict[int, Chunks] = {}  # by block, for blocks with demonstrations
        self._drawn: tuple[int, int] = (0, 0)  # iteration and minibatch
        self._scale = 0.0

    def batches(
        self, batches: Iterator[dict[int, Tensor]], blocks: Mapping[int, TrainingBlock], iteration: int
    ) -> Iterator[dict[int, Tensor]]:
        """Yields minibatches, and prepares `passes` for each before it is yielded."""
        algorithm = self._training.algorithm
        for k, rows in enumerate(batches):
            counts = {}
            for b, index in rows.items():
                weight = blocks[b].weights[index].sum()
                counts[b] = torch.stack([weight, weight.new_tensor(float(self._number(b) if len(index) else 0))])
            weight, number = self._training.reducer.sum_blocks(counts).tolist()
            self._drawn = iteration, k
            self._scale = algorithm.bc_coef * algorithm.bc_decay**iteration * weight / max(number, 1.0)
            yield rows

    def passes(self, blocks: Iterable[int], statistics: Sequence[str]) -> list[Pass]:
        """Returns a pass over each block's share of the demonstrations; its weight in denominators is 0."""
        numbers = {block: self._number(block) for block in blocks if self._scale}
        return [Pass(0.0, partial(self._sums, block, n, statistics)) for block, n in numbers.items() if n]

    def _number(self, block: int) -> int:
        size, num_blocks = self._training.algorithm.bc_batch_size, self._training.context.num_blocks
        return size * (block + 1) // num_blocks - size * block // num_blocks if block in self.demonstrations else 0

    def _sums(self, block: int, number: int, statistics: Sequence[str]) -> LossSums:
        training, data, key = self._training, self.demonstrations[block], (*self._drawn, block, np.arange(number))
        index = torch.from_numpy((words(training.seed, "cloning", *key) % np.uint64(len(data))).astype(np.int64))
        part, device = data.rows(index), training.context.device
        observation = part.observation.prompted(training.settings.prompt_suffix).to(device)
        features, targets = self._policy.encode_trainable(observation), part.targets(device)
        targets |= drawn_noise(training, "cloning/noise", *key)
        loss = self._policy.imitation_loss(features, part.actions.to(device), targets)
        sums = {IMITATION_LOSS: float(loss.detach()), CHUNKS: float(number)}
        return LossSums(
            self._scale * loss,
            loss.new_zeros((), dtype=torch.float32),
            loss.new_tensor([sums.get(name, 0.0) for name in statistics], dtype=torch.float32),
        )
