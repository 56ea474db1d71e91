"""Runs any plan tree of a workflow on a session; knows stages, edges and loops, and nothing of what they mean.

The plan tree becomes a list of steps (schedule.py), which are submitted in order.  One iteration, for
`temporal: [loop(env, policy), leaf(actor)]`:

    1. loop    every worker's blocks go round between opener and answerer, and stages in between when it is their turn.
               Where all live in the same workers that is one call per worker; where each opener's worker has one that
               answers it, that one is asked to call it (runtime/relay.py), if those in between are there as well;
               otherwise a call per chunk-step, shard and worker, submitted all at once.  Always
               shard by shard, so that one shard's simulator runs while the other's policy does.
    2. leaf    gets, block by block, what the edges into it brought; all workers of a collective stage start at once.
    3. weights go to the workers of a weight edge's target that do not share a process with its source.

With a plan's staleness successive iterations overlap: ahead.py.

The driver holds references; values move only between the workers that need them, or stay where they are.  Stages that
may not be in a device's memory together are switched by their worker, when one of them is called (runtime/host.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.errors import HangError, WorkerError
from rlinf_embodied.execution.ahead import Ahead, Follow
from rlinf_embodied.execution.iteration import Iteration, IterationResult, Mends
from rlinf_embodied.execution.schedule import Step, parts, repeats, schedule, shards_of
from rlinf_embodied.flow.graph import Loop, Repeat, RepeatDecision, WeightEdge, Workflow
from rlinf_embodied.flow.plan import Leaf, LoopNode, Plan
from rlinf_embodied.flow.probes import collocated
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.runtime import relay, transport
from rlinf_embodied.runtime.host import Call, Receipt, StageContext, StepContext, WorkerSpec
from rlinf_embodied.runtime.node_files import paths_in
from rlinf_embodied.runtime.session import MendingSession, Ref, SerialSession, Session, of_type

_LOG = logging.getLogger(__name__)
_FOLLOW = Follow()


class Executor:
    """Runs iterations of one workflow under one plan."""

    def __init__(self, workflow: Workflow, plan: Plan, session: Session, cluster: Cluster) -> None:
        """Starts the workers and builds every stage where the plan puts it."""
        self.workflow, self.plan, self._session, self._cluster = workflow, plan, session, cluster
        self.mender: Mends | None = None  # None: an iteration that loses workers is done again as a whole
        self._owners = plan.all_owners(workflow)
        self._handover = transport.handover(workflow, plan, cluster)
        self._always_store = cluster.always_store
        one_process = isinstance(session, SerialSession)
        self.routes = transport.routes(workflow, plan, cluster, self._handover, one_process=one_process)
        _LOG.info("transports of plan %s:\n%s", plan.name, transport.table(self.routes))
        self._repeated, self._steps = parts(schedule(plan, workflow), workflow)
        self._repeats = repeats(workflow)
        self.back = tuple(name for name in workflow.order() if name in workflow.back())
        self.front = tuple(name for name in workflow.order() if name not in self.back)
        self.is_apart = not {w for s in self.front for w in self.workers(s)} & {
            w for s in self.back for w in self.workers(s)
        }
        self.ahead = Ahead(self) if plan.staleness else None
        self._exclusive = plan.exclusive()
        module = cluster.device_module
        session.start(
            [
                WorkerSpec(k, cluster.torch_device(k), device_module=module, node=cluster.node_id(k))
                for k in plan.devices()
            ]
        )
        self.facts: dict[str, list[object]] = {}
        self.setup_s: dict[str, float] = {}  # by stage; the first one waits for the workers to start
        for name in workflow.order():
            start = time.time()
            self.facts[name] = self._add_stage(name)
            self.setup_s[name] = time.time() - start

    @classmethod
    def on_all_devices(cls, workflow: Workflow, session: Session, cluster: Cluster) -> Executor:
        """Returns the executor of a plan in which every stage is on all devices that its blocks suffice for."""
        plan = collocated(workflow, cluster.num_computing, workflow.name, cluster.cores_beside)
        return cls(workflow, plan, session, cluster)

    # ------------------------------------------------------------------------------------------------------- set-up
    def workers(self, stage: str) -> list[int]:
        """Returns the workers that host a stage, in the order of its group's ranks."""
        return sorted(set(self._owners[stage]))

    def _blocks(self, stage: str, worker: int) -> tuple[int, ...]:
        return tuple(block for block, owner in enumerate(self._owners[stage]) if owner == worker)

    def _add_stage(self, name: str) -> list[object]:
        spec = self.workflow.stages[name]
        for path in paths_in(spec.config) if self._cluster.nodes else ():
            self._session.provide(self.workers(name), path)
        return self._session.add_stage(spec, self._contexts(name))

    def _contexts(self, name: str) -> list[StageContext]:
        cluster, workers = self._cluster, self.workers(name)
        owners = tuple(workers.index(owner) for owner in self._owners[name])
        contexts, num_blocks = [], self.workflow.num_blocks
        parts = self.plan.shards(name, num_blocks, cluster)
        for worker in workers:
            blocks = self._blocks(name, worker)
            shards = tuple(shard for shard in shards_of(blocks, parts) if shard)
            device = cluster.torch_device(worker)
            contexts.append(StageContext(worker, device, blocks, shards, num_blocks, owners, SoloGroup(), {}))
            contexts[-1].exclusive = self._exclusive[name] & self._hosted(worker)
        return contexts

    def _hosted(self, worker: int) -> frozenset[str]:
        return frozenset(stage for stage, owners in self._owners.items() if worker in owners)

    def can_renew(self, session: MendingSession) -> bool:
        """Returns whether `renew` is possible: no stage holds what is inside of its group."""
        meeting = [spec for spec in self.workflow.stages.values() if spec.collective]
        return all(session.can_renew(spec, self.workers(spec.name)) for spec in meeting)

    def renew(self, session: MendingSession, anew: Collection[int]) -> None:
        """Builds the stages of replaced workers again; stages that exchange data get other groups, whoever hosts them.

        Raises:
            RlinfError: what a worker raised, or that it was lost.
        """
        for name in self.workflow.order():
            spec, contexts = self.workflow.stages[name], self._contexts(name)
            if (spec.collective and len(contexts) > 1) or not set(self.workers(name)).isdisjoint(anew):
                session.renew_stage(spec, contexts, anew)

    # ---------------------------------------------------------------------------------------------------- iteration
    def run(self, step_context: StepContext, follow: Follow = _FOLLOW) -> IterationResult:
        """Runs one iteration of the workflow and returns when its weights are installed.

        Args:
            step_context: of the iteration.
            follow: what comes after it, where the plan has later iterations begin before it ends.

        Raises:
            RlinfError: what a worker raised, or a HangError.
        """
        if self.ahead is not None:
            return self.ahead.run(step_context, follow)
        state = Iteration(step_context)
        if self.workflow.repeat is not None:
            self._run_rounds(self.workflow.repeat, state)
        self._run_steps(self._steps, state)
        self._finish(state)
        return state.result

    def run_front(self, state: Iteration) -> None:
        """Submits the calls of the stages that nothing is learnt in."""
        if self.workflow.repeat is not None:
            self._run_rounds(self.workflow.repeat, state)
        self._run_steps([step for step in self._steps if self._stage(step) in self.front], state)

    def run_back(self, state: Iteration) -> None:
        """Submits the calls of the others."""
        self._run_steps([step for step in self._steps if self._stage(step) in self.back], state)

    @staticmethod
    def _stage(step: Step) -> str:
        return step.node.stages[0].stage if isinstance(step.node, LoopNode) else step.node.stage

    def _finish(self, state: Iteration) -> None:
        """Waits for the last stages, and sends weights on; both once more where a worker was lost in it."""
        while True:
            try:
                for edge in self.workflow.weight_edges:
                    self.sync_weights(edge.source, edge.target, state)
                self._file(state)
                return
            except (WorkerError, HangError) as error:
                self._mend(error, state)

    def _mend(self, error: WorkerError | HangError, state: Iteration) -> None:
        """Raises an error unless the iteration goes on in spite of it."""
        if self.mender is None:
            raise error
        self.mender.mend(state, error)

    def _submit(
        self,
        calls: Sequence[tuple[int, Call, Sequence[Ref]]],
        state: Iteration,
        collective: bool = False,
        passing: bool = False,
    ) -> list[list[Ref]]:
        """Submits calls of an iteration, see CallLog."""
        if self.mender is None:
            return self._session.submit(calls, collective)
        return state.calls.submit(self._session, calls, collective, passing)

    def _run_steps(self, steps: Sequence[Step], state: Iteration) -> None:
        for step in steps:
            self._run_loop(step.node, state) if isinstance(step.node, LoopNode) else self._leaf(step, state)

    def _run_rounds(self, repeat: Repeat, state: Iteration) -> None:
        """Runs what comes before a stage, round by round: within a round on its own data, the stage then has all."""
        before, gathered = state.step_context, state.outputs
        for number in range(repeat.max_rounds):
            state.step_context, state.outputs = replace(before, round=number), {}
            self._run_steps(self._repeated, state)
            for stage, blocks in state.outputs.items():
                for block, refs in blocks.items():
                    gathered.setdefault(stage, {}).setdefault(block, []).extend(refs)
            self.collect_calls(state)
            decision = repeat.decide(state.result.reports[repeat.decided_by])
            if decision.enough:
                break
        state.step_context, state.outputs = before, gathered
        state.decisions[repeat.name] = decision.message

    def _enter(self, stages: Sequence[str], state: Iteration) -> None:
        """Has workers switch as soon as the turn before is over, not only when the inputs of the next one arrive."""
        for stage in stages:
            switching = [w for w in self.workers(stage) if self._exclusive[stage] & self._hosted(w)]
            answers = self._submit(
                [(worker, Call(stage, "enter", state.step_context), []) for worker in switching], state
            )
            state.timings.extend(refs[-1] for refs in answers)

    def _leaf(self, step: Step, state: Iteration) -> None:
        """Submits a stage's calls for the blocks of one chunk."""
        assert isinstance(step.node, Leaf)
        stage, size = step.node.stage, self.workflow.num_blocks // step.num_chunks
        if step.chunk == 0:
            self._enter([stage], state)
        chunk = range(step.chunk * size, (step.chunk + 1) * size)
        message = state.message_for(self._repeats.get(stage, ()))
        step_context = replace(state.step_context, chunk=step.chunk, num_chunks=step.num_chunks, message=message)
        sources, keep = self.workflow.sources(stage), self._handover.stays[stage]
        calls = []
        for worker in self.workers(stage):
            blocks = tuple(block for block in self._blocks(stage, worker) if block in chunk)
            if not blocks:  # of a stage whose workers own whole sets
                continue
            inputs = [ref for block in blocks for source in sources for ref in state.outputs[source][block]]
            call = Call(stage, "run", step_context, blocks, len(inputs) // len(blocks), keep)
            calls.append((worker, call, inputs))
        collective = self.workflow.stages[stage].collective
        self._note(stage, calls, self._submit(calls, state, collective), state)

    def _note(self, stage: str, calls: Sequence[tuple], answers: list[list[Ref]], state: Iteration) -> None:
        """Files block results as the stage's outputs and the receipts for later."""
        outputs = state.outputs.setdefault(stage, {})
        for (_, call, _), refs in zip(calls, answers, strict=True):
            for block, ref in zip(call.blocks, refs, strict=False):
                outputs.setdefault(block, []).append(ref)
        state.receipts.append((stage, [refs[-1] for refs in answers]))

    # --------------------------------------------------------------------------------------------------------- loops
    def _run_loop(self, node: LoopNode, state: Iteration) -> None:
        """Runs a loop: once, or round after round until `decide` has enough or the bound is reached."""
        loop, before = self.workflow.loops[node.loop], state.step_context
        self._enter(loop.sides, state)
        base = replace(before, message=state.message_for(self._repeats.get(loop.opener, ())))
        first = self.workflow.first_round(loop.name)
        for number in range(loop.max_rounds):
            state.step_context = replace(base, round=first + number)
            if loop.name in self._handover.fused:
                self._fused_loop(loop, state)
            else:
                self._stepwise_loop(loop, node.shards, state)
            if loop.decide is None:
                break
            self.collect_calls(state)
            decision: RepeatDecision = loop.decide(state.result.reports[loop.opener])
            base = replace(base, message=decision.message)
            if decision.enough:
                break
        if loop.decide is not None:
            state.decisions[loop.name] = base.message
        state.step_context = before

    def _fused_loop(self, loop: Loop, state: Iteration) -> None:
        calls, sources = [], self._outside(loop)
        keep = self._handover.stays[loop.opener]
        for worker in self.workers(loop.opener):
            blocks = self._blocks(loop.opener, worker)
            inputs = [ref for block in blocks for source in sources for ref in state.outputs[source][block]]
            call = Call(
                *(loop.opener, "loop", state.step_context, blocks, len(inputs) // len(blocks), keep),
                partner=loop.answerer,
                chunk_steps=loop.chunk_steps,
                between=loop.between,
            )
            calls.append((worker, call, inputs))
        answers = self._submit(calls, state)
        for (_, call, _), refs in zip(calls, answers, strict=True):
            size = len(call.blocks)
            for place, side in enumerate(call.makers):
                for block, ref in zip(call.blocks, refs[place * size : (place + 1) * size], strict=True):
                    state.outputs.setdefault(side, {}).setdefault(block, []).append(ref)
        state.receipts.append((loop.opener, [refs[-1] for refs in answers]))

    def _outside(self, loop: Loop) -> list[str]:
        """Returns the stages before a loop whose data its opener takes."""
        return [source for source in self.workflow.sources(loop.opener) if source not in loop.sides]

    def _stepwise_loop(self, loop: Loop, num_shards: int, state: Iteration) -> None:
        shards = self._shard_blocks(loop.opener, num_shards)
        sources, messages = self._outside(loop), {}
        given = {b: [ref for s in sources for ref in state.outputs[s][b]] for b in range(self.workflow.num_blocks)}
        for shard in shards:
            messages |= self._exchange(loop.opener, "open", shard, given, state)
        ends: dict[int, list[Ref]] = {}
        owners = self._owners[loop.opener], self._owners[loop.answerer]
        beside = all(self._owners[turn.stage] == owners[1] for turn in loop.between)
        relayed = relay.shards_of(*owners, shards) if self._session.relays and beside else {}
        if relayed:
            messages, ends = self._relay(loop, relayed, messages, state)
        said: dict[str, dict[int, list[Ref]]] = {turn.stage: {} for turn in loop.between}
        for step in range(0 if relayed else loop.chunk_steps):
            step_context = replace(state.step_context, chunk_step=step)
            for shard in shards:
                told = {block: list(messages[block]) for block in shard}
                for turn in loop.between:
                    if step % turn.every == 0:
                        said[turn.stage] |= self._exchange(turn.stage, "step", shard, told, state, step_context)
                    told = {block: [*refs, *said[turn.stage][block]] for block, refs in told.items()}
                answers = self._exchange(loop.answerer, "step", shard, told, state, step_context)
                messages |= self._exchange(loop.opener, "step", shard, answers, state, step_context)
        for shard in shards:
            for side in loop.sides[1:]:
                self._exchange(side, "close", shard, messages, state, final=True)
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
            blocks = self._blocks(loop.answerer, worker)
            keep = frozenset() if self._always_store else frozenset(blocks)
            call = Call(
                *(loop.answerer, "relay", state.step_context, blocks, 1, keep),
                partner=loop.opener,
                chunk_steps=loop.chunk_steps,
                relay=shards,
                between=loop.between,
            )
            calls.append((worker, call, [ref for block in blocks for ref in messages[block]]))
        answers = self._submit(calls, state, passing=True)
        state.timings.extend(refs[-1] for refs in answers)
        last, ends = {}, {}
        for (_, call, _), (*shown, end, _) in zip(calls, answers, strict=True):
            last |= {block: [ref] for block, ref in zip(call.blocks, shown, strict=True)}
            ends |= {block: [end] for block in call.blocks}
        return last, ends

    def _shard_blocks(self, stage: str, num_shards: int) -> list[set[int]]:
        parts = [shards_of(self._blocks(stage, worker), num_shards) for worker in self.workers(stage)]
        return [{block for part in parts for block in part[k]} for k in range(num_shards)]

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
        for worker in self.workers(stage):
            blocks = tuple(block for block in self._blocks(stage, worker) if block in shard)
            if blocks:
                payloads = [ref for block in blocks for ref in inputs.get(block, ())]
                keep = self._handover.stays[stage] if final else frozenset()
                call = Call(
                    stage, method, step_context or state.step_context, blocks, len(payloads) // len(blocks), keep
                )
                calls.append((worker, call, payloads))
        answers = self._submit(calls, state, passing=not final)
        if final:
            self._note(stage, calls, answers, state)
        else:
            state.timings.extend(refs[-1] for refs in answers)
        return {
            block: [ref]
            for (_, call, _), refs in zip(calls, answers, strict=True)
            for block, ref in zip(call.blocks, refs, strict=False)
        }

    # ----------------------------------------------------------------------------------------------------- the rest
    def collect_calls(self, state: Iteration) -> None:
        """Waits for everything submitted so far and files reports and spans; what is lost meanwhile is done again."""
        while True:
            try:
                self._file(state)
                return
            except (WorkerError, HangError) as error:
                self._mend(error, state)

    def _file(self, state: Iteration) -> None:
        where = f"iteration {state.step_context.iteration} of {self.workflow.name}"
        by_stage: dict[str, list[object]] = {}
        spans = []
        for stage, refs in state.receipts:
            receipts = self._receipts(refs, f"{stage} in {where}", state)
            by_stage.setdefault(stage, []).extend(receipt.report for receipt in receipts)
            spans += [span for receipt in receipts for span in receipt.spans]
        spans += [span for receipt in self._receipts(state.timings, where, state) for span in receipt.spans]
        for stage, reports in by_stage.items():
            state.result.reports.setdefault(stage, []).append(reports)
        state.result.spans.extend(spans)
        state.receipts, state.timings = [], []

    def _receipts(self, refs: Sequence[Ref], waiting: str, state: Iteration) -> list[Receipt]:
        refs = refs if self.mender is None else [state.calls.current(ref) for ref in refs]
        return of_type(self._session.fetch(refs, waiting), Receipt)

    def call(
        self, stage: str, method: str, step_context: StepContext, argument: object = None, payloads: Sequence[Ref] = ()
    ) -> list[object]:
        """Calls a method on every worker of a stage at once and returns their answers in order of rank.

        `payloads` follow the argument: what other stages published, which the driver does not read.
        """
        call = Call(stage, method, step_context, argument=argument)
        calls = [(worker, call, payloads) for worker in self.workers(stage)]
        answers = self._session.submit(calls, collective=self.workflow.stages[stage].collective)
        receipts = self._session.fetch([refs[-1] for refs in answers], f"{stage}.{method}")
        return [receipt.report for receipt in of_type(receipts, Receipt)]

    def publish(self, stage: str, method: str, step_context: StepContext, argument: object = None) -> list[Ref]:
        """Calls a method on every worker of a stage at once and returns references to their answers, by rank."""
        call = Call(stage, method, step_context, argument=argument, publishes=True)
        calls = [(worker, call, []) for worker in self.workers(stage)]
        answers = self._session.submit(calls, collective=self.workflow.stages[stage].collective)
        self._session.fetch([refs[-1] for refs in answers], f"{stage}.{method}")
        return [refs[0] for refs in answers]

    def collect(self, stage: str, path: Path, *, of_first: bool = False) -> int:
        """Brings what the workers of a stage (or its first one) wrote to the driver's node; returns how many files."""
        return self._session.collect(self.workers(stage)[: 1 if of_first else None], path)

    def sync_weights(self, source: str, target: str, state: Iteration | None = None) -> None:
        """Sends the weights of `source` to those workers of `target` that do not share them already."""
        step_context = state.step_context if state else StepContext(0)
        sender, receivers = self._handover.weights[source, target]
        if receivers:
            sent = self.send_weights(self._session, (sender, source), [(w, target) for w in receivers], step_context)
            if state:
                state.result.spans.extend(span for receipt in sent for span in receipt.spans)
                state.result.reports[f"{target}.install_weights"] = [[receipt.report for receipt in sent[1:]]]

    def export(self, source: str, step_context: StepContext, state: Iteration | None) -> Ref:
        """Has a stage publish its weights, behind the calls that it was given."""
        sender = self.workers(source)[0]
        ((weights, receipt),) = self._session.submit(
            [(sender, Call(source, "export_weights", step_context, publishes=True), [])]
        )
        if state is not None:
            state.timings.append(receipt)
        return weights

    def install(self, weights: Ref, edge: WeightEdge, state: Iteration | None, everywhere: bool = False) -> None:
        """Has published weights installed at the end of an edge, behind the calls that its workers were given.

        Args:
            weights: what `export` returned.
            edge: its source made them.
            state: of the iteration that waits for it; None: it is waited for here.
            everywhere: in workers that share them with their source, too.
        """
        receivers = self.workers(edge.target) if everywhere else self._handover.weights[edge.source, edge.target][1]
        step_context = state.step_context if state else StepContext(0)
        calls = [(worker, Call(edge.target, "install_weights", step_context), [weights]) for worker in receivers]
        answers = [refs[-1] for refs in self._session.submit(calls)]
        if state is None:
            self._session.fetch(answers, f"weights of {edge.source}")
        elif answers:
            state.receipts.append((f"{edge.target}.install_weights", answers))

    # ------------------------------------------------------------------------------------------------------- state
    def export_states(self, stage: str, step_context: StepContext) -> list[list[Ref]]:
        """Has the workers of a stage publish their part of its state; returns [part, receipt] of each."""
        call = Call(stage, "export_snapshot", step_context, publishes=True)
        calls = [(worker, call, []) for worker in self.workers(stage)]
        return self._session.submit(calls, self.workflow.stages[stage].collective)

    def states_of(self, answers: Mapping[str, Sequence[Sequence[Ref]]]) -> dict[str, tuple[Ref, ...]]:
        """Waits for what `export_states` submitted, by stage; returns the parts of stages that have a state."""
        states = {}
        for stage, parts_of in answers.items():
            receipts = of_type(self._session.fetch([refs[-1] for refs in parts_of], f"a snapshot of {stage}"), Receipt)
            if any(receipt.report for receipt in receipts):
                states[stage] = tuple(refs[0] for refs in parts_of)
        return states

    def values(self, refs: Sequence[Ref], what: str) -> list[object]:
        """Returns what workers published: for what is small."""
        return self._session.fetch(refs, what)

    def import_states(self, states: Mapping[str, Sequence[Ref]], step_context: StepContext) -> None:
        """Brings stages into these states: every worker of a stage gets all parts of it."""
        for stage, parts_of in states.items():
            call = Call(stage, "import_snapshot", step_context)
            calls = [(worker, call, list(parts_of)) for worker in self.workers(stage)]
            answers = self._session.submit(calls, self.workflow.stages[stage].collective)
            self._session.fetch([refs[-1] for refs in answers], f"the snapshot of {stage}")

    @staticmethod
    def send_weights(
        session: Session, source: tuple[int, str], targets: list[tuple[int, str]], step_context: StepContext
    ) -> list[Receipt]:
        """Exports weights at one stage and installs them at others, each of which verifies version and checksum.

        The driver hands on a reference: it never holds the weights, and a node gets one copy for all of its workers.
        Returns the receipt of the export, then those of the installs.
        """
        worker, stage = source
        export = Call(stage, "export_weights", step_context, publishes=True)
        ((weights, exported),) = session.submit([(worker, export, [])])
        calls = [(w, Call(s, "install_weights", step_context), [weights]) for w, s in targets]
        installed = [refs[-1] for refs in session.submit(calls)]
        return of_type(session.fetch([exported, *installed], f"weights of {stage}"), Receipt)
