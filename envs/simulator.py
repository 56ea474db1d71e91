"""What an episode needs of a simulator: N rows that can be reset, stepped, measured and rendered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Measurement:
    """The state of B rows after a step or reset."""

    reward: Tensor  # float32 [B], the task's own, not shaped
    success: Tensor  # bool [B]
    fail: Tensor  # bool [B]
    proprio: Tensor  # float32 [B, P]
    privileged: Tensor  # float32 [B, Q - 2], without the two time features

    @staticmethod
    def concatenate(parts: Sequence[Measurement]) -> Measurement:
        """Returns the rows of all parts, in order."""
        columns = ([getattr(part, field.name) for part in parts] for field in fields(Measurement))
        return Measurement(*map(torch.cat, columns))


class Simulator(Protocol):
    """N rows of a task, without any notion of an episode."""

    num_rows: int
    backend: str
    device: torch.device
    action_dim: int
    expert: Callable[[], Tensor] | None  # the scripted expert's action for every row [N, A]

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        """Brings each of these rows to the initial state of its seed."""
        ...

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        """Runs one control step of these rows; actions float32 [N, A], entries of other rows are ignored."""
        ...

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all N rows, reached by `actions` [N, A]."""
        ...

    def pictures(self, rows: Sequence[int]) -> Tensor:
        """Returns what the policy's cameras see, uint8 [len(rows), K, S, S, 3]."""
        ...

    def object_positions(self) -> Tensor | None:
        """Returns where the object to handle is, float32 [N, 3] in metres, None for a task without one."""
        ...

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Returns a picture uint8 [size, size, 3] of each of these rows for a video."""
        ...

    def close(self) -> None:
        """Frees the simulator."""
        ...
