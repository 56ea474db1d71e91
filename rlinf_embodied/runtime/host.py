"""The host of a worker's stages: it runs calls, resolves local references, and times every call.

    driver --Call--> WorkerHost --inputs by block--> Stage
                        |  ^
                        v  |  results that a stage of the same worker will consume never leave the process:
                      store    the driver gets a LocalRef instead

A worker is called from one thread at a time, in the order in which the driver submitted the calls.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from rlinf_embodied import device as devices
from rlinf_embodied.errors import (
    NoRoomError,
    PlanError,
    PlugInError,
    RlinfError,
    SimulatorCallError,
    SimulatorError,
    WorkerError,
)
from rlinf_embodied.learning.groups import Group, SoloGroup
from rlinf_embodied.plug_ins import load_target, raised_by_user
from rlinf_embodied.runtime import relay
from rlinf_embodied.runtime.stage_group import StageGroup
from rlinf_embodied.runtime.tensor_wire import copied, payload_bytes, to_device
from rlinf_embodied.runtime.worker_state import WorkerState
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import StageSpec


@dataclass(frozen=True, slots=True)
class StepContext:
    """The step of a run to which a call belongs; an argument of every method of a stage."""

    iteration: int
    attempt: int = 0  # results of an older attempt are dropped
    round: int = 0  # of a repeated loop
    chunk_step: int = 0
    chunk: int = 0  # of a stage whose blocks arrive in several calls ...
    num_chunks: int = 1  # ... and how many there are
    message: object = None  # a repeat's decision, for the stages downstream
    staleness: int = 0  # versions by which the weights of the rollouts are older than those that are trained
    oldest: int | None = None  # the first iteration whose data is still needed; None: this one

    @property
    def runs_ahead(self) -> bool:
        """Whether an earlier iteration's update is still pending, so that this one's data is of older weights."""
        return self.oldest is not None and self.iteration > self.oldest


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a stage: data per block for downstream stages, and a small report for the driver."""

    blocks: Mapping[int, object] = field(default_factory=dict)
    report: object = None


