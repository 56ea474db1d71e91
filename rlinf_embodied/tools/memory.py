"""What a large policy's rollout and training hold on a device, in bytes: formulas over shapes and counts, without any
constant of a model.

    n parameters, P of them trained, b bytes per value in a pass (2: bfloat16, 4: float32), N devices, r rows

    term                     replicated        sharded over N            source
    weights                  b n               slices, 4 P + b (n - P)   `weights`, `slices`
    master weights           4 P where b < 4   (the slices)              `masters`
    gradients                4 P per vector    4 P                       `replicated_work`, `sharded_work`
    Adam's moments           8 P               8 P / N                   `moments`
    activations              counted           the same                  `pass_work`

Everything that a model determines (shapes, activations) is read off the model itself on torch's meta device
(tools/footprint.py).  What kernels take while they run, a communication library's buffers, the allocator's fragments
and the simulator's own memory are in no term: leave room for them.

Where that fits: both resident (a device holds what rollout and actor need at any time; they run sequentially),
switching (the one that does not work leaves the device), apart (half of the devices are the actor's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from rlinf_embodied.config import MemoryConfig
from rlinf_embodied.learning.gradients import checkpoint_blocks
from rlinf_embodied.learning.sharded import sharding_units
from rlinf_embodied.tools.footprint import ROWS, Envelope, count, envelope

FLOAT32 = 4  # bytes of what a learner steps: see learning/optimizer.py, which refuses less
_SUMS_HELD = 1  # gradients of a worker's earlier blocks while another one is computed: see reduce.py `_RunningSum`
_STEP_VECTORS = 3  # see `replicated_work`
GB = 1e9
_PLAIN, _CHECKPOINTED = "plain", "checkpointed"
_COLUMN = {False: _PLAIN, True: _CHECKPOINTED}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """What a forward and backward pass allocates in addition to weights; both differ where gradients are large."""

    with_gradients: Envelope  # gradients appear one after the other, as in torch.autograd.grad
    into_gradients: Envelope  # they are added to vectors that exist already


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    """A policy as far as memory is concerned."""

    parameters: tuple[Parameter, ...]
    value_bytes: int  # b
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


class LargePolicy(Protocol):
    """A policy on the meta device, as a plan of its memory needs it (an OpenVLA: policies/openvla/footprint.py)."""

    module: nn.Module

    def blocks(self) -> Sequence[nn.Module]:
        """Returns what activation checkpointing computes again, one after the other."""
        ...

    def loss(self, rows: int) -> Tensor:
        """Makes a training pass over rows, its inputs included."""
        ...

    def act(self, rows: int) -> None:
        """Answers observations of rows as in a rollout."""
        ...


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


# ------------------------------------------------------------------------------------------------------------ counted
def pass_work(policy: LargePolicy) -> PassWork:
    """Returns what a pass of a policy allocates; see PassWork."""
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    counted = [count(partial(_gradients, policy, rows, trained)) for rows in ROWS]
    whole, rest = (envelope(*histories) for histories in zip(*counted, strict=True))
    return PassWork(with_gradients=whole, into_gradients=rest)


def policy_shape(policy: LargePolicy) -> PolicyShape:
    """Returns what a plan of memory needs of a policy on the meta device; its blocks are checkpointed afterwards."""
    rollout = envelope(*(count(partial(_no_tensors, policy.act, rows))[0] for rows in ROWS))
    plain = pass_work(policy)
    checkpoint_blocks(policy.blocks())
    return PolicyShape(
        parameters=tuple(parameters(policy.module)),
        value_bytes=max(p.element_size() for p in policy.module.parameters()),
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


# ---------------------------------------------------------------------------------------------------------- placements
class Placement(StrEnum):
    """Where rollout and actor are."""

    resident = "both resident"
    switching = "switching"
    apart = "apart"


class LearnerKind(StrEnum):
    """Who holds what of the weights."""

    replicated = "replicated"
    sharded = "sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one device holds under one arrangement, as a function of the rows of a training pass."""

    learner: LearnerKind
    num_devices: int
    placement: Placement
    checkpointing: bool
    actor: Envelope  # of a device that trains, rollouts included where they are on it
    rollout: float  # of a device that only makes rollouts; 0 without such a device

    def needed(self, rows: int) -> float:
        """The bytes of the fullest device."""
        return max(self.actor.at(rows), self.rollout)

    def most_rows(self, room: float) -> int:
        """The largest training pass that fits; 0 if none does."""
        return self.actor.most_rows(room) if self.rollout <= room else 0


