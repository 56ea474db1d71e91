"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300): episodes of a group are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.on_policy import OnPolicy
from rlinf_embodied.algorithms.rollout_samples import Rollouts, grpo_block
from rlinf_embodied.runtime.host import StepContext


class GRPO(OnPolicy):
    """Trains on the (round, group) pairs that dynamic sampling has kept."""

    def samples(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> dict[int, TrainingBlock]:
        kept = _kept(step_context)
        return {block: grpo_block(parts, self.algorithm, block, kept) for block, parts in rollouts.items()}

    def update(self, step_context: StepContext, data: Mapping[int, Rollouts]) -> dict[str, float]:
        return {"rollout/useful_groups": float(len(_kept(step_context)))} | super().update(step_context, data)


def _kept(step_context: StepContext) -> set[tuple[int, int]]:
    return set(cast("tuple[tuple[int, int], ...]", step_context.message))
