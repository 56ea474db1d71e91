"""What a rollout leaves behind, per block, and what the actor trains on.

Axes: H chunk-steps, B rows of a block, C actions per chunk, K choices per action, Q privileged state, M samples
(chunks) that are left of H x B once those without a valid action are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import Features, Record


@dataclass(frozen=True, slots=True)
class EnvColumns:
    """One block's rollout as the simulator saw it."""

    rewards: Tensor  # float32 [H, B, C]
    terminated: Tensor  # bool [H, B, C]
    truncated: Tensor  # bool [H, B, C]
    valid: Tensor  # bool [H, B, C]
    privileged: Tensor | None  # float32 [H, B, C, Q], before each action
    last: Observation  # of the B rows when the rollout ended
    final_index: Tensor  # int64 [F, 2]: chunk-step and row of each episode that ended
    final: Observation | None  # of these F rows when they ended
    success: Tensor  # bool [B]: whether an episode of the row ended solved in this rollout
    round: int = 0
    discounts: Tensor | None = None  # float32 [H, B, C], of the value after a step; None: algorithm.gamma for each


@dataclass(frozen=True, slots=True)
class PolicyColumns:
    """One block's rollout as the policy saw it: heavy, so it stays where it was made."""

    features: Features  # every tensor [H, B, ...]
    record: Record  # every tensor [H, B, ...]
    log_probs: Tensor  # float32 [H, B, C, K], under the distribution sampled from
    version: int  # of the weights that sampled
    values: Tensor | None = None  # float32 [H, B, C], where acting gives them
    mask: Tensor | None = None  # bool [H, B, C, K], which choices were made; None: all
    old_log_probs: Tensor | None = None  # float32 [H, B, C, K], training's own; None: `log_probs` stand for them


@dataclass(frozen=True, slots=True)
class TwoLevelColumns:
    """One block's rollout as a high-level policy and the low-level one saw it; H of `high` are its decisions."""

    low: PolicyColumns | None  # None: nobody trains it
    high: PolicyColumns
    choices: Tensor  # float32 [H, B, D], which held at each of the low-level policy's chunk-steps


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode for the driver: light, plain values."""

    env_id: int
    seed: int
    metrics: dict[str, float]
    task: str = ""  # its name, where rows have several


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """What the driver learns of a worker's rollout."""

    episodes: tuple[Episode, ...]  # that ended, of those that would have been seen to end in any case
    env_steps: int
    group_success: dict[int, tuple[bool, ...]]  # group id -> success of each member, where there are groups
    num_cut: int = 0  # episodes that began too late in the rollout to be seen to their end


@dataclass(frozen=True, slots=True)
class TrainingBlock:
    """The samples of a block that have a valid action, with what the losses need."""

    features: Features  # [M, ...]
    record: Record  # [M, ...]
    old_log_probs: Tensor  # float32 [M, C, K], of the ratio's denominator
    valid: Tensor  # bool [M, C]
    advantages: Tensor  # float32 [M, C]
    weights: Tensor  # float32 [M, C], of each action in the policy loss; 0 where not valid
    privileged: Tensor | None  # float32 [M, C, Q]
    values: Tensor | None  # float32 [M, C], before the update; None without a critic
    returns: Tensor | None  # float32 [M, C], what the critic should say
    mask: Tensor | None = None  # bool [M, C, K]: which choices were made; None: all
    rollout_log_probs: Tensor | None = None  # float32 [M, C, K], recorded by the rollout; None: they are the old ones

    def __len__(self) -> int:
        """Returns the number of samples M."""
        return len(self.old_log_probs)

    def rows(self, index: Tensor) -> TrainingBlock:
        """Returns these samples."""
        take = lambda value: None if value is None else value[index]  # noqa: E731
        return TrainingBlock(
            features={name: value[index] for name, value in self.features.items()},
            record={name: value[index] for name, value in self.record.items()},
            old_log_probs=self.old_log_probs[index],
            valid=self.valid[index],
            advantages=self.advantages[index],
            weights=self.weights[index],
            privileged=take(self.privileged),
            values=take(self.values),
            returns=take(self.returns),
            mask=take(self.mask),
            rollout_log_probs=take(self.rollout_log_probs),
        )

    def padded(self, size: int) -> TrainingBlock:
        """Returns `size` rows: these, and behind them copies of the first in which no action is valid or weighs."""
        number = torch.arange(size, device=self.valid.device)
        real = number < len(self)
        rows = self.rows(torch.where(real, number, 0))
        return replace(rows, valid=rows.valid & real[:, None], weights=rows.weights * real[:, None])


def flatten_rows(value: Tensor) -> Tensor:
    """Returns [H, B, ...] as [H * B, ...], chunk-step by chunk-step."""
    return value.flatten(0, 1)


def training_block(
    policy: PolicyColumns,
    env: EnvColumns,
    advantages: Tensor,
    weights: Tensor,
    values: Tensor | None = None,
    returns: Tensor | None = None,
) -> TrainingBlock:
    """Returns the samples of one rollout that have a valid action and a weight.

    Args:
        policy: the policy's columns.
        env: the simulator's columns, with the same H and B.
        advantages: float32 [H, B, C].
        weights: float32 [H, B, C], 0 where an action shall not count.
        values: float32 [H, B, C] or None.
        returns: float32 [H, B, C] or None.
    """
    assert policy.log_probs.shape[:2] == env.valid.shape[:2], "the two sides of the rollout differ in length"
    kept = (flatten_rows(env.valid) & (flatten_rows(weights) > 0)).any(-1).nonzero()[:, 0]
    take = lambda value: None if value is None else flatten_rows(value)[kept]  # noqa: E731
    return TrainingBlock(
        features={name: flatten_rows(value)[kept] for name, value in policy.features.items()},
        record={name: flatten_rows(value)[kept] for name, value in policy.record.items()},
        old_log_probs=flatten_rows(policy.log_probs if policy.old_log_probs is None else policy.old_log_probs)[kept],
        valid=flatten_rows(env.valid)[kept],
        advantages=flatten_rows(advantages)[kept],
        weights=flatten_rows(weights * env.valid)[kept],
        privileged=take(env.privileged),
        values=take(values),
        returns=take(returns),
        mask=take(policy.mask),
        rollout_log_probs=None if policy.old_log_probs is None else take(policy.log_probs),
    )


def concatenate(parts: Sequence[TrainingBlock]) -> TrainingBlock:
    """Returns the samples of several rollouts of one block, in order."""
    if len(parts) == 1:
        return parts[0]
    return TrainingBlock(
        features={name: torch.cat([part.features[name] for part in parts]) for name in parts[0].features},
        record={name: torch.cat([part.record[name] for part in parts]) for name in parts[0].record},
        old_log_probs=torch.cat([part.old_log_probs for part in parts]),
        valid=torch.cat([part.valid for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        weights=torch.cat([part.weights for part in parts]),
        privileged=_cat([part.privileged for part in parts]),
        values=_cat([part.values for part in parts]),
        returns=_cat([part.returns for part in parts]),
        mask=_cat([part.mask for part in parts]),
        rollout_log_probs=_cat([part.rollout_log_probs for part in parts]),
    )


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Joins what all parts have; None if they have none of it."""
    found = [part for part in parts if part is not None]
    assert len(found) in (0, len(parts)), "some rollouts of a block have a column that others lack"
    return torch.cat(found) if found else None
