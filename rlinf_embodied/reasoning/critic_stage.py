"""A critic as a stage: values of every token, advantages for the actor, and its own update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import (
    advantage_sums,
    gae,
    mean_of,
    next_values,
    normalize,
    squared_deviations,
    std_of,
)
from rlinf_embodied.algorithms.losses import explained_variance, explained_variance_sums, value_loss
from rlinf_embodied.config import LanguagePolicyConfig, ReasoningAlgorithmConfig, Reduction
from rlinf_embodied.interfaces import TokenBatch, ValueModel
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.optimizer import FlatOptimizer
from rlinf_embodied.learning.reduce import ExactReducer, FastReducer, Reducer
from rlinf_embodied.learning.update import LossSums, minibatch_step, slices
from rlinf_embodied.reasoning.batch import Completions, Rewards, TokenAdvantages
from rlinf_embodied.reasoning.packing import Sequences, microbatches
from rlinf_embodied.reasoning.policy_folder import load_policy
from rlinf_embodied.runtime.host import Output, StageContext, Tick
from rlinf_embodied.runtime.tensor_wire import to_device
from rlinf_embodied.targets import load_target

OPTIMIZER, MODULE = "critic_optimizer", "critic_module"  # in a checkpoint


@dataclass(frozen=True, slots=True)
class CriticStageConfig:
    """What the stage needs to know."""

    policy: LanguagePolicyConfig
    folder: str  # the policy whose trunk the critic starts from
    seed: int
    algorithm: ReasoningAlgorithmConfig


@dataclass(frozen=True, slots=True)
class CriticReport:
    """What the driver learns of an update."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A block's completions; tables are [B, R]."""

    sequences: Sequences
    mask: Tensor
    values: Tensor  # before the update
    advantages: Tensor
    returns: Tensor


