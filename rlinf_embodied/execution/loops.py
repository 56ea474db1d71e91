"""Submits the calls of a loop, in which blocks alternate between opener and answerer.

    run_fused      both sides are in the same workers               one call per worker
    run_stepwise   one answerer's worker per opener's worker        one call per answerer's worker, which calls the
                                                                    opener's (runtime/relay.py)
                   otherwise                                        a call per chunk-step, shard and worker, submitted
                                                                    all at once

Calls are made shard by shard, so that one shard's simulator runs while the policy acts for another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlinf_embodied.execution.hosts import Hosts, shards_of
from rlinf_embodied.execution.iteration import Iteration
from rlinf_embodied.planning.plan import Step
from rlinf_embodied.runtime import relay
from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.session import Ref, Session
from rlinf_embodied.workflow.graph import Loop, Workflow


def repeated(steps: tuple[Step, ...], workflow: Workflow) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Returns the steps of a plan that a repeat runs again, and those after them."""
    stages = workflow.repeated()
    inside = tuple(step for step in steps if stages.issuperset(step.stages))
    assert inside == steps[: len(inside)], "repeated steps must come first"
    return inside, steps[len(inside) :]


class Loops:
    """The loops of one workflow under one plan."""

    def __init__(self, workflow: Workflow, hosts: Hosts, session: Session) -> None:
        self._workflow, self._hosts, self._session = workflow, hosts, session

    def run(self, loop: Loop, num_shards: int, state: Iteration) -> None:
        """Submits all calls of a loop; its opener gets the data of upstream stages."""
        sources = [source for source in self._workflow.sources(loop.opener) if source not in loop.sides]
        blocks = range(self._workflow.num_blocks)
        given = {block: [ref for source in sources for ref in state.outputs[source][block]] for block in blocks}
        if loop.name in self._hosts.fused:
            self._run_fused(loop, given, state)
        else:
            self._run_stepwise(loop, given, list(map(set, shards_of(tuple(blocks), num_shards))), state)

    def _run_fused(self, loop: Loop, given: Mapping[int, list[Ref]], state: Iteration) -> None:
        calls, keep = [], self._hosts.stays[loop.opener]
        for worker, blocks in self._hosts.blocks[loop.opener].items():
            inputs = [ref for block in blocks for ref in given[block]]
            call = Call(
                *(loop.opener, "loop", state.step_context, blocks, len(inputs) // len(blocks), keep),
                partner=loop.answerer,
                chunk_steps=loop.chunk_steps,
            )
            calls.append((worker, call, inputs))
        state.note(loop.opener, calls, self._session.submit(calls))

    def _run_stepwise(
        self, loop: Loop, given: Mapping[int, list[Ref]], shards: Sequence[set[int]], state: Iteration
    ) -> None:
        """Submits a loop as one call per chunk-step, shard and worker, or one relaying call per answerer's worker."""
        messages: dict[int, list[Ref]] = {}
        for shard in shards:
            messages |= self._exchange(loop.opener, "open", shard, given, state)
        ends: dict[int, list[Ref]] = {}
        owners = self._hosts.owners[loop.opener], self._hosts.owners[loop.answerer]
        relayed = relay.shards_of(*owners, shards) if self._session.relays else {}
        if relayed:
            messages, ends = self._relay(loop, relayed, messages, state)
        for step in range(0 if relayed else loop.chunk_steps):
            at = replace(state.step_context, chunk_step=step)
            for shard in shards:
                answers = self._exchange(loop.answerer, "step", shard, messages, state, at)
                messages |= self._exchange(loop.opener, "step", shard, answers, state, at)
        for shard in shards:
            self._exchange(loop.answerer, "close", shard, messages, state)
            self._exchange(loop.opener, "close", shard, ends, state)

    def _relay(
        self,
        loop: Loop,
        relayed: Mapping[int, Sequence[relay.Shard]],
        messages: Mapping[int, list[Ref]],
        state: Iteration,
    ) -> tuple[dict[int, list[Ref]], dict[int, list[Ref]]]:
        """Submits all chunk-steps as one call to each of the answerer's workers (runtime/relay.py).

        Returns by block the opener's last message, and a reference that is ready when the opener's steps are over.  Its
        `close` depends on the latter, since these steps are not the driver's calls.
        """
        calls = []
        for worker, shards in relayed.items():
            blocks = self._hosts.blocks[loop.answerer][worker]
            call = Call(
                *(loop.answerer, "relay", state.step_context, blocks, 1, frozenset(blocks)),
                partner=loop.opener,
                chunk_steps=loop.chunk_steps,
                relay=tuple(shards),
            )
            calls.append((worker, call, [ref for block in blocks for ref in messages[block]]))
        answers = self._session.submit(calls)
        last, ends = {}, {}
        for (_, call, _), (*last_messages, end, receipt) in zip(calls, answers, strict=True):
            state.timings.append(receipt)
            last |= {block: [ref] for block, ref in zip(call.blocks, last_messages, strict=True)}
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
    ) -> dict[int, list[Ref]]:
        """Submits a call of one side for a shard to all workers that own blocks of it; returns its results by block."""
        keep = self._hosts.stays[stage] if method == "close" else frozenset()
        calls = []
        for worker, owned in self._hosts.blocks[stage].items():
            blocks = tuple(block for block in owned if block in shard)
            if blocks:
                payloads = [ref for block in blocks for ref in inputs.get(block, ())]
                at, count = step_context or state.step_context, len(payloads) // len(blocks)
                calls.append((worker, Call(stage, method, at, blocks, count, keep), payloads))
        answers = self._session.submit(calls)
        if method == "close":
            state.note(stage, calls, answers)
            return {}
        state.timings.extend(refs[-1] for refs in answers)
        results = zip(calls, answers, strict=True)
        return {b: [ref] for (_, call, _), refs in results for b, ref in zip(call.blocks, refs, strict=False)}
