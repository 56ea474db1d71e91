"""What a plan costs: the formulas, on single numbers and on arrays of candidates alike.

A node's price says when its chunks come out if its input is there at once: the first after `first_s`, the others every
`period_s`.  K chunks take first_s + (K - 1) * period_s.  Downstream of a slower part its period is that part's,
which is why a pipeline's period is the largest of all, and its first output the sum.

    pipeline   first = first_a + transfer + first_b              period = max(period_a, transfer, period_b)
    temporal   first = first_a + first_b                         period = first_a + first_b
    barrier    all K chunks of a, the switch, then b's chunks    a's period matters before it, b's behind it

A barrier cuts a price in two segments: (first_s, period_s) before it, (rest_s, last_s) behind; rest_s runs from the
last output before the barrier to the first one behind.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Number = Array | float  # what a formula takes


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds, bytes on the fullest device, and what the node must know of its context; numbers or arrays alike."""

    first_s: Array
    period_s: Array
    barrier: Array  # 1: rest_s and last_s hold
    rest_s: Array
    last_s: Array
    enter_s: Array  # loading what runs first
    late_s: Array  # of that, loading what runs first but after something else: it waits for its turn
    leave_s: Array  # offloading what ran last
    wrap_s: Array  # from the end of an iteration to the start of the next one: switches back
    weights_s: Array  # sending new weights at the end of an iteration
    held_bytes: Array  # while others run
    peak_bytes: Array  # at worst, while itself runs
    offloaded_bytes: Array  # once offloaded
    everywhere: NDArray[np.int64]  # bit mask of the stages that run on every device of the node
    narrowest: NDArray[
        np.int64
    ]  # devices of the stage that has the fewest: how many may send or receive at once, at least


def total_s(price: Price, chunks: int) -> Array:
    """Returns seconds from the first input to the last output of `chunks` chunks."""
    behind = price.rest_s + _further(chunks, price.last_s)
    return price.first_s + _further(chunks, price.period_s) + _if(price.barrier, behind)


def iteration_s(price: Price, chunks: int = 1) -> Array:
    """Returns seconds per iteration: the work, the switches back, and the new weights."""
    return total_s(price, chunks) + price.wrap_s + price.weights_s


def collapse(price: Price, chunks: int) -> Price:
    """Returns the price of a chunked node as one that hands everything on at its end."""
    whole = total_s(price, chunks)
    zero = np.zeros_like(whole)
    return replace(price, first_s=whole, period_s=whole, barrier=zero, rest_s=zero, last_s=zero)


def pipeline(a: Price, b: Price, chunks: int, transfer_s: Number, weights_s: Number) -> Price:
    """Returns the price of `a` streaming to `b` on other devices; `transfer_s` per chunk, `weights_s` per iteration."""
    a_cut, b_cut = np.asarray(a.barrier) > 0, np.asarray(b.barrier) > 0
    a_out = np.where(a_cut, a.last_s, a.period_s)
    met = np.maximum(np.maximum(a_out, transfer_s), b.period_s)  # period at which b's first segment works
    # a has no barrier: b's first segment joins a's.  a has one: b's first segment joins a's second
    through = a.rest_s + transfer_s + b.first_s
    return replace(
        _apart(a, b, weights_s),
        enter_s=_loaded_s(a.enter_s, a.late_s, b.enter_s, b.late_s),
        late_s=a.late_s + b.late_s,
        wrap_s=_loaded_s(a.wrap_s, a.late_s, b.wrap_s, b.late_s),
        first_s=a.first_s + np.where(a_cut, 0.0, transfer_s + b.first_s),
        period_s=np.where(a_cut, a.period_s, met),
        barrier=np.maximum(a.barrier, b.barrier),
        rest_s=np.where(a_cut, through + _if(b.barrier, _further(chunks, met) + b.rest_s), b.rest_s),
        last_s=np.where(a_cut & ~b_cut, met, b.last_s),
    )


