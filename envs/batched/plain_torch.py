"""Torch without what only costs time where small tensors of a simulation are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within it, torch's operations do nothing but compute, which takes most of their time here.

    They keep no account of gradients, which physics would not pass on, and ask no function mode, such as the one of
    `with torch.device("cpu")`, which tasks write and which costs 5 us per operation.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction():
        yield
