"""What Ray sends: a call as plain values, for msgpack, where a dataclass would need a pickler; and its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlinf_embodied.runtime import tensor_wire
from rlinf_embodied.runtime.host import Call, LocalRef, Receipt, StepContext
from rlinf_embodied.runtime.relay import Part

Wire = list[Any]


def to_wire(call: Call, attempt: int) -> Wire:
    """Returns a call without its argument, bearing the token of an attempt."""
    at = call.step_context
    return [
        call.stage,
        call.method,
        [at.iteration, attempt, at.round, at.chunk_step, at.chunk, at.num_chunks, at.message, at.staleness, at.oldest],
        list(call.blocks),
        call.payloads_per_block,
        list(call.keep),
        call.partner,
        call.chunk_steps,
        call.publishes,
        [[[part.worker, list(part.blocks)] for part in shard] for shard in call.relay],
    ]


def from_wire(wire: Wire, argument: object = None) -> Call:
    """Returns the call of `to_wire`, with its argument."""
    stage, method, at, blocks, count, keep, partner, chunk_steps, publishes, relay = wire
    return Call(
        stage,
        method,
        StepContext(*at),
        tuple(blocks),
        count,
        frozenset(keep),
        partner,
        chunk_steps,
        argument,
        publishes,
        tuple(tuple(Part(worker, tuple(own)) for worker, own in shard) for shard in relay),
    )


def pack_result(result: object) -> object:
    """Returns what a worker sends; of a receipt only the report may hold tensors (weights), its spans are many."""
    if isinstance(result, Receipt):
        return replace(result, report=tensor_wire.pack(result.report))
    return result if isinstance(result, LocalRef) else tensor_wire.pack(result)


def unpack_result(value: object) -> object:
    """Returns what `pack_result` was given."""
    if isinstance(value, Receipt):
        return replace(value, report=tensor_wire.unpack(value.report))
    return tensor_wire.unpack(value)