def _loaded_s(a_s: Array, a_late_s: Array, b_s: Array, b_late_s: Array) -> Array:
    """Returns how long two parts load, each on its own devices: at once but for what waits for its turn."""
    a_late_s, b_late_s = np.minimum(a_s, a_late_s), np.minimum(b_s, b_late_s)
    return np.maximum(a_s - a_late_s, b_s - b_late_s) + a_late_s + b_late_s


def side_by_side(a: Price, b: Price, chunks: int, weights_s: Number) -> Price:
    """Returns the price of two parts on disjoint devices, neither of which waits for the other.

    With a barrier inside either, outputs are counted as handed on at the end of the slower one.
    """
    either = np.maximum(a.barrier, b.barrier) > 0
    slower = np.maximum(total_s(a, chunks), total_s(b, chunks))
    first = np.where(either, slower, np.maximum(a.first_s, b.first_s))
    period = np.where(either, 0.0, np.maximum(a.period_s, b.period_s))
    zero = np.zeros_like(first)
    return replace(_apart(a, b, weights_s), first_s=first, period_s=period, barrier=zero, rest_s=zero, last_s=zero)


def _apart(a: Price, b: Price, weights_s: Number) -> Price:
    """Returns what disjoint devices make of two prices: every device has its own switches and memory."""
    zero = np.zeros_like(a.peak_bytes + b.peak_bytes)  # times are the caller's
    return Price(
        first_s=zero,
        period_s=zero,
        barrier=zero,
        rest_s=zero,
        last_s=zero,
        enter_s=np.maximum(a.enter_s, b.enter_s),
        late_s=np.maximum(a.late_s, b.late_s),
        leave_s=np.maximum(a.leave_s, b.leave_s),
        wrap_s=np.maximum(a.wrap_s, b.wrap_s),
        weights_s=a.weights_s + b.weights_s + weights_s,
        held_bytes=np.maximum(a.held_bytes, b.held_bytes),
        peak_bytes=np.maximum(a.peak_bytes, b.peak_bytes),
        offloaded_bytes=np.maximum(a.offloaded_bytes, b.offloaded_bytes),
        everywhere=np.zeros_like(zero, dtype=np.int64),
        narrowest=np.minimum(a.narrowest, b.narrowest),
    )


def temporal(a: Price, b: Price, chunks: int, move_s: Number, weights_s: Number, by_chunk: Number) -> Price:
    """Returns the price of two parts that share devices and stay resident together.

    Args:
        a: the part that goes first.
        b: the part that goes second.
        chunks: chunks per iteration.
        move_s: seconds that a chunk needs from a to b; 0 where it stays in its process.
        weights_s: seconds for new weights, per iteration.
        by_chunk: 1: they alternate chunk by chunk (neither may have a barrier); 0: a does all its chunks first.
    """
    both = a.first_s + move_s + b.first_s
    wait = move_s + b.first_s
    return Price(
        first_s=np.where(by_chunk, both, a.first_s),
        period_s=np.where(by_chunk, both, a.period_s),
        barrier=np.where(by_chunk, 0.0, 1.0),
        rest_s=np.where(by_chunk, 0.0, _until(a, b, chunks, wait)),
        last_s=np.where(by_chunk, 0.0, np.where(np.asarray(b.barrier) > 0, b.last_s, b.period_s)),
        enter_s=a.enter_s + b.enter_s,
        late_s=a.late_s + b.enter_s,
        leave_s=a.leave_s + b.leave_s,
        wrap_s=a.wrap_s + b.wrap_s,
        weights_s=a.weights_s + b.weights_s + weights_s,
        held_bytes=a.held_bytes + b.held_bytes,
        peak_bytes=np.maximum(a.peak_bytes + b.held_bytes, a.held_bytes + b.peak_bytes),
        offloaded_bytes=a.offloaded_bytes + b.offloaded_bytes,
        everywhere=_int(a.everywhere) | _int(b.everywhere),
        narrowest=np.minimum(a.narrowest, b.narrowest),
    )


