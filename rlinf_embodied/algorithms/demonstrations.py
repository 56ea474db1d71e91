"""What fine-tuning learns from: chunks of observations, and what a demonstrator did then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import Observation


@dataclass(slots=True)
class Demonstrations:
    """M chunks of one data block."""

    observation: Observation  # M rows
    actions: Tensor  # float32 [M, C, A]
    object_positions: Tensor | None  # float32 [M, 3]

    def __len__(self) -> int:
        return len(self.actions)


def join(parts: Sequence[tuple[Observation, Tensor, Tensor | None]]) -> Demonstrations:
    """Returns single chunks (observation of one row, actions [C, A], position [3]) as one demonstration."""
    positions = None if parts[0][2] is None else torch.stack([cast(Tensor, part[2]) for part in parts])
    return Demonstrations(Observation.concatenate([p[0] for p in parts]), torch.stack([p[1] for p in parts]), positions)


def join_all(parts: Sequence[Demonstrations]) -> Demonstrations:
    """Returns the chunks of several demonstrations, in order."""
    positions = [part.object_positions for part in parts]
    return Demonstrations(
        Observation.concatenate([part.observation for part in parts]),
        torch.cat([part.actions for part in parts]),
        None if positions[0] is None else torch.cat(cast(list[Tensor], positions)),
    )
