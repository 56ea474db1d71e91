"""One process of a group that sums the blocks of all."""

from __future__ import annotations

from typing import Protocol

import torch

from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.process_group import TorchGroup


class Answers(Protocol):
    """A queue."""

    def put(self, item: tuple[int, float, float]) -> None:
        """Takes an answer."""


def member(rank: int, size: int, rendezvous: str, answers: Answers, kind: str = "cuda") -> None:
    """Sums blocks with the others and puts (rank, error of the exact sum, error of the fast one) into `answers`."""
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    group = TorchGroup(rank, size, rendezvous, device=device)
    owners = [block * size // 8 for block in range(8)]
    draw = torch.Generator().manual_seed(1)
    blocks = {block: torch.randn(1 << 20, generator=draw) for block in range(8)}
    mine = {block: tensor.to(device) for block, tensor in blocks.items() if owners[block] == rank}
    exact = Reducer(group, owners).sum_blocks(mine).cpu()
    fast = Reducer(group, owners, exact=False).sum_blocks(mine).cpu()
    truth = sum(tensor.double() for tensor in blocks.values())
    answers.put((rank, float((exact - truth).abs().max()), float((fast - truth).abs().max())))