@dataclass(slots=True)
class StageContext:
    """The worker, device, blocks and group of a stage, passed to `setup`."""

    worker: int
    device: str  # torch's name
    blocks: tuple[int, ...]  # the blocks of this stage that live in this worker, ascending
    shards: tuple[tuple[int, ...], ...]  # the same blocks, divided into the parts in which they arrive
    num_blocks: int  # over all workers
    owners: tuple[int, ...]  # rank, within the stage's group, that owns each block
    group: Group = field(default_factory=SoloGroup)  # the workers of this stage, for collectives; set by the host
    shared: dict[str, object] = field(default_factory=dict)  # objects shared by the worker's stages; set by the host
    exclusive: frozenset[str] = frozenset()  # stages of this worker that may not be in memory together with this one
    lent: tuple[str, ...] = ()  # other devices that the stage uses (StageSpec.devices_per_worker), see `device.name_of`

    def share(self, key: str, make: Callable[[], object]) -> object:
        """Returns the worker's shared object of that name, created on first use."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


@runtime_checkable
class Stage(Protocol):
    """The running object of a StageSpec.  Besides `setup` it has the methods that its role in the workflow requires.

    Every method but `setup` takes its call's StepContext first, and data by block.

    Leaf: `run(step_context, {block: [payload, ...]}) -> Output`, payloads in the order of the edges, rounds within an
    edge.
    Loop opener: `open(step_context, blocks)`, or `open(step_context, {block: [payload, ...]})` if edges lead into the
    loop; `step(step_context, {block: message}) -> {block: message}`;
    `close(step_context, {block: None}) -> Output`.
    Loop answerer: `step` as the opener's, `close(step_context, {block: last message}) -> Output`.
    The tensors of exports may be those of the stage: they are copied before its next call.

    Weight edge: `export_weights(step_context) -> object`, and `install_weights(step_context, object)`; for an edge of
    changes `export_weights(step_context, follows)`, see Executor.export.  If `setup` returns the bytes of all
    weights, they are exported and installed in parts, `step_context.chunk` of `step_context.num_chunks`, by the bytes
    that `sent_bytes(step_context)` returns; the stage may be offloaded when it exports parts after the first.
    State: `export_snapshot(step_context) -> object` (None: it has no state, or another worker exports it), and
    `import_snapshot(step_context, [export of each worker])`, even during an iteration that is abandoned; a stage
    without them has no state between iterations.
    End: `leave()` stops background work of the stage and releases its resources before it returns.
    Context switch: `offload(step_context)` frees the device's memory and `onload(step_context)` restores the stage; a
    stage without them is always resident, and so is one on an accelerator whose class has `stays_on_accelerators`.
    """

    def setup(self, context: StageContext) -> object:
        """Builds the stage and returns plain facts about it for the driver."""
        ...


class HoldsNoMemory:
    """A stage without memory that another one could use, so offloading it does nothing."""

    def offload(self, step_context: StepContext) -> None: ...

    def onload(self, step_context: StepContext) -> None: ...


class Lent(HoldsNoMemory):
    """A stage on a device that is lent to one of its workers: calls only reserve the device and its memory."""

    def __init__(self, config: object) -> None: ...

    def setup(self, context: StageContext) -> str:
        return devices.name_of(context.device)


@dataclass(frozen=True, slots=True)
class LocalRef:
    """A reference to a value in its worker's store."""

    worker: int
    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a stage's method for some blocks.

    It has `payloads_per_block` payloads for each block.  Results of the blocks in `keep` stay in the worker.  Special
    methods are: "loop", which runs `chunk_steps` of a loop between two stages of this worker (`partner` is the
    answerer); "relay", which runs them between an answerer's worker and those of the opener (`partner`) that `relay`
    names; "enter", which only loads the stage into the device's memory, and calls its `entered` if there is one.  A
    call without blocks passes its `argument`, if any, and then its payloads to the method.  With `publishes` its result
    is for other workers, otherwise it is a report for the driver.
    """

    stage: str
    method: str
    step_context: StepContext
    blocks: tuple[int, ...] = ()
    payloads_per_block: int = 0
    keep: frozenset[int] = frozenset()
    partner: str | None = None
    chunk_steps: int = 0
    argument: object = None
    publishes: bool = False
    relay: tuple[relay.Shard, ...] = ()
    counts_bytes: bool = False  # its receipt has the bytes of its results

    def __str__(self) -> str:
        """Returns a short name for messages, for example "env.step (iteration 3, blocks 0-1)"."""
        blocks = f", blocks {self.blocks[0]}-{self.blocks[-1]}" if self.blocks else ""
        return f"{self.stage}.{self.method} (iteration {self.step_context.iteration}{blocks})"

    @property
    def num_results(self) -> int:
        """Number of results besides the receipt: one per block and stage in `makers`; for a relay also its end."""
        if not self.blocks:
            return int(self.publishes)
        return len(self.blocks) * len(self.makers) + bool(self.relay)

    @property
    def makers(self) -> tuple[str, ...]:
        """The stages whose results the call returns, each for all blocks: for a loop opener and answerer."""
        if self.method != "loop" or self.partner is None:
            return (self.stage,)
        return (self.stage, self.partner)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The last result of a call: the stage's report and the timings."""

    report: object
    spans: tuple[Span, ...]
    num_bytes: tuple[int, ...] = ()  # of the largest block's result, in the order of `makers`, if the call counts them


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker process and its device."""

    worker: int  # also the number of its device
    device: str
    threads: int = 1
    device_module: str | None = None  # imported first, see device.py
    node: str | None = None  # Ray's id of the node that it runs on; None: the driver's


def can_leave(kind: Callable[..., object], device: str) -> bool:
    """Returns whether stages of a class can be offloaded from a device (torch's name) and onloaded again."""
    offers = hasattr(kind, "offload") and hasattr(kind, "onload")
    return offers and not (devices.is_accelerator(device) and getattr(kind, "stays_on_accelerators", False))


class WorkerHost:
    """Hosts stages in one process; see the diagram above."""

    def __init__(self, spec: WorkerSpec, state: WorkerState | None = None, alone: bool = False) -> None:
        """Starts without stages.

        Raises:
            ConfigError: torch does not know the device.
        """
        devices.import_kind(spec.device_module)
        if devices.is_accelerator(spec.device):
            devices.require(spec.device)
            devices.use(spec.device)
        self.spec = spec
        self.state = state or WorkerState()
        self._groups: dict[str, StageGroup] = {}  # by stage
        self.stages: dict[str, Stage] = {}
        self.shared: dict[str, object] = {}
        self._store: dict[tuple[object, ...], object] = {}
        self._spans: list[Span] = []
        self._exclusive: dict[str, frozenset[str]] = {}  # of every stage, those that may not be in memory with it
        self._offloaded: set[str] = set()
        self._alone = alone  # the process has no other host
        self._frozen = False  # whether the objects of set-up are hidden from the garbage collector

    def add_stage(self, spec: StageSpec, context: StageContext, group: Group | None = None) -> object:
        """Builds a stage and returns the facts that its `setup` reports."""
        group = self._groups[spec.name] = StageGroup(group or context.group, spec.name, self.state)
        context, where = replace(context, group=cast(Group, group), shared=self.shared), f"{spec.name}.setup"
        try:
            make = load_target(spec.target)
            torch = sys.modules.get("torch")  # if a stage has imported it; a process of several workers has one thread
            if torch is not None:
                torch.set_num_threads(self.spec.threads if self._alone else 1)
            stage = make(spec.config)
            assert isinstance(stage, Stage)
            self._admit(spec.name, type(stage), context.exclusive)
            self.stages[spec.name] = stage
            with self.state.calling(where), self.state.stepping(where):
                return stage.setup(context)
        except Exception as error:
            group.close()
            if isinstance(error, RlinfError):
                raise
            raise self._failure(where, error) from error

    def close_groups(self) -> None:
        """Ends this worker's membership in all collectives; called from another thread."""
        for group in tuple(self._groups.values()):
            group.close()

    def tear_down(self) -> None:
        """Makes every stage stop background work and release its resources, such as simulators."""
        for stage in self.stages.values():
            getattr(stage, "leave", lambda: None)()

    def clear(self) -> None:
        """Drops all stages, shared objects and stored values, as if the worker had just started."""
        self.tear_down()
        self.stages.clear()
        self._groups.clear()
        self.state.leave_groups()
        self._exclusive, self._offloaded = {}, set()
        self.shared = {}  # not cleared in place: contexts of the old stages hold it
        self._store.clear()
        if self._frozen:
            gc.unfreeze()
        self._frozen = False
        gc.collect()
        devices.empty_cache(self.spec.device)

    def invoke(self, call: Call, payloads: Sequence[object], peers: relay.Peers | None = None) -> list[object]:
        """Runs a call and returns its block results, then a Receipt.

        A relay's payloads are references, which `peers` takes.

        Raises:
            WorkerError: the stage raised another error than an RlinfError; the message names the call.
            StaleCallError: the call belongs to an abandoned attempt.
        """
        with self.state.calling(str(call)):
            try:
                return self._invoke(call, payloads, peers)
            except BaseException as error:
                if call.stage in self._groups:  # so that the other members do not wait for this one
                    self._groups[call.stage].close()
                passes = isinstance(error, RlinfError) and not isinstance(error, SimulatorError)
                if passes or not isinstance(error, Exception):
                    raise
                raise self._failure(str(call), error) from error

    def _invoke(self, call: Call, payloads: Sequence[object], peers: relay.Peers | None) -> list[object]:
        at = call.step_context
        self.state.begin(at.attempt)
        oldest = at.iteration if at.oldest is None else at.oldest  # an iteration consumes only its own data
        self._store = {key: value for key, value in self._store.items() if cast(int, key[0]) >= oldest}
        if self._alone and not self._frozen:  # hides the objects of set-up, mostly modules, from the garbage collector
            self._frozen = True
            gc.collect()  # frozen garbage would never be freed
            gc.freeze()
        self._spans = []
        for name in call.makers:
            # states, and the later parts of weights, are copied from wherever they are
            if call.method != "export_snapshot" and not (call.method == "export_weights" and at.chunk):
                self._enter(name, at)
        values = [self._store[p.key] if isinstance(p, LocalRef) else p for p in payloads]
        count = call.payloads_per_block
        inputs = {block: values[i * count : (i + 1) * count] for i, block in enumerate(call.blocks)}
        if call.method == "loop":
            results, report = self._loop(call, inputs)
        elif call.method == "relay":
            assert peers is not None
            results, report = self._relay(call, payloads, peers), None
        elif call.blocks:
            results, report = self._plain(call, inputs)
        else:
            results, report = self._whole(call, values)
        sizes, width = [payload_bytes(r) for r in results] if call.counts_bytes else [], len(call.blocks) or 1
        num_bytes = tuple(max(sizes[at : at + width]) for at in range(0, len(sizes), width))
        blocks = call.blocks * len(call.makers)
        results = [self._keep(call, i, r) if call.keep and blocks[i] in call.keep else r for i, r in enumerate(results)]
        ends = [None] if call.method == "relay" else []
        return [*results, *ends, Receipt(report, tuple(self._spans), num_bytes)]

    # ----------------------------------------------------------------------------------------- the device's memory
    # Of stages that exclude each other only one is loaded at a time.  A stage is loaded from its set-up on.  It is
    # offloaded when one that excludes it is called (or set up), and onloaded when it is called itself.
    def _admit(self, name: str, kind: type, exclusive: frozenset[str]) -> None:
        """Offloads the stages that a new one, or one that replaces another, excludes."""
        if exclusive and not can_leave(kind, self.spec.device):
            raise PlanError(
                f"the plan offloads {name} from the memory of {self.spec.device} for {', '.join(sorted(exclusive))}, "
                f"but a {kind.__name__} stays there: leave it out of `exclusive`, or give {name} separate devices"
            )
        self._exclusive[name] = exclusive
        self._offloaded.discard(name)
        self._make_room(name, StepContext(0))

    def _enter(self, name: str, step_context: StepContext) -> None:
        """Onloads a stage after offloading those that it excludes."""
        self._make_room(name, step_context)
        if name in self._offloaded:
            self._switch(name, "onload", step_context)
            self._offloaded.remove(name)

    def _make_room(self, name: str, step_context: StepContext) -> None:
        for other in sorted(self._exclusive[name] & (self._exclusive.keys() - self._offloaded)):
            self._switch(other, "offload", step_context)
            self._offloaded.add(other)

    def _switch(self, name: str, method: str, step_context: StepContext) -> None:
        """Offloads or onloads a stage; its results in the store are offloaded with it.

        Consumers accept data on any device, since results of other workers arrive on the CPU.
        """
        self._timed(name, method, step_context)
        if method == "offload" and devices.is_accelerator(self.spec.device):
            self._store |= {key: to_device(value, "cpu") for key, value in self._store.items() if key[1] == name}

    # --------------------------------------------------------------------------------------------------- kinds of calls
    def _plain(self, call: Call, inputs: dict[int, list[object]]) -> tuple[list[object], object]:
        argument: object = inputs
        if call.method == "open" and not call.payloads_per_block:
            argument = call.blocks
        elif call.method in ("step", "close"):
            argument = {block: parts[0] if parts else None for block, parts in inputs.items()}
        output = self._timed(call.stage, call.method, call.step_context, argument)
        if isinstance(output, Output):
            return [output.blocks[block] for block in call.blocks], output.report
        return [output[block] for block in call.blocks], None

    def _whole(self, call: Call, payloads: list[object]) -> tuple[list[object], object]:
        """Runs a call without blocks."""
        stage, method, step_context = call.stage, call.method, call.step_context
        own = (lambda value: value) if self._alone else copied  # a process sends it before its next call
        if method == "enter":
            entered = getattr(self.stages[stage], "entered", None)
            return [], entered and entered(step_context, *payloads)
        if method == "export_snapshot":  # reports the bytes, None without a state; more than `argument` stay here
            state = self._timed(stage, method, step_context) if hasattr(self.stages[stage], method) else None
            size = None if state is None else payload_bytes(state)
            most = cast("float | None", call.argument)
            return [None if most is not None and (size or 0) > most else own(state)], size
        arguments = [*([] if call.argument is None else [call.argument]), *payloads]
        if method == "import_snapshot":
            return [], self._timed(stage, method, step_context, arguments)
        answer = self._timed(stage, method, step_context, *arguments)
        return ([own(answer)], None) if call.publishes else ([], answer)

    def _loop(self, call: Call, inputs: dict[int, list[object]]) -> tuple[list[object], object]:
        """Runs the whole loop in this process, with the calls that a driver would make, in the same order."""
        assert call.partner is not None
        opener, answerer, at = call.stage, call.partner, call.step_context
        messages = self._timed(opener, "open", at, inputs if call.payloads_per_block else call.blocks)
        for step in range(call.chunk_steps):
            step_context = replace(at, chunk_step=step)
            answers = self._timed(answerer, "step", step_context, messages)
            messages = self._timed(opener, "step", step_context, answers)
            if all(message is None for message in messages.values()):
                break
        of_answerer = self._timed(answerer, "close", at, messages)
        of_opener = self._timed(opener, "close", at, dict.fromkeys(call.blocks))
        return [output.blocks[block] for output in (of_opener, of_answerer) for block in call.blocks], of_opener.report

    def _relay(self, call: Call, opened: Sequence[object], peers: relay.Peers) -> list[object]:
        """Runs a loop's chunk-steps with openers in other workers; returns their last messages."""

        def answer(step_context: StepContext, messages: dict[int, object]) -> Mapping[int, object]:
            step = replace(call, method="step", step_context=step_context, blocks=tuple(messages))
            with self.state.calling(str(step)):
                output = self._timed(call.stage, "step", step_context, messages)
            return output.blocks if isinstance(output, Output) else output

        last, receipts = relay.run(call, opened, peers, answer)
        self._spans.extend(span for receipt in receipts if isinstance(receipt, Receipt) for span in receipt.spans)
        return last

    def _timed(self, name: str, method: str, step_context: StepContext, *arguments: object) -> Any:
        self.state.require_current(step_context.attempt)
        start, step = time.time(), f"{name}.{method}"
        with self.state.stepping(step):
            result = getattr(self.stages[name], method)(step_context, *arguments)
        args = {"iteration": step_context.iteration, "chunk_step": step_context.chunk_step}
        self._spans.append(Span(step, name, self.spec.worker, self.spec.device, start, time.time(), args))
        return result

    # -------------------------------------------------------------------------------------------------- what stays here
    def _keep(self, call: Call, index: int, value: object) -> LocalRef:
        at, stage = call.step_context, call.makers[index // len(call.blocks)]
        key = (at.iteration, stage, call.method, at.round, at.chunk_step, call.blocks, index)
        self._store[key] = value  # replaces the value of an abandoned attempt
        return LocalRef(self.spec.worker, key)

    def _failure(self, where: str, error: Exception) -> WorkerError:
        workers = (self.spec.worker,)
        failed = f"worker {self.spec.worker} (pid {os.getpid()}, {self.spec.device}) failed in {where}: "
        users = raised_by_user(error)
        if users is not None:
            return PlugInError(f"{failed}{users}\nFix it there, then give the same command again", workers)
        if isinstance(error, SimulatorError):
            return SimulatorCallError(f"{failed}{error}", workers)
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        path = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
        if devices.is_out_of_memory(error):
            return NoRoomError(
                f"worker {self.spec.worker} ({self.spec.device}) has no room for {where}: {error} (at {path}). "
                f"Its stages are {', '.join(self.stages)}: make them exclusive (in a plan, or by plan=auto), give them "
                "more devices, or make blocks, microbatches or the model smaller",
                workers,
            )
        return WorkerError(f"{failed}{type(error).__name__}: {error} (at {path})", workers)


def solo_context(blocks: Sequence[int], device: str = "cpu", worker: int = 0) -> StageContext:
    """Returns the context of a stage with a single worker, which owns all blocks."""
    all_blocks = tuple(blocks)
    return StageContext(worker, device, all_blocks, (all_blocks,), len(all_blocks), (0,) * len(all_blocks))
