"""An algorithm in a separate module, as docs/own_algorithm.md shows it: imitation of what paid more than the mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlinf_embodied.algorithms.algorithm import Training
from rlinf_embodied.algorithms.imitation import Imitation
from rlinf_embodied.algorithms.transitions import REWARD, Columns, ReplayConfig
from rlinf_embodied.runtime.host import StepContext


@dataclass(kw_only=True, slots=True)
class FilteredCloningConfig(ReplayConfig):
    """Its numbers, and what it needs."""

    name = "filtered cloning"
    columns = ("state", "action", "reward")
    policy_method = "imitation_loss"
    threshold: float = 0.0  # of the reward of a step

    def make(self, training: Training) -> FilteredCloning:
        return FilteredCloning(training)


class FilteredCloning(Imitation):
    """Counts steps above the threshold, and clones."""

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        paid = sum(int((columns[REWARD] > self.algorithm.threshold).sum()) for columns in data.values())
        return super().update(step_context, data) | {"losses/paid": float(paid)}