def switching(a: Price, b: Price, chunks: int, move_s: Number, weights_s: Number) -> Price:
    """Returns the price of two parts that share devices but not their memory: one leaves before the other enters."""
    wait = a.leave_s + b.enter_s + move_s + b.first_s
    return Price(
        first_s=a.first_s,
        period_s=a.period_s,
        barrier=np.ones_like(a.first_s + b.first_s),
        rest_s=_until(a, b, chunks, wait),
        last_s=np.where(np.asarray(b.barrier) > 0, b.last_s, b.period_s),
        enter_s=a.enter_s + 0.0 * b.enter_s,
        late_s=a.late_s + 0.0 * b.late_s,
        leave_s=b.leave_s + 0.0 * a.leave_s,
        wrap_s=b.leave_s + a.enter_s,
        weights_s=a.weights_s + b.weights_s + weights_s,
        held_bytes=np.maximum(a.held_bytes + b.offloaded_bytes, a.offloaded_bytes + b.held_bytes),
        peak_bytes=np.maximum(a.peak_bytes + b.offloaded_bytes, a.offloaded_bytes + b.peak_bytes),
        offloaded_bytes=a.offloaded_bytes + b.offloaded_bytes,
        everywhere=_int(a.everywhere) | _int(b.everywhere),
        narrowest=np.minimum(a.narrowest, b.narrowest),
    )


def _until(a: Price, b: Price, chunks: int, wait_s: Number) -> Array:
    """Returns seconds from the last output before a's first barrier to b's first output behind b's last barrier."""
    rest_of_a = _if(a.barrier, a.rest_s + _further(chunks, a.last_s))
    inside_b = _if(b.barrier, _further(chunks, b.period_s) + b.rest_s)
    return rest_of_a + wait_s + inside_b


def loop_disaggregated_s(
    steps: Number, shards: Number, e: Number, p: Number, up_s: Number, down_s: Number, bootstrap_s: Number
) -> Array:
    """Returns the seconds of a loop whose two sides own disjoint devices, with FIFO queues on both.

    max(H*P*e + p + o, H*P*p + e + o, H*(e + p + 2*o) - o + (P - 1)*max(e, p)) for o = up = down, and what happens at
    the ends: the opening message before the first call of the policy, a closing one and the bootstrap call behind each
    shard's last step.

    Args:
        steps: H, chunk-steps.
        shards: P, parts of the blocks in flight together.
        e: seconds of the simulator for one chunk-step of one shard.
        p: seconds of the policy for the same.
        up_s: from simulator to policy.
        down_s: from policy to simulator.
        bootstrap_s: of the policy's last call, for one shard.
    """
    closing = up_s + bootstrap_s
    simulator_bound = steps * shards * e + p + down_s + closing + (shards - 1) * np.maximum(bootstrap_s - e, 0.0)
    policy_bound = steps * shards * p + np.maximum(down_s + e + closing, shards * bootstrap_s)
    one_shard = steps * (e + p + up_s + down_s) + bootstrap_s
    chain = one_shard + (shards - 1) * np.maximum(np.maximum(e, p), bootstrap_s)
    return up_s + np.maximum(np.maximum(simulator_bound, policy_bound), chain)


def loop_collocated_s(steps: Number, shards: Number, e: Number, p: Number, bootstrap_s: Number) -> Array:
    """Returns the seconds of a loop whose two sides share their devices: H * P * (e + p), and P bootstrap calls."""
    return np.asarray(shards * (steps * (e + p) + bootstrap_s))


def _further(chunks: int, period_s: Number) -> Array:
    """Returns the seconds for all chunks but the first; none where there is only one, however long a period is."""
    return np.asarray((chunks - 1) * period_s) if chunks > 1 else np.zeros_like(period_s)


def _if(barrier: Number, seconds: Number) -> Array:
    """Returns the seconds where there is a barrier, 0 elsewhere (also where they are infinite)."""
    return np.where(np.asarray(barrier) > 0, seconds, 0.0)


def _int(value: Array | NDArray[np.int64] | float) -> NDArray[np.int64]:
    return np.asarray(value).astype(np.int64)


def select(price: Price, index: object) -> Price:
    """Returns the candidates at an index, from every array of a price."""
    return Price(**{entry.name: getattr(price, entry.name)[index] for entry in fields(Price)})
