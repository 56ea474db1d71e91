"""What a large policy's rollout and training hold on a device, in bytes: formulas over shapes, without any constant of
a model.

    n parameters, P of them trained, b bytes per value in a pass (2: bfloat16, 4: float32), N devices, r rows

    term                     replicated        sharded over N            source
    weights                  b n               slices, 4 P + b (n - P)   `weights`, `slices`
    master weights           4 P where b < 4   (the slices)              `masters`
    gradients                4 P per vector    4 P                       `replicated_work`, `sharded_work`
    Adam's moments           8 P               8 P / N                   `moments`
    activations              Envelope          the same                  `Envelope`
    key-value cache          per row and token                           `key_values`
    logits                   per position                                `logits`

Everything that a model determines (shapes, activations) is read off the model itself on torch's meta device
(tools/footprint.py).  What kernels take while they run, a communication library's buffers, the allocator's fragments
and the simulator's own memory are in no term: leave room for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FLOAT32 = 4  # bytes of what a learner steps: see learning/optimizer.py, which refuses less
_SUMS_HELD = 1  # gradients of a worker's earlier blocks while another one is computed: see reduce.py `_RunningSum`
_STEP_VECTORS = 3  # see `replicated_work`


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, as Parameter((4096, 32), trained=True, unit=3)."""

    shape: tuple[int, ...]
    trained: bool
    unit: int = 0  # what FSDP2 gathers it with: 0 all that is in no layer, k the k-th layer

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    def slice_size(self, num_devices: int) -> int:
        """The values of the largest slice: FSDP2 cuts the first axis into N pieces of ceil(length / N), so that the
        first device has a whole one (torch.distributed.fsdp.fully_shard, `Shard(0)`)."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // num_devices) * (self.size // max(rows, 1))


# -------------------------------------------------------------------------------------------------------- activations
@dataclass(frozen=True, slots=True)
class Envelope:
    """Peak bytes of some work on r rows: the largest fixed + per_row * r over the moments of the work.

    Activations of a pass are proportional to its rows while gradients are not, and the moment of the peak depends on r;
    so each moment is a line, and only lines that are the highest for some r are kept.  The lines come from counting
    every allocation of the real code twice, with unequal numbers of rows (tools/footprint.py).  With checkpointing
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


# ------------------------------------------------------------------------------------------------------------- shapes
@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """What a forward and backward pass allocates in addition to weights; both differ where gradients are large."""

    with_gradients: Envelope  # gradients appear one after the other, as in torch.autograd.grad
    into_gradients: Envelope  # they are added to vectors that exist already


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueShape:
    """Of a language model's cache."""

    num_layers: int
    num_heads: int  # of keys and values
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    """A policy as far as memory is concerned."""

    parameters: tuple[Parameter, ...]
    value_bytes: int  # b
    cache: KeyValueShape
    rollout_tokens: int  # that the cache of a row holds at its fullest
    logits_columns: int
    training_positions: int  # of a row, whose log-probs are asked for
    rollout: Envelope  # one policy call
    plain: PassWork
    checkpointed: PassWork = field(repr=False)

    @property
    def num_parameters(self) -> int:
        """All values, n."""
        return sum(p.size for p in self.parameters)

    @property
    def num_trained(self) -> int:
        """Those that are trained, P."""
        return sum(p.size for p in self.parameters if p.trained)

    def work(self, checkpointing: bool) -> PassWork:
        """A pass with or without activation checkpointing."""
        return self.checkpointed if checkpointing else self.plain


# -------------------------------------------------------------------------------------------------------------- terms
def weights(policy: PolicyShape) -> float:
    """b n: the weights that passes and rollouts compute with."""
    return float(policy.value_bytes * policy.num_parameters)


def masters(policy: PolicyShape) -> float:
    """4 P where passes compute in less than float32, else 0, as the weights are the masters themselves.

    Source: Micikevicius et al. 2018, arXiv:1710.03740 (a float32 copy is what the optimizer steps).
    """
    return float(FLOAT32 * policy.num_trained) if policy.value_bytes < FLOAT32 else 0.0


def gradient(policy: PolicyShape) -> float:
    """4 P: one flat float32 gradient (learning/gradients.py `block_sums`)."""
    return float(FLOAT32 * policy.num_trained)


