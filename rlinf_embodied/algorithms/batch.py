"""The data of a rollout, per block, and the actor's training samples.

Axes: H chunk-steps, B rows of a block, C actions per chunk, K choices per action, Q privileged state, M samples
(chunks), which are those of H x B with a valid action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import EpisodeEnd, Observation
from rlinf_embodied.interfaces.policies import Features, Record


@dataclass(frozen=True, slots=True)
class EnvColumns:
    """One block's rollout: the simulator's data."""

    rewards: Tensor  # float32 [H, B, C]
    terminated: Tensor  # bool [H, B, C]
    truncated: Tensor  # bool [H, B, C]
    valid: Tensor  # bool [H, B, C]
    privileged: Tensor | None  # float32 [H, B, C, Q], before each action
    last: Observation  # of the B rows at the end of the rollout
    final_index: Tensor  # int64 [F, 2]: chunk-step and row of each episode that ended
    final: Observation | None  # of these F rows at the end of their episodes
    success: Tensor  # bool [B]: whether an episode of the row that ended in this rollout was a success
    round: int = 0
    discounts: Tensor | None = None  # float32 [H, B, C], of the value after a step; None: algorithm.gamma for each
    tasks: Tensor | None = None  # int64 [H, B], ids of the instructions, if the learner needs them

    @property
    def returns(self) -> Tensor:
        """The sum of each row's rewards, float32 [B]."""
        return torch.where(self.valid, self.rewards, 0.0).sum((0, 2))


@dataclass(frozen=True, slots=True)
class PolicyColumns:
    """One block's rollout: the policy's data, which is large and stays in the worker that created it."""

    features: Features  # every tensor [H, B, ...]
    record: Record  # every tensor [H, B, ...]
    log_probs: Tensor  # float32 [H, B, C, K], under the distribution sampled from
    version: int  # of the weights that sampled
    values: Tensor | None = None  # float32 [H, B, C], if acting computes them
    old_log_probs: Tensor | None = None  # float32 [H, B, C, K], recomputed in training; None: use `log_probs`
    reference_log_probs: Tensor | None = None  # float32 [H, B, C, K], of the policy that the run began with


Rollouts = Sequence[tuple[PolicyColumns, EnvColumns]]  # of one block, one for each round


@dataclass(frozen=True, slots=True)
class TwoLevelColumns:
    """One block's rollout of a high-level and a low-level policy; H of `high` counts its decisions."""

    low: PolicyColumns | None  # None: it is not trained
    high: PolicyColumns
    choices: Tensor  # float32 [H, B, D], the high-level action at each chunk-step of the low-level policy


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """A worker's report to the driver about its rollout."""

    episodes: tuple[EpisodeEnd, ...]  # by rows of all blocks; of those that end within the rollout in any case
    env_steps: int
    group_outcomes: dict[int, tuple[float, ...]]  # group id -> what is compared, success or return, of each member
    num_cut: int = 0  # episodes that began too late to end within the rollout
    actions: Sequence[Sequence[float]] = ()  # counts of a Histogram of each of their numbers; () where none is asked


@dataclass(frozen=True, slots=True)
class TrainingBlock:
    """The samples of a block with a valid action: the inputs of the losses."""

    features: Features  # [M, ...]
    record: Record  # [M, ...]
    old_log_probs: Tensor  # float32 [M, C, K], the ratio's denominator
    valid: Tensor  # bool [M, C]
    advantages: Tensor  # float32 [M, C]
    weights: Tensor  # float32 [M, C], of each action in the policy loss; 0 where not valid
    privileged: Tensor | None  # float32 [M, C, Q]
    values: Tensor | None  # float32 [M, C], before the update; None without a critic
    returns: Tensor | None  # float32 [M, C], the critic's targets
    rollout_log_probs: Tensor | None = None  # float32 [M, C, K], recorded by the rollout; None: they are the old ones
    reference_log_probs: Tensor | None = None  # float32 [M, C, K], of the policy that the run began with
    tasks: Tensor | None = None  # int64 [M], ids of the instructions

    def __len__(self) -> int:
        return len(self.old_log_probs)

    def rows(self, index: Tensor) -> TrainingBlock:
        return _each(lambda parts: parts[0][index], self)

    @staticmethod
    def concatenate(blocks: Sequence[TrainingBlock]) -> TrainingBlock:
        """Returns the samples of all blocks, in order."""
        return blocks[0] if len(blocks) == 1 else _each(lambda parts: torch.cat([*parts]), *blocks)


_COLUMNS = tuple(column.name for column in fields(TrainingBlock))  # torch.compile does not know `fields`


def _each(function: Callable[[Sequence[Tensor]], Tensor], *blocks: TrainingBlock) -> TrainingBlock:
    """Returns a block with a function of the blocks' tensors in every column; missing columns stay None."""

    def map_parts(parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {name: function([part[name] for part in parts]) for name in parts[0]}
        missing = sum(part is None for part in parts)
        assert missing in (0, len(parts)), "some rollouts of a block have a column that others lack"
        return None if missing else function(parts)

    return TrainingBlock(**{name: map_parts([getattr(block, name) for block in blocks]) for name in _COLUMNS})


def training_block(
    policy: PolicyColumns,
    env: EnvColumns,
    advantages: Tensor,
    weights: Tensor,
    values: Tensor | None = None,
    returns: Tensor | None = None,
) -> TrainingBlock:
    """Returns the samples of one rollout with a valid action of positive weight.

    Other tensors are float32 [H, B, C]; weights are 0 for actions that do not count.
    """
    assert policy.log_probs.shape[:2] == env.valid.shape[:2], "policy and env columns of the rollout differ in length"
    old_log_probs = policy.old_log_probs
    whole = TrainingBlock(
        features=policy.features,
        record=policy.record,
        old_log_probs=policy.log_probs if old_log_probs is None else old_log_probs,
        valid=env.valid,
        advantages=advantages,
        weights=weights * env.valid,
        privileged=env.privileged,
        values=values,
        returns=returns,
        rollout_log_probs=None if old_log_probs is None else policy.log_probs,
        reference_log_probs=policy.reference_log_probs,
        tasks=env.tasks,
    )
    flat = _each(lambda parts: parts[0].flatten(0, 1), whole)
    return flat.rows((flat.weights > 0).any(-1).nonzero()[:, 0])


def concatenate(parts: Sequence[TrainingBlock]) -> TrainingBlock:
    """Returns the samples of several rollouts of one block, in order."""
    return parts[0] if len(parts) == 1 else _each(lambda tensors: torch.cat(list(tensors)), *parts)