class CriticStage:
    """Generalised advantage estimation over tokens: the reward stands at the last one, which ends the episode.

    A completion that was cut off ends there too, with the reward that it got.
    """

    def __init__(self, config: CriticStageConfig) -> None:
        """Takes plain data; `setup` makes the critic."""
        self._config, self._algorithm = config, config.algorithm

    def setup(self, context: StageContext) -> None:
        """Makes a critic from the policy's trunk, and its optimizer."""
        config, algorithm = self._config, self._algorithm
        kind = cast(type[ValueModel], load_target(config.policy.critic_target))
        policy = load_policy(config.policy, config.folder, config.seed, "cpu").policy
        self._pad_id = policy.spec.pad_id
        self._critic = kind.from_policy(policy)
        self._critic.module.to(context.device)
        self._device = context.device
        exact = algorithm.reduction is Reduction.exact
        self._reducer: Reducer = (ExactReducer if exact else FastReducer)(context.group, context.owners)
        self._optimizer = FlatOptimizer(
            self._critic.parameters(),
            algorithm.value_lr,
            betas=(0.9, algorithm.beta2),
            max_grad_norm=algorithm.value_max_grad_norm,
        )

    def run(self, tick: Tick, inputs: Mapping[int, list[object]]) -> Output:
        """Returns the TokenAdvantages of each block, standardised over all of them, and then fits the values."""
        blocks = {
            block: self._rows(cast(Completions, completions), cast(Rewards, rewards))
            for block, (completions, rewards) in inputs.items()
        }
        sums = self._reducer.sum_blocks({b: advantage_sums(r.advantages, r.mask) for b, r in blocks.items()})
        mean = mean_of(sums)
        deviations = {b: squared_deviations(r.advantages, r.mask, mean) for b, r in blocks.items()}
        std = std_of(sums, self._reducer.sum_blocks(deviations))
        made = {b: TokenAdvantages(normalize(r.advantages, mean, std) * r.mask) for b, r in blocks.items()}
        return Output(made, CriticReport(self._fit(tick, blocks)))

    def _rows(self, completions: Completions, rewards: Rewards) -> _Rows:
        sequences = Sequences.of(completions.groups)
        lengths = torch.tensor([len(row) for row in sequences.completions], device=self._device)
        mask = torch.arange(int(lengths.max()), device=self._device) < lengths[:, None]
        values = self._values(sequences, mask)
        earned = torch.zeros_like(values)
        last = torch.arange(len(lengths), device=self._device), lengths - 1
        earned[last] = cast(Tensor, to_device(rewards.rewards, self._device)).reshape(-1)
        ended = torch.zeros_like(mask)
        ended[last] = True
        none, cut = torch.zeros_like(values.T), torch.zeros_like(mask.T)
        following = next_values(values.T, none, none[0], cut, mask.T)
        algorithm = self._algorithm
        advantages, returns = gae(
            *(earned.T, values.T, following, ended.T, cut, mask.T, algorithm.gamma, algorithm.gae_lambda)
        )
        return _Rows(sequences, mask, values, advantages.T.contiguous(), returns.T.contiguous())

    @torch.no_grad()
    def _values(self, sequences: Sequences, mask: Tensor) -> Tensor:
        table = torch.zeros(mask.shape, device=self._device)
        budget = self._algorithm.tokens_per_microbatch
        for rows, batch in microbatches(sequences, budget, self._pad_id, self._device):
            found = self._critic.values(batch)
            table[rows, : found.shape[1]] = found
        return table

    # ----------------------------------------------------------------------------------------------------------- update
    def _fit(self, tick: Tick, blocks: Mapping[int, _Rows]) -> dict[str, float]:
        algorithm, seed = self._algorithm, self._config.seed
        total, count = 0.0, 0.0
        for epoch in range(algorithm.value_epochs):
            parts = algorithm.num_minibatches
            cut = {
                b: slices(seed, "value", tick.iteration, epoch, b, len(r.sequences), parts) for b, r in blocks.items()
            }
            for k in range(parts):
                rows = {block: pieces[k] for block, pieces in cut.items()}
                loss = lambda block, index: self._loss(blocks[block], index.tolist())  # noqa: E731
                sums, weight, _ = minibatch_step(rows, loss, self._optimizer, 1, self._reducer)
                total, count = total + float(sums[0]), count + weight
        explained = self._reducer.sum_blocks(
            {b: explained_variance_sums(r.values, r.returns, r.mask) for b, r in blocks.items()}
        )
        return {
            "losses/value_loss": total / max(count, 1.0),
            "losses/explained_variance": explained_variance(explained),
        }

    def _loss(self, rows: _Rows, index: Sequence[int]) -> Iterator[LossSums]:
        chosen, budget = rows.sequences.select(index), self._algorithm.tokens_per_microbatch
        for numbers, batch in microbatches(chosen, budget, self._pad_id, self._device):
            yield self._microbatch_loss(rows, [index[number] for number in numbers], batch)

    def _microbatch_loss(self, rows: _Rows, index: Sequence[int], batch: TokenBatch) -> LossSums:
        mask = batch.mask
        cut = lambda table: table[list(index), : mask.shape[1]]  # noqa: E731
        terms = value_loss(
            self._critic.values(batch), cut(rows.returns), mask, cut(rows.values), self._algorithm.value_clip
        )
        return LossSums(terms.loss, terms.count.to(torch.float32), terms.loss.detach().reshape(1))

    # ---------------------------------------------------------------------------------------------- switching and state
    def offload(self, tick: Tick) -> None:
        """Leaves the device's memory."""
        self._critic.module.to("cpu")
        self._optimizer.move_state("cpu")

    def onload(self, tick: Tick) -> None:
        """Comes back."""
        self._critic.module.to(self._device)
        self._optimizer.move_state(self._device)

    def export_state(self, tick: Tick) -> dict[str, dict[str, Tensor]]:
        """Returns what a checkpoint holds of the critic: groups of tensors by name."""
        module = {name: tensor.detach().cpu() for name, tensor in self._critic.module.state_dict().items()}
        return {OPTIMIZER: self._optimizer.export_state(), MODULE: module}

    def load(self, tick: Tick, folder: str) -> None:
        """Restores weights and optimizer."""
        self._critic.module.load_state_dict(load_tensors(Path(folder), MODULE))
        self._optimizer.import_state(load_tensors(Path(folder), OPTIMIZER))
