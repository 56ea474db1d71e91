"""What policies have in common that act here, in evaluations and exports, and are not trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.policies import Policy


class ActingPolicy(Policy):
    """A policy without what training asks of one."""

    source: str  # what it came from, for errors

    def _refuse(self, *arguments: object, **named: object) -> Any:
        raise CheckpointError(f"{self.source}: it is evaluated here, and not trained")

    evaluate = value = save = _refuse

    def policy_parameters(self) -> list[nn.Parameter]:
        return []

    value_parameters = policy_parameters
