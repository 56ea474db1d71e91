"""The precision that passes are computed in; weights, moments and sums of gradients are float32 in either.

In bfloat16 torch's autocast casts what enters matrix products and convolutions; a backward pass computes each operation
in the precision that its forward pass had.  Log-probs and losses are formed outside of it, in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import Precision
from rlinf_embodied.device import import_kind, kind_of, require_autocast


def computing(precision: Precision, device: str) -> AbstractContextManager[object]:
    """Returns a context for a forward pass on a device; in float32 it does nothing."""
    if precision is Precision.float32:
        return nullcontext()
    return torch.autocast(kind_of(device), torch.bfloat16)


def require_precision(precision: Precision, cluster: Cluster) -> None:
    """Checks that a cluster's devices compute in a precision."""
    if precision is Precision.float32 or cluster.emulated:
        return
    import_kind(cluster.device_module)
    require_autocast(cluster.kind)
