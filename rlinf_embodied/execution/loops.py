"""Has the calls of a loop submitted: blocks go round between opener and answerer.

    run_fused      both live in the same workers                    one call per worker
    run_stepwise   each opener's worker has one that answers it     one call per answerer's worker, which calls the
                                                                    opener's (runtime/relay.py)
                   otherwise                                        a call per chunk-step, shard and worker, submitted
                                                                    all at once

Always shard by shard, so that one shard's simulator runs while the other's policy does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlinf_embodied.execution.hosts import Hosts
from rlinf_embodied.execution.iteration import Iteration
from rlinf_embodied.execution.submitter import Submitter
from rlinf_embodied.runtime import relay
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.runtime.transport import Handover
from rlinf_embodied.workflow.graph import Loop, Workflow


class Loops:
    """The loops of one workflow under one plan."""

    def __init__(
        self, workflow: Workflow, hosts: Hosts, handover: Handover, submitter: Submitter, *, always_store: bool
    ) -> None:
        """Submits nothing yet.

        Args:
            workflow: whose loops they are.
            hosts: of its stages.
            handover: what stays in the worker that made it.
            submitter: takes the calls.
            always_store: whether all data goes through the store.
        """
        self._workflow, self._hosts, self._handover = workflow, hosts, handover
        self._submitter, self._always_store = submitter, always_store

    def run_fused(self, loop: Loop, state: Iteration) -> None:
        """Submits a loop whose stages live in the same workers: one call per worker."""
        calls, sources = [], self._outside(loop)
        keep = self._handover.stays[loop.opener]
        for worker in self._hosts.workers(loop.opener):
            blocks = self._hosts.blocks(loop.opener, worker)
            inputs = [ref for block in blocks for source in sources for ref in state.outputs[source][block]]
            call = Call(
                *(loop.opener, "loop", state.step_context, blocks, len(inputs) // len(blocks), keep),
                partner=loop.answerer,
                chunk_steps=loop.chunk_steps,
            )
            calls.append((worker, call, inputs))
        answers = self._submitter.submit(calls, state)
        for (_, call, _), refs in zip(calls, answers, strict=True):
            size = len(call.blocks)
            for place, side in enumerate(call.makers):
                for block, ref in zip(call.blocks, refs[place * size : (place + 1) * size], strict=True):
                    state.outputs.setdefault(side, {}).setdefault(block, []).append(ref)
        state.receipts.append((loop.opener, [refs[-1] for refs in answers]))

    def _outside(self, loop: Loop) -> list[str]:
        """Returns the stages before a loop whose data its opener takes."""
        return [source for source in self._workflow.sources(loop.opener) if source not in loop.sides]

    def run_stepwise(self, loop: Loop, num_shards: int, state: Iteration) -> None:
        """Submits a loop as calls of a chunk-step, a shard and a worker, or as one that relays to each answerer."""
        shards = self._hosts.shards(loop.opener, num_shards)
        sources, messages = self._outside(loop), {}
        given = {b: [ref for s in sources for ref in state.outputs[s][b]] for b in range(self._workflow.num_blocks)}
        for shard in shards:
            messages |= self._exchange(loop.opener, "open", shard, given, state)
        ends: dict[int, list[Ref]] = {}
        owners = self._hosts.owners[loop.opener], self._hosts.owners[loop.answerer]
        relayed = relay.shards_of(*owners, shards) if self._submitter.relays else {}
        if relayed:
            messages, ends = self._relay(loop, relayed, messages, state)
        for step in range(0 if relayed else loop.chunk_steps):
            step_context = replace(state.step_context, chunk_step=step)
            for shard in shards:
                answers = self._exchange(loop.answerer, "step", shard, messages, state, step_context)
                messages |= self._exchange(loop.opener, "step", shard, answers, state, step_context)
        for shard in shards:
            self._exchange(loop.answerer, "close", shard, messages, state, final=True)
            self._exchange(loop.opener, "close", shard, ends, state, final=True)

    def _relay(
        self,
        loop: Loop,
        relayed: Mapping[int, tuple[relay.Shard, ...]],
        messages: Mapping[int, list[Ref]],
        state: Iteration,
    ) -> tuple[dict[int, list[Ref]], dict[int, list[Ref]]]:
        """Submits all chunk-steps as one call to each of the answerer's workers (runtime/relay.py).

        Returns by block what the opener shows last, and what is there when the opener's steps are over: its `close` has
        to come after them, although they are not the driver's calls.
        """
        calls = []
        for worker, shards in relayed.items():
            blocks = self._hosts.blocks(loop.answerer, worker)
            keep = frozenset() if self._always_store else frozenset(blocks)
            call = Call(
                *(loop.answerer, "relay", state.step_context, blocks, 1, keep),
                partner=loop.opener,
                chunk_steps=loop.chunk_steps,
                relay=shards,
            )
            calls.append((worker, call, [ref for block in blocks for ref in messages[block]]))
        answers = self._submitter.submit(calls, state)
        state.timings.extend(refs[-1] for refs in answers)
        last, ends = {}, {}
        for (_, call, _), (*shown, end, _) in zip(calls, answers, strict=True):
            last |= {block: [ref] for block, ref in zip(call.blocks, shown, strict=True)}
            ends |= {block: [end] for block in call.blocks}
        return last, ends

    def _exchange(
        self,
        stage: str,
        method: str,
        shard: set[int],
        inputs: Mapping[int, list[Ref]],
        state: Iteration,
        step_context: StepContext | None = None,
        final: bool = False,
    ) -> dict[int, list[Ref]]:
        """Submits one call of a loop's stage for a shard to all workers that hold blocks of it."""
        calls = []
        for worker in self._hosts.workers(stage):
            blocks = tuple(block for block in self._hosts.blocks(stage, worker) if block in shard)
            if blocks:
                payloads = [ref for block in blocks for ref in inputs.get(block, ())]
                keep = self._handover.stays[stage] if final else frozenset()
                call = Call(
                    stage, method, step_context or state.step_context, blocks, len(payloads) // len(blocks), keep
                )
                calls.append((worker, call, payloads))
        answers = self._submitter.submit(calls, state)
        if final:
            self._submitter.note(stage, calls, answers, state)
        else:
            state.timings.extend(refs[-1] for refs in answers)
        return {
            block: [ref]
            for (_, call, _), refs in zip(calls, answers, strict=True)
            for block, ref in zip(call.blocks, refs, strict=False)
        }
