"""What policies have in common that act here, in evaluations and exports, and are not trained."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.policies import Evaluation, Features, Policy, Record


class ActingPolicy(Policy):
    """A policy without what training asks of one."""

    source: str  # what it came from, for errors

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        raise self._only_acts()

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        raise self._only_acts()

    def policy_parameters(self) -> list[nn.Parameter]:
        return []

    def value_parameters(self) -> list[nn.Parameter]:
        return []

    def save(self, folder: Path) -> None:
        raise self._only_acts()

    def _only_acts(self) -> CheckpointError:
        return CheckpointError(f"{self.source}: it is evaluated here, and not trained")
