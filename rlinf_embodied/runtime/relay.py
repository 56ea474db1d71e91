"""The chunk-steps of a loop, run by an answerer's worker that calls its openers itself, without the driver.

    driver --open--> opener's worker --shown--.                              .--> driver: close, of both
       `----relay (references, unread)----> answerer's worker: answers, --step--> opener's worker
                                               ^----------- shown, receipt ----------'

Messages and answers travel between the two workers only.  The answerer's worker owns these references, which end
with its call; those that the driver hands on (`open`, `close`) are the driver's.  Calls carry their attempt: when it is
given up, the answerer's worker stops waiting, and openers refuse what is left.
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
    """The other workers, as a worker sees them that calls them."""

    def ask(self, worker: int, call: Call, payloads: Sequence[object]) -> list[Ref]:
        """Submits a call; returns its block results, then its receipt, as references."""
        ...

    def take(self, refs: Sequence[Ref], workers: Sequence[int]) -> list[object]:
        """Waits for values that these workers make; raises what one of them raised, or that it or its call is gone."""
        ...


def shards_of(
    opener: Sequence[int], answerer: Sequence[int], shards: Sequence[set[int]]
) -> dict[int, tuple[Shard, ...]]:
    """Returns what each of an answerer's workers would relay; nothing where the driver has to.

    Every opener's worker must have one worker that answers it, and none may be both: it would wait for itself.
    `opener` and `answerer` are the workers that own each block on either side.
    """
    answers: dict[int, set[int]] = {}
    for ours, theirs in zip(opener, answerer, strict=True):
        answers.setdefault(ours, set()).add(theirs)
    if set(opener) & set(answerer) or any(len(workers) > 1 for workers in answers.values()):
        return {}
    found = {}
    for hub in sorted(set(answerer)):
        mine = [worker for worker, (owner,) in sorted(answers.items()) if owner == hub]
        cut = [{w: tuple(b for b in sorted(shard) if opener[b] == w) for w in mine} for shard in shards]
        own = ({worker: blocks for worker, blocks in parts.items() if blocks} for parts in cut)
        found[hub] = tuple(parts for parts in own if parts)
    return found


def run(call: Call, opened: Sequence[Ref], peers: Peers, answer: Answer) -> tuple[list[object], list[object]]:
    """Runs the chunk-steps of a relayed call.

    A shard is over when none of its blocks has a message any more.

    Returns:
        the last messages, in the order of call.blocks, and the receipts of the openers' steps.
    """
    coming = dict(zip(call.blocks, opened, strict=True))
    receipts: list[Ref] = []
    going = list(call.relay)
    assert call.partner is not None
    step = replace(call, stage=call.partner, method="step", keep=frozenset(), partner=None, relay=())
    for number in range(call.chunk_steps):
        step_context = replace(call.step_context, chunk_step=number)
        for shard in tuple(going):
            blocks, workers = sorted(itertools.chain.from_iterable(shard.values())), list(shard)
            messages = dict(zip(blocks, peers.take([coming[block] for block in blocks], workers), strict=True))
            if all(message is None for message in messages.values()):
                going.remove(shard)
                continue
            answers = answer(step_context, messages)
            for worker, own in shard.items():
                asked = replace(step, step_context=step_context, blocks=own)
                refs = peers.ask(worker, asked, [answers[block] for block in own])
                coming |= zip(own, refs, strict=False)
                receipts.append(refs[-1])
    openers = sorted({worker for shard in call.relay for worker in shard})
    return peers.take([coming[block] for block in call.blocks], openers), peers.take(receipts, openers)
