"""Runs the chunk-steps of a loop from an answerer's worker, which calls its openers itself, without the driver.

    driver --open--> opener's worker --message-.                             .--> driver: close, of both
       `----relay (references, unread)----> answerer's worker: answers, --step--> opener's worker
                                               ^---------- message, receipt ---------'

Messages and answers travel between the two workers only.  The answerer's worker owns these references, which end
with its call; those that the driver passes on (`open`, `close`) are the driver's.  Calls carry their attempt: when it
is abandoned, the answerer's worker stops waiting, and openers refuse the remaining calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlinf_embodied.runtime.host import Call, StepContext

Ref = object  # opaque to everyone but the session that made it
Answer = Callable[["StepContext", dict[int, object]], Mapping[int, object]]  # to the opener's messages, by block
Shard = Mapping[int, tuple[int, ...]]  # blocks of one shard by their opener's worker


class Peers(Protocol):
    """The interface by which a worker calls other workers."""

    def ask(self, worker: int, call: Call, payloads: Sequence[object]) -> list[Ref]:
        """Submits a call; returns its block results, then its receipt, as references."""
        ...

    def take(self, refs: Sequence[Ref], workers: Sequence[int]) -> list[object]:
        """Waits for results of these workers; raises their errors, or one for a lost worker or abandoned call."""
        ...


def shards_of(
    opener: Sequence[int], answerer: Sequence[int], shards: Sequence[set[int]]
) -> dict[int, tuple[Shard, ...]]:
    """Returns the shards that each of an answerer's workers relays; {} if the driver has to make the calls.

    Every opener's worker must have exactly one answerer's worker, and none may be both: it would wait for itself.
    `opener` and `answerer` are the workers that own each block on either side.
    """
    answerers: dict[int, set[int]] = {}  # by opener's worker
    for opener_worker, answerer_worker in zip(opener, answerer, strict=True):
        answerers.setdefault(opener_worker, set()).add(answerer_worker)
    if set(opener) & set(answerer) or any(len(workers) > 1 for workers in answerers.values()):
        return {}
    relayed = {}
    for hub in sorted(set(answerer)):
        openers = [worker for worker, (owner,) in sorted(answerers.items()) if owner == hub]
        cut = [{w: tuple(b for b in sorted(shard) if opener[b] == w) for w in openers} for shard in shards]
        nonempty = ({worker: blocks for worker, blocks in parts.items() if blocks} for parts in cut)
        relayed[hub] = tuple(parts for parts in nonempty if parts)
    return relayed


def run(call: Call, opened: Sequence[Ref], peers: Peers, answer: Answer) -> tuple[list[object], list[object]]:
    """Runs the chunk-steps of a relayed call.

    A shard ends when none of its blocks has a message any more.

    Returns:
        the last messages, in the order of call.blocks, and the receipts of the openers' steps.
    """
    pending = dict(zip(call.blocks, opened, strict=True))  # the opener's latest message of each block
    receipts: list[Ref] = []
    running = list(call.relay)
    assert call.partner is not None
    step = replace(call, stage=call.partner, method="step", keep=frozenset(), partner=None, relay=())
    for number in range(call.chunk_steps):
        step_context = replace(call.step_context, chunk_step=number)
        for shard in tuple(running):
            blocks, workers = sorted(itertools.chain.from_iterable(shard.values())), list(shard)
            messages = dict(zip(blocks, peers.take([pending[block] for block in blocks], workers), strict=True))
            if all(message is None for message in messages.values()):
                running.remove(shard)
                continue
            answers = answer(step_context, messages)
            for worker, owned in shard.items():
                step_call = replace(step, step_context=step_context, blocks=owned)
                refs = peers.ask(worker, step_call, [answers[block] for block in owned])
                pending |= zip(owned, refs, strict=False)
                receipts.append(refs[-1])
    openers = sorted({worker for shard in call.relay for worker in shard})
    return peers.take([pending[block] for block in call.blocks], openers), peers.take(receipts, openers)
