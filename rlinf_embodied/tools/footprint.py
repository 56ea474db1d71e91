"""Counts the bytes that a piece of torch code allocates, on any device and on "meta", where nothing is computed.

    code on a module without memory -> every new storage is charged, every freed one given back -> bytes over time
    twice, with unequal numbers of rows -> (fixed, per row) at each moment -> the peak for any number of rows

What a kernel takes for itself while it runs is not seen, nor what an allocator keeps or loses to fragments.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlinf_embodied.learning.gradients import checkpoint_blocks
from rlinf_embodied.learning.sharded import sharding_units
from rlinf_embodied.tools.memory import Envelope, KeyValueShape, Parameter, PassWork, PolicyShape, envelope_of

_ROWS = (2, 3)  # many operations return views where there is a single row
_META = "meta"


class LargePolicy(Protocol):
    """A policy on the meta device, as a plan of its memory needs it (an OpenVLA: policies/openvla/footprint.py)."""

    module: nn.Module
    num_layers: int  # of the language model
    num_heads: int  # of its keys and values
    head_dim: int
    rollout_tokens: int  # that a row's cache holds at its fullest
    logits_columns: int
    training_positions: int  # of a row, whose log-probs are asked for

    def blocks(self) -> Sequence[nn.Module]:
        """Returns what activation checkpointing computes again, one after the other."""
        ...

    def loss(self, rows: int) -> Tensor:
        """Makes a training pass over rows, its inputs included."""
        ...

    def act(self, rows: int) -> None:
        """Answers observations of rows as in a rollout."""
        ...


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
    few, more = _ROWS
    slopes = [(b - a) / (more - few) for a, b in zip(first, second, strict=True)]
    return envelope_of((a - few * slope, slope) for a, slope in zip(first, slopes, strict=True))


def pass_work(policy: LargePolicy) -> PassWork:
    """Returns what a pass of a policy allocates; see PassWork."""
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    counted = [count(partial(_gradients, policy, rows, trained)) for rows in _ROWS]
    whole, rest = (envelope(*histories) for histories in zip(*counted, strict=True))
    return PassWork(with_gradients=whole, into_gradients=rest)


def policy_shape(policy: LargePolicy) -> PolicyShape:
    """Returns what a plan of memory needs of a policy on the meta device; its blocks are checkpointed afterwards."""
    rollout = envelope(*(count(partial(_no_tensors, policy.act, rows))[0] for rows in _ROWS))
    plain = pass_work(policy)
    checkpoint_blocks(policy.blocks())
    return PolicyShape(
        parameters=tuple(parameters(policy.module)),
        value_bytes=max(p.element_size() for p in policy.module.parameters()),
        cache=KeyValueShape(num_layers=policy.num_layers, num_heads=policy.num_heads, head_dim=policy.head_dim),
        rollout_tokens=policy.rollout_tokens,
        logits_columns=policy.logits_columns,
        training_positions=policy.training_positions,
        rollout=rollout,
        plain=plain,
        checkpointed=pass_work(policy),
    )


def parameters(module: nn.Module) -> list[Parameter]:
    """Returns the shapes of a module's parameters, with the units that FSDP2 gathers them in."""
    units = {id(p): k for k, unit in enumerate(sharding_units(module)[:-1], 1) for p in unit.parameters()}
    return [Parameter(tuple(p.shape), p.requires_grad, units.get(id(p), 0)) for p in module.parameters()]


def _gradients(policy: LargePolicy, rows: int, trained: Sequence[nn.Parameter]) -> list[Tensor]:
    found = torch.autograd.grad(policy.loss(rows), list(trained), allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _no_tensors(run: Callable[[int], None], rows: int) -> list[Tensor]:
    run(rows)
    return []
