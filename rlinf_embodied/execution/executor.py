"""Runs any plan of a workflow on a session; it knows stages, edges and loops, but not what the stages compute.

The plan becomes a list of steps (planning/plan.py), which are submitted in order.  One iteration, for
`env+policy on 0-1 > actor on 0-1`:

    1. loop    the blocks of every worker alternate between opener and answerer (loops.py).
    2. leaf    gets the data of its incoming edges block by block; all workers of a collective stage start together.
    3. weights go to the workers of a weight edge's target that do not share a process with its source.

hosts.py maps blocks to workers.  If a plan has a staleness, successive iterations overlap (ahead.py).

The driver holds references; values move only between the workers that need them, or stay where they are.  Stages that
may not be in a device's memory together are switched by their worker when one of them is called (runtime/host.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import cast

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.ahead import Ahead, Follow
from rlinf_embodied.execution.hosts import Hosts
from rlinf_embodied.execution.iteration import Iteration, IterationResult
from rlinf_embodied.execution.loops import Loops, repeated
from rlinf_embodied.planning.plan import Plan, Step, collocated, schedule
from rlinf_embodied.runtime.host import Call, Receipt, StepContext, WorkerSpec
from rlinf_embodied.runtime.session import Ref, Session, of_type
from rlinf_embodied.workflow.graph import Repeat, WeightEdge, Workflow

_FOLLOW = Follow()
PART_BYTES = 1 << 28  # of weights that are sent at a time


class Executor:
    """Runs iterations of one workflow under one plan."""

    def __init__(self, workflow: Workflow, plan: Plan, session: Session, cluster: Cluster) -> None:
        """Starts the workers and builds every stage where the plan puts it."""
        self.workflow, self.plan, self._session = workflow, plan, session
        self._hosts = Hosts(workflow, plan, cluster)
        self._loops = Loops(workflow, self._hosts, session)
        self._repeated, self._steps = repeated(schedule(plan.items, workflow), workflow)
        self._have_all: set[WeightEdge] = set()  # edges with `changes` whose receivers have the last published version
        self.ahead = Ahead(self) if plan.staleness else None
        session.start([worker_spec(cluster, device) for device in plan.devices()])
        self.facts: dict[str, list[object]] = {}
        start = time.time()
        for name in workflow.order():
            self.facts[name] = self._build(name)
        self.setup_s = time.time() - start  # includes the start of the workers

    def _build(self, name: str) -> list[object]:
        """Builds a stage; its workers get the names of the devices that are lent to them."""
        spec, contexts = self.workflow.stages[name], self._hosts.contexts(name)
        lending = [lent for context in contexts for lent in self._hosts.lending(name, context)]
        if lending:
            names = iter(
                of_type(self._session.add_stage(replace(spec, target=spec.lent, collective=False), lending), str)
            )
            contexts = [replace(c, lent=tuple(islice(names, spec.devices_per_worker - 1))) for c in contexts]
        return self._session.add_stage(spec, contexts)

    @classmethod
    def on_all_devices(cls, workflow: Workflow, session: Session, cluster: Cluster) -> Executor:
        """Returns the executor of a plan in which every stage is on all devices that its blocks suffice for."""
        plan = collocated(workflow, cluster.num_computing, workflow.name, cluster.cores_beside)
        return cls(workflow, plan, session, cluster)

    # ------------------------------------------------------------------------------------------------------- set-up
    def workers(self, stage: str) -> list[int]:
        """Returns the workers that host a stage, in the order of its group's ranks."""
        return list(self._hosts.blocks[stage])

    def devices_of(self, stages: Sequence[str]) -> set[int]:
        """Returns the devices that these stages use."""
        return {device for stage in stages for on in self._hosts.devices_of(stage).values() for device in on}

    # ---------------------------------------------------------------------------------------------------- iteration
    def run(self, step_context: StepContext, follow: Follow = _FOLLOW) -> IterationResult:
        """Runs one iteration of the workflow and returns when its weights are installed.

        `follow` describes the next iterations, which a plan with a staleness begins before this one ends.  Like the
        methods below, it raises the errors of Session.fetch.
        """
        if self.ahead is not None:
            return self.ahead.run(step_context, follow)
        state = Iteration(step_context)
        self.run_stages(self.workflow.order(), state)
        self.sync_weights(state)
        self.collect_receipts(state)
        return state.result

    def run_stages(self, stages: Sequence[str], state: Iteration) -> None:
        """Submits the calls of these stages in an iteration; repeated stages come first."""
        if self._repeated and self._repeated[0].stages[0] in stages:
            assert self.workflow.repeat is not None
            self._run_rounds(self.workflow.repeat, state)
        self._run_steps([step for step in self._steps if step.stages[0] in stages], state)

    def collect_receipts(self, state: Iteration) -> None:
        """Waits for all submitted calls of an iteration, and collects their reports and spans."""
        what, result = f"iteration {state.step_context.iteration} of {self.workflow.name}", state.result
        by_stage: dict[str, list[object]] = {}
        for stage, refs in state.receipts:
            receipts = of_type(self._session.fetch(refs, f"{stage} in {what}"), Receipt)
            by_stage.setdefault(stage, []).extend(receipt.report for receipt in receipts)
            result.spans += [span for receipt in receipts for span in receipt.spans]
        for receipt in of_type(self._session.fetch(state.timings, what), Receipt):
            result.spans += receipt.spans
        for stage, reports in by_stage.items():
            result.reports.setdefault(stage, []).append(reports)
        state.receipts, state.timings = [], []

    def _run_steps(self, steps: Sequence[Step], state: Iteration) -> None:
        for step in steps:
            loop = self.workflow.loop_of(step.stages[0])
            self._borrow(step.stages, state)
            if loop is None:
                self._leaf(step, state)
            else:
                self._enter(loop.sides, state)
                self._loops.run(loop, step.shards, state)
            self._give_back(step.stages, state)

    def _borrow(self, stages: Sequence[str], state: Iteration) -> None:
        """Makes workers with several devices wait until the earlier calls on those have ended."""
        for stage, worker, lent in self._lent(stages):
            ready = [self._reserve(stage, device, [], state) for device in (worker, *lent)]
            self._reserve(stage, worker, ready, state)

    def _give_back(self, stages: Sequence[str], state: Iteration) -> None:
        """Makes the devices that are lent to workers wait for the calls of these."""
        for stage, worker, lent in self._lent(stages):
            done = self._reserve(stage, worker, [], state)
            for device in lent:
                self._reserve(stage, device, [done], state)

    def _lent(self, stages: Sequence[str]) -> list[tuple[str, int, range]]:
        several = [stage for stage in stages if self.workflow.stages[stage].devices_per_worker > 1]
        return [(stage, worker, on[1:]) for stage in several for worker, on in self._hosts.devices_of(stage).items()]

    def _reserve(self, stage: str, worker: int, after: Sequence[Ref], state: Iteration) -> Ref:
        """Submits a call without work that waits for others; returns its receipt."""
        ((receipt,),) = self._session.submit([(worker, Call(stage, "enter", state.step_context), after)])
        state.timings.append(receipt)
        return receipt

    def _run_rounds(self, repeat: Repeat, state: Iteration) -> None:
        """Runs the repeated stages round by round, each on its own data; later stages get the data of all rounds."""
        before, gathered = state.step_context, state.outputs
        for number in range(repeat.max_rounds):
            state.step_context, state.outputs = replace(before, round=number), {}
            self._run_steps(self._repeated, state)
            for stage, blocks in state.outputs.items():
                for block, refs in blocks.items():
                    gathered.setdefault(stage, {}).setdefault(block, []).extend(refs)
            self.collect_receipts(state)
            decision = repeat.decide(state.result.reports[repeat.decided_by])
            if decision.enough:
                break
        state.step_context, state.outputs = replace(before, message=decision.message), gathered

    def _enter(self, stages: Sequence[str], state: Iteration) -> None:
        """Makes workers switch stages after the previous call, instead of when the inputs of the next one arrive."""
        for stage in stages:
            call = Call(stage, "enter", state.step_context)
            answers = self._session.submit([(worker, call, []) for worker in self._hosts.switching(stage)])
            state.timings.extend(refs[-1] for refs in answers)

    def _leaf(self, step: Step, state: Iteration) -> None:
        """Submits a stage's calls for the blocks of one chunk."""
        (stage,), size = step.stages, self.workflow.num_blocks // step.num_chunks
        if step.chunk == 0:
            self._enter([stage], state)
        chunk = range(step.chunk * size, (step.chunk + 1) * size)
        step_context = replace(state.step_context, chunk=step.chunk, num_chunks=step.num_chunks)
        sources, keep = self.workflow.sources(stage), self._hosts.stays[stage]
        calls = []
        for worker, owned in self._hosts.blocks[stage].items():
            blocks = tuple(block for block in owned if block in chunk)
            if not blocks:  # batches of several blocks have one owner, so a worker may have no block of a chunk
                continue
            inputs = [ref for block in blocks for source in sources for ref in state.outputs[source][block]]
            call = Call(stage, "run", step_context, blocks, len(inputs) // len(blocks), keep)
            calls.append((worker, call, inputs))
        state.note(stage, calls, self._session.submit(calls, self.workflow.stages[stage].collective))

    # ------------------------------------------------------------------------------------------------ calls by name
    def call(
        self, stage: str, method: str, step_context: StepContext, argument: object = None, payloads: Sequence[Ref] = ()
    ) -> list[object]:
        """Calls a method on all workers of a stage concurrently and returns their answers in order of rank.

        `payloads` are passed after the argument: references to data of other stages, which the driver does not read.
        """
        answers = self._submit_to_all(Call(stage, method, step_context, argument=argument), payloads)
        return [receipt.report for receipt in self._receipts(answers, f"{stage}.{method}")]

    def publish(self, stage: str, method: str, step_context: StepContext, argument: object = None) -> list[Ref]:
        """Calls a method on all workers of a stage concurrently and returns references to their answers, by rank."""
        answers = self._submit_to_all(Call(stage, method, step_context, argument=argument, publishes=True))
        self._receipts(answers, f"{stage}.{method}")
        return [ref for ref, _ in answers]

    def _submit_to_all(self, call: Call, payloads: Sequence[Ref] = ()) -> list[list[Ref]]:
        calls = [(worker, call, payloads) for worker in self.workers(call.stage)]
        return self._session.submit(calls, self.workflow.stages[call.stage].collective)

    def _receipts(self, answers: Sequence[Sequence[Ref]], what: str) -> list[Receipt]:
        return of_type(self._session.fetch([refs[-1] for refs in answers], what), Receipt)

    # ------------------------------------------------------------------------------------------------------ weights
    # The driver passes references on: it never holds the weights, and a node gets one copy for all of its workers.
    # Large weights are sent in parts, each after the last one was installed, so that only copies of one part exist.
    # Iterations that run ahead keep whole versions.
    def sync_weights(self, state: Iteration | None = None, made: Mapping[str, Ref] | None = None) -> None:
        """Sends weights along all edges to workers that do not share them: `made`, by stage, or exported now.

        `state` is the running iteration.  Without one, complete weights are sent even along edges with `changes`.
        """
        step_context, owners = state.step_context if state else StepContext(0), self._hosts.owners
        for edge in self.workflow.weight_edges:
            receivers = sorted(set(owners[edge.target]) - (set() if edge.changes else set(owners[edge.source])))
            weights = None if edge.changes else (made or {}).get(edge.source)
            if receivers and weights is None:
                follows = (state is not None and edge in self._have_all) if edge.changes else None
                self.send(edge.source, edge.target, receivers, step_context, state, follows)
                self._have_all.add(edge)
            elif receivers:
                self.install(weights, edge.target, receivers, step_context, state)

    def send(
        self,
        source: str,
        target: str,
        receivers: Sequence[int],
        step_context: StepContext,
        state: Iteration | None = None,
        follows: bool | None = None,
    ) -> None:
        """Exports weights and installs them in workers of a stage, part by part; see `export` and `install`."""
        parts = self.parts_of(source, step_context)
        for at in parts:
            weights, exported = self.export(source, at, follows)
            if state is not None:
                state.timings.append(exported)
            installed = self.install(weights, target, receivers, at, state)
            del weights  # the node's store drops the part once it is installed
            if at is not parts[-1]:
                self._receipts(installed, f"weights for {target}")

    def parts_of(self, source: str, step_context: StepContext) -> list[StepContext]:
        """Returns the contexts of the calls that export a stage's weights in parts."""
        num_bytes, count = self.facts[source][0], 1
        if isinstance(num_bytes, int) and num_bytes > PART_BYTES:  # with adapters less is sent
            call = Call(source, "sent_bytes", step_context)
            (receipt,) = self._receipts(self._session.submit([(self.workers(source)[0], call, [])]), str(call))
            count = max(1, -(-cast(int, receipt.report) // PART_BYTES))
        return [replace(step_context, chunk=part, num_chunks=count) for part in range(count)]

    def export(self, source: str, step_context: StepContext, follows: bool | None = None) -> tuple[Ref, Ref]:
        """Submits a call that publishes a stage's weights, after its earlier calls; returns weights and receipt.

        `follows` is for edges with `changes`: whether the receivers have the previously published version.
        """
        call = Call(source, "export_weights", step_context, argument=follows, publishes=True)
        ((weights, receipt),) = self._session.submit([(self.workers(source)[0], call, [])])
        return weights, receipt

    def install(
        self,
        weights: Ref,
        target: str,
        receivers: Sequence[int],
        step_context: StepContext,
        state: Iteration | None = None,
    ) -> list[list[Ref]]:
        """Submits calls that install published weights in workers of a stage, after their earlier calls.

        The workers verify version and checksum.  Returns receipts; without a `state`, which collects them, it waits.
        """
        call = Call(target, "install_weights", step_context)
        answers = self._session.submit([(worker, call, [weights]) for worker in receivers])
        if state is None:
            self._receipts(answers, f"weights for {target}")
        elif answers:
            state.receipts.append((f"{target}.install_weights", [refs[-1] for refs in answers]))
        return answers

    # -------------------------------------------------------------------------------------------------------- state
    def export_states(self, stage: str, step_context: StepContext, most: float | None = None) -> list[list[Ref]]:
        """Has the workers of a stage publish their part of its state; returns [part, receipt] of each.

        Parts of more than `most` bytes divided by the number of workers are left out.
        """
        most = None if most is None else most / len(self.workers(stage))
        return self._submit_to_all(Call(stage, "export_snapshot", step_context, argument=most, publishes=True))

    def states_of(
        self, answers: Mapping[str, Sequence[Sequence[Ref]]]
    ) -> tuple[dict[str, tuple[Ref, ...]], dict[str, list[int]]]:
        """Waits for what `export_states` submitted, by stage; returns parts of stages with a state, and their bytes."""
        states, sizes = {}, dict[str, list[int]]()
        for stage, parts_of in answers.items():
            reports = [receipt.report for receipt in self._receipts(parts_of, f"a snapshot of {stage}")]
            if any(report is not None for report in reports):
                states[stage] = tuple(refs[0] for refs in parts_of)
                sizes[stage] = [report if isinstance(report, int) else 0 for report in reports]
        return states, sizes

    def import_states(self, states: Mapping[str, Sequence[Ref]], step_context: StepContext) -> None:
        """Brings stages into these states: every worker of a stage gets all parts of it."""
        for stage, parts_of in states.items():
            answers = self._submit_to_all(Call(stage, "import_snapshot", step_context), list(parts_of))
            self._receipts(answers, f"{stage}.import_snapshot")


def worker_spec(cluster: Cluster, device: int) -> WorkerSpec:
    """Returns the worker of a device, with one thread on a core, and an accelerator's share of its node's cores."""
    group = cluster.place_of(device).group
    threads = 1 if group.on_host else max(1, int(group.cores_per_device))
    return WorkerSpec(device, cluster.torch_device(device), threads, cluster.device_module, cluster.node_id(device))
