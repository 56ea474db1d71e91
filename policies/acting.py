"""Policies that only act, in evaluations and exports, and cannot be trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.policies import Policy


class ActingPolicy(Policy):
    """A policy that raises if it is trained or saved."""

    source: str  # where it comes from, for error messages

    def _refuse(self, *arguments: object, **named: object) -> Any:
        raise CheckpointError(f"{self.source}: it can be evaluated here, but not trained or saved")

    evaluate = value = save = _refuse

    def policy_parameters(self) -> list[nn.Parameter]:
        return []

    value_parameters = policy_parameters