def moments(policy: PolicyShape) -> float:
    """8 P: Adam's two moments in float32 (Kingma and Ba, arXiv:1412.6980; learning/optimizer.py `FlatOptimizer`)."""
    return 2.0 * FLOAT32 * policy.num_trained


def key_values(cache: KeyValueShape, tokens: int, value_bytes: int) -> float:
    """2 layers * heads * head_dim * tokens * b: keys and values of a row (Pope et al. 2022, arXiv:2211.05102, 3.3)."""
    return 2.0 * cache.num_layers * cache.num_heads * cache.head_dim * tokens * value_bytes


def logits(positions: int, columns: int, value_bytes: int) -> float:
    """positions * columns * b: the logits of a row as the output layer makes them."""
    return float(positions * columns * value_bytes)


def slices(policy: PolicyShape, num_devices: int) -> float:
    """4 ceil(P / N) + b ceil((n - P) / N), by first axes: a device's part of the weights under FSDP2.

    Source: learning/sharded.py; Rajbhandari et al. 2020, arXiv:1910.02054, stage 3; `Parameter.slice_size`.
    """
    sizes = [(p.slice_size(num_devices), FLOAT32 if p.trained else policy.value_bytes) for p in policy.parameters]
    return float(sum(size * width for size, width in sizes))


def moment_slices(policy: PolicyShape, num_devices: int) -> float:
    """8 ceil(P / N), by first axes: a device's part of Adam's moments."""
    return 2.0 * FLOAT32 * sum(p.slice_size(num_devices) for p in policy.parameters if p.trained)


def units(policy: PolicyShape) -> tuple[int, int]:
    """Returns the values of (all that lies in no layer, the largest layer): what FSDP2 gathers at once."""
    sizes: dict[int, int] = {}
    for parameter in policy.parameters:
        sizes[parameter.unit] = sizes.get(parameter.unit, 0) + parameter.size
    return sizes.get(0, 0), max((size for unit, size in sizes.items() if unit), default=0)


# --------------------------------------------------------------------------------------------------------------- work
def replicated_work(policy: PolicyShape, checkpointing: bool) -> Envelope:
    """What ReplicatedLearner allocates for passes and a step, in addition to weights, masters and moments.

        pass   D (1 + earlier sums) + max(activations and gradients, gradients + D)
        step   3 D

    with D = 4 P.  In a pass `block_sums` holds its total while `autograd.grad` makes gradients, which are then joined
    to one more vector; `_RunningSum` holds the sum of earlier blocks.  A step holds the total, which becomes the mean
    gradient and is clipped where it lies, and a float64 copy for its norm, or in `FlatOptimizer._direction` the scale
    and the direction.
    """
    flat = gradient(policy)
    joined = policy.value_bytes * policy.num_trained + flat
    held = flat * (1 + _SUMS_HELD)
    return policy.work(checkpointing).with_gradients.or_at_least(joined).plus(held).or_at_least(_STEP_VECTORS * flat)


def sharded_work(policy: PolicyShape, num_devices: int, checkpointing: bool) -> Envelope:
    """What ShardedLearner allocates for several passes and a step, in addition to slices and moments.

        pass             b (root + 2 layers) + 4 P + activations
        last pass, end   b root + 4 P + 4 root (1 + 1 / N)
        step             8 ceil(P / N)

    Gathered are all that lies in no layer, which stays until the backward pass is over, the layer at hand and the one
    that is fetched ahead; gradients stay whole until the last pass, then travel unit by unit through a buffer into
    slices (learning/sharded.py; torch.distributed.fsdp.fully_shard, `reshard_after_forward` and
    `set_requires_gradient_sync`).  In AdamW's step there are slices of gradients and of the moments' roots
    (torch.optim.adamw `_multi_tensor_adam`).
    """
    root, layer = units(policy)
    width = policy.value_bytes
    trained_root = sum(p.size for p in policy.parameters if p.trained and not p.unit)
    sent = width * root + gradient(policy) + FLOAT32 * trained_root * (1 + 1 / num_devices)
    passes = policy.work(checkpointing).into_gradients.plus(width * (root + 2 * layer) + gradient(policy))
    return passes.or_at_least(sent).or_at_least(moment_slices(policy, num_devices))