def fits(policy: PolicyShape, num_devices: Sequence[int], rollout_rows: int) -> list[Fit]:
    """Returns all arrangements; replicated ones of several devices once, as each device holds the same."""
    work = policy.rollout.at(rollout_rows)
    found = []
    for learner, number in _learners(num_devices):
        for checkpointing in (False, True):
            found += [
                _fit(policy, learner, number, placement, checkpointing, work)
                for placement in Placement
                if placement is not Placement.apart or number >= 2
            ]
    return found


def _learners(num_devices: Sequence[int]) -> Iterator[tuple[LearnerKind, int]]:
    yield LearnerKind.replicated, max(num_devices)
    yield from ((LearnerKind.sharded, number) for number in num_devices)


def _fit(
    policy: PolicyShape, learner: LearnerKind, number: int, placement: Placement, checkpointing: bool, rollout: float
) -> Fit:
    training = number // 2 if placement is Placement.apart else number
    if learner is LearnerKind.replicated:
        own, view = weights(policy) + masters(policy) + moments(policy), 0.0
        work = replicated_work(policy, checkpointing)
    else:
        own = slices(policy, training) + moment_slices(policy, training)
        view = weights(policy)  # that rollouts read: learning/sharded.py
        work = sharded_work(policy, training, checkpointing)
    alone = weights(policy) + rollout
    actors = {
        Placement.resident: work.or_at_least(rollout).plus(own + view),
        Placement.switching: work.plus(own).or_at_least(alone),
        Placement.apart: work.plus(own),
    }
    return Fit(
        learner=learner,
        num_devices=number,
        placement=placement,
        checkpointing=checkpointing,
        actor=actors[placement],
        rollout=alone if placement is Placement.apart else 0.0,
    )


# ------------------------------------------------------------------------------------------------------------- tables
def term_rows(policies: dict[str, PolicyShape]) -> list[dict[str, str]]:
    """Returns a table of the terms: a row per term, a column per policy."""
    by_policy = {name: _terms(policy) for name, policy in policies.items()}
    names = next(iter(by_policy.values()))
    return [{"term": term} | {name: terms[term] for name, terms in by_policy.items()} for term in names]


def _terms(policy: PolicyShape) -> dict[str, str]:
    per_row = {
        "activations of a pass": policy.plain.with_gradients.per_row,
        "the same, checkpointed": policy.checkpointed.with_gradients.per_row,
        "a rollout's call, its cache included": policy.rollout.per_row,
    }
    whole = {
        "weights": weights(policy),
        "master weights": masters(policy),
        "gradient": gradient(policy),
        "Adam's moments": moments(policy),
    }
    counts = {"parameters": policy.num_parameters, "of them trained": policy.num_trained}
    return (
        {name: f"{count:,}" for name, count in counts.items()}
        | {f"{name}, GB": f"{size / GB:.2f}" for name, size in whole.items()}
        | {f"{name}, MB a row": f"{size / 1e6:.2f}" for name, size in per_row.items()}
    )


def fit_rows(method: str, found: Sequence[Fit], rows: int, room: float) -> list[dict[str, str]]:
    """Returns a table of arrangements: bytes with `rows` rows, what is left or missing, the largest pass that fits."""
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for fit in found:
        devices = f"up to {fit.num_devices}" if fit.learner is LearnerKind.replicated else str(fit.num_devices)
        key = (method, fit.learner.value, devices, fit.placement.value)
        line = table.setdefault(key, dict(zip(("method", "learner", "devices", "placement"), key, strict=True)))
        name = _COLUMN[fit.checkpointing]
        needed = fit.needed(rows)
        left = (room - needed) / GB
        line[f"{name}, GB"] = f"{needed / GB:.1f}"
        line[f"{name}: left"] = f"{left:.1f}" if left >= 0 else f"lacks {-left:.1f}"
        line[f"{name}: most rows"] = str(fit.most_rows(room))
        if fit.rollout > room:
            line["placement"] = f"{fit.placement.value} (rollout does not fit)"
    return list(table.values())


def memory_tables(model: str, shapes: dict[str, PolicyShape], config: MemoryConfig) -> dict[str, list[dict[str, str]]]:
    """Returns, by title, what a model holds in bytes under each way to train it, and where that fits."""
    arranged = {method: fits(shape, config.num_devices, config.rollout_rows) for method, shape in shapes.items()}
    room = config.room_bytes
    found = [row for method, fit in arranged.items() for row in fit_rows(method, fit, config.microbatch, room)]
    return {
        f"{model}: bytes, passes in {config.precision.value}": term_rows(shapes),
        f"GB of the fullest device, of {room / GB:g}: passes of {config.microbatch} rows, rollouts of "
        f"{config.rollout_rows} rows": found,
    }
