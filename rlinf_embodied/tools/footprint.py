"""Counts the bytes that a piece of torch code allocates, on any device and on "meta", where nothing is computed.

    code on a module without memory -> every new storage is charged, every freed one given back -> bytes over time
    twice, with unequal numbers of rows -> (fixed, per row) at each moment -> the peak for any number of rows

What a kernel takes for itself while it runs is not seen, nor what an allocator keeps or loses to fragments.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS = (2, 3)  # many operations return views where there is a single row
_META = "meta"


@dataclass(frozen=True, slots=True)
class Envelope:
    """Peak bytes of some work on r rows: the largest fixed + per_row * r over the moments of the work.

    Activations of a pass are proportional to its rows while gradients are not, and the moment of the peak depends on r;
    so each moment is a line, and only lines that are the highest for some r are kept.  The lines come from counting
    every allocation of the real code twice, with unequal numbers of rows.  With checkpointing
    (Chen et al. 2016, arXiv:1604.06174) the steepest line holds the inputs of all blocks and what one block keeps.
    """

    lines: tuple[tuple[float, float], ...]  # (fixed, per_row), the flattest first

    def at(self, rows: float) -> float:
        """The peak for this number of rows."""
        return max(fixed + per_row * rows for fixed, per_row in self.lines)

    @property
    def per_row(self) -> float:
        """Bytes that each further row costs once there are many."""
        return self.lines[-1][1]

    def plus(self, resident: float) -> Envelope:
        """The same work while other bytes are held."""
        return Envelope(tuple((fixed + resident, per_row) for fixed, per_row in self.lines))

    def or_at_least(self, peak: float) -> Envelope:
        """This work, then other work with a peak that does not depend on rows."""
        return envelope_of([(peak, 0.0), *self.lines])

    def most_rows(self, room: float) -> int:
        """The largest number of rows whose peak is at most `room`; 0 if no number fits, or the work knows no rows."""
        rising = [(room - fixed) / per_row for fixed, per_row in self.lines if per_row]
        return math.floor(min(rising)) if rising and self.at(0) <= room else 0


def envelope_of(lines: Iterable[tuple[float, float]]) -> Envelope:
    """Returns the upper envelope of (fixed, per_row) over rows >= 0."""
    hull: list[tuple[float, float]] = []
    steepest = {per_row: fixed for fixed, per_row in sorted(lines)}  # of equal slopes the highest
    for per_row, fixed in sorted((max(slope, 0.0), fixed) for slope, fixed in steepest.items()):
        while hull and (hull[-1][0] <= fixed or _hidden(hull, fixed, per_row)):
            hull.pop()
        hull.append((fixed, per_row))
    return Envelope(tuple(hull))


def _hidden(hull: Sequence[tuple[float, float]], fixed: float, per_row: float) -> bool:
    """Returns whether the last line lies below the one before it or the new one everywhere."""
    if len(hull) < 2:
        return False
    (first, slope), (second, steeper) = hull[-2:]
    return (first - fixed) * (steeper - slope) <= (first - second) * (per_row - slope)


class ByteCounter(TorchDispatchMode):
    """Within its block, counts the bytes of tensors of one kind of device; what was there before does not count."""

    def __init__(self, kind: str = _META) -> None:
        super().__init__()
        self._kind = kind
        self._numbers: dict[int, int] = {}  # of storages that are there
        self._events: list[tuple[int, int]] = []  # (number of the storage, bytes more or less)
        self._next = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Runs an operation and charges the storages that it made."""
        if func is torch.ops.aten._local_scalar_dense.default and self._kind == _META:
            return True  # no value: a check whether all is well receives True
        for leaf in tree_leaves((args, kwargs)):
            self._note(leaf, new=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._note(leaf, new=True)
        return result

    def history(self, without: Iterable[Tensor] = ()) -> list[int]:
        """Returns the bytes after each allocation, but for storages of some tensors that are still there."""
        left_out = {self._numbers.get(tensor.untyped_storage()._cdata) for tensor in without}
        in_use, found = 0, []
        for number, change in self._events:
            in_use += 0 if number in left_out else change
            if change > 0:
                found.append(in_use)
        return found

    def _note(self, leaf: object, new: bool) -> None:
        if not isinstance(leaf, Tensor) or leaf.device.type != self._kind:
            return
        storage = leaf.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return
        self._numbers[key] = self._next
        self._next += 1
        size = storage.nbytes() if new else 0
        weakref.finalize(storage, self._forget, key, size).atexit = False
        if size:
            self._events.append((self._numbers[key], size))

    def _forget(self, key: int, size: int) -> None:
        self._events.append((self._numbers.pop(key), -size))


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within the block attention keeps its output and one number per query, as on GPUs, not the matrix of all pairs.

    torch takes the slow way on the meta device.  The kernel here has the memory of the one that a GPU uses with a mask:
    queries, keys, values, output, log-sum-exp in float32, and a boolean mask as numbers.  It takes the function's place
    for all callers, since a mode would not be on while a backward pass computes blocks again.
    """
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


# ------------------------------------------------------------------------------------------------------------ counted
def count(run: Callable[[], Sequence[Tensor]], kind: str = _META) -> tuple[list[int], list[int]]:
    """Returns the bytes after each allocation of `run`, (in all, without the tensors that it returns)."""
    gc.collect()
    with ByteCounter(kind) as counter, fused_attention():
        kept = run()
    return counter.history(), counter.history(without=kept)


def envelope(first: Sequence[int], second: Sequence[int]) -> Envelope:
    """Returns the peak for any number of rows, from the histories for 2 and 3 of them."""
    assert len(first) == len(second), f"{len(first)} allocations, then {len(second)}: the work depends on its rows"
    few, more = ROWS
    slopes = [(b - a) / (more - few) for a, b in zip(first, second, strict=True)]
    return envelope_of((a - few * slope, slope) for a, slope in zip(first, slopes, strict=True))
