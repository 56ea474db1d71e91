"""Ray as the engine: workers are actors, data and weights lie in its store.

    driver ----submit----> actor per device (WorkerHost) --refs--> actor ...
       <----fetch-----

An actor runs its calls in the order of submission; a call whose arguments are late holds up the ones behind it, so the
driver's topological order of submission *is* the pipeline.  Nothing restarts by itself (`max_restarts=0`): a restarted
actor would be empty and still take later calls.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.experimental import get_object_locations

from rlinf_embodied import portable
from rlinf_embodied.cluster.hardware import EMULATED, store_bytes
from rlinf_embodied.errors import (
    HangError,
    LostNodeError,
    LostWorkerError,
    PeerError,
    RlinfError,
    StaleCallError,
    WorkerError,
)
from rlinf_embodied.flow.graph import StageSpec
from rlinf_embodied.learning.groups import Group, SoloGroup
from rlinf_embodied.runtime import node_files, tensor_wire
from rlinf_embodied.runtime.call_wire import Wire, from_wire, to_wire
from rlinf_embodied.runtime.heartbeat import Line, Pulse
from rlinf_embodied.runtime.host import Call, LocalRef, Receipt, StageContext, WorkerHost, WorkerSpec
from rlinf_embodied.runtime.own_folder import OwnFolder
from rlinf_embodied.runtime.placement import Placement
from rlinf_embodied.runtime.ray_files import RayFiles
from rlinf_embodied.runtime.ray_nodes import lost_nodes, store_room
from rlinf_embodied.runtime.ray_peers import RayPeers
from rlinf_embodied.runtime.rendezvous import MeetingPlace, Rendezvous, use_interface_of
from rlinf_embodied.runtime.session import Ref, Stored
from rlinf_embodied.runtime.socket_group import SocketGroup
from rlinf_embodied.runtime.switchboard import Caller, Switchboard, is_stopped
from rlinf_embodied.runtime.watch import History, Limits, Pending, diagnose
from rlinf_embodied.runtime.worker_process import prepare_driver, worker_variables
from rlinf_embodied.stop_signals import kept_from_others

_LOG = logging.getLogger(__name__)
_START_ATTEMPTS = 3
_TICK_S = 1.0  # between two looks at the workers while the driver waits
_ANSWER_S = 1.0  # within which a worker answers
_EVIDENCE_S = 3.0  # within which the cause of an error shows, after its first consequence ...
_SETTLE_S = 0.3  # ... and a worker's end, after an error that may come of it
_LET_GO_S = 20.0  # within which a worker gives up the calls of an old attempt
_SLOW_START = "timed out during startup"


class _Worker:
    """The Ray actor: a WorkerHost behind the wire's codec."""

    def __init__(self, spec: WorkerSpec, folder: str, line: Line) -> None:
        node_files.work_in(folder)
        if spec.device != EMULATED:  # a worker that only sleeps does without torch
            portable.verify()
        self._host = WorkerHost(spec, alone=True)
        self._meeting: MeetingPlace | None = None  # of the next group in which this worker is rank 0
        self._pulse = Pulse(line, self._host.activity, socket.gethostname(), self._host.abandon)

    def meeting_place(self) -> Rendezvous:
        self._meeting = MeetingPlace(ray.util.get_node_ip_address())
        return self._meeting.rendezvous

    def add_stage(
        self, spec: StageSpec, context: StageContext, rendezvous: Rendezvous | None, timeout_s: float
    ) -> object:
        context.group = SoloGroup() if rendezvous is None else self._meet(spec.name, context, rendezvous, timeout_s)
        return self._host.add_stage(spec, context)

    def _meet(self, stage: str, context: StageContext, rendezvous: Rendezvous, timeout_s: float) -> Group:
        meeting, self._meeting = self._meeting, None
        activity, rank = self._host.activity, context.owners[context.blocks[0]]
        activity.join(stage, rank, len(set(context.owners)))
        with activity.calling(f"{stage}.setup"), activity.meeting(stage, "rendezvous"):
            return _group(context, rendezvous, meeting, timeout_s)

    def regroup(self, stage: str, context: StageContext, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._host.regroup(stage, self._meet(stage, context, rendezvous, timeout_s))

    def holds_group(self, stage: str) -> bool:
        return self._host.holds_group(stage)

    def clear(self) -> None:
        self._host.clear()

    def let_go(self) -> None:
        """Answers when all calls before it are over."""

    def invoke(self, wire: Wire, argument: object, *payloads: object) -> object:
        call = from_wire(wire, tensor_wire.unpack(argument))
        results = self._host.invoke(call, [tensor_wire.unpack(payload) for payload in payloads])
        packed = [_packed(result) for result in results]
        return packed if len(packed) > 1 else packed[0]

    def relay(self, wire: Wire, actors: dict[int, ActorHandle], opened: list[Ref]) -> object:
        call = from_wire(wire)
        peers = RayPeers(actors, call.step_context.attempt, self._host.activity)
        return [_packed(result) for result in self._host.invoke(call, opened, peers)]


def _packed(result: object) -> object:
    """Returns what a worker sends; of a receipt only the report may hold tensors (weights), its spans are many."""
    if isinstance(result, Receipt):
        return replace(result, report=tensor_wire.pack(result.report))
    return result if isinstance(result, LocalRef) else tensor_wire.pack(result)


def _unpacked(value: object) -> object:
    if isinstance(value, Receipt):
        return replace(value, report=tensor_wire.unpack(value.report))
    return tensor_wire.unpack(value)


def _group(context: StageContext, rendezvous: Rendezvous, meeting: MeetingPlace | None, timeout_s: float) -> Group:
    """Returns this worker's member of a new group; torch.distributed is imported only where tensors are exchanged."""
    rank, size = context.owners[context.blocks[0]], len(set(context.owners))
    if context.device == EMULATED:
        return cast(Group, SocketGroup(rank, size, meeting or rendezvous, timeout_s))
    from rlinf_embodied.runtime.process_group import TorchGroup

    use_interface_of(ray.util.get_node_ip_address())
    listener = None if meeting is None else meeting.socket
    return TorchGroup(rank, size, rendezvous.url, timeout_s, context.device, listener)


class RaySession:
    """Workers as Ray actors on this machine or cluster; see Session for the protocol."""

    relays = True

    def __init__(
        self, timeout_s: float = 600.0, object_store_bytes: int | None = None, hang_after_s: float = 30.0
    ) -> None:
        """Connects to the running Ray of this process, or starts one."""
        self.attempt = 0
        self._methods: dict[tuple[int, str, int], Callable[..., Any]] = {}  # by worker and number of results
        self._limits = Limits(hang_after_s, timeout_s)
        self._actors: dict[int, ActorHandle] = {}
        self._specs: dict[int, WorkerSpec] = {}
        self._waiting: dict[Ref, Pending] = {}  # by receipt
        self._makers: dict[bytes, int] = {}  # by the id of a result: the reference itself would keep it in the store
        self._submitted = 0
        self._failed: dict[int, RlinfError] = {}  # by number of call: what has been seen of it already
        self._looked: set[Ref] = set()
        self._history = History()
        self._owns_ray = not ray.is_initialized()
        self._placement = Placement()
        self._files = RayFiles()
        self._nodes: dict[int, str] = {}  # of workers that have one, see WorkerSpec
        self._folder = OwnFolder()
        if self._owns_ray:
            session_folder = start_ray(object_store_bytes)
            if session_folder is not None:
                self._folder.owns_ray(session_folder)
        own = "127.0.0.1" if self._owns_ray and not os.environ.get("RAY_ADDRESS") else ray.util.get_node_ip_address()
        self._switchboard = Switchboard(socket.gethostname(), own)

    # --------------------------------------------------------------------------------------------------------- workers
    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """See Session."""
        new = [spec for spec in workers if spec.worker not in self._actors]
        self._placement.reserve(new)
        self._files.prepare({spec.node for spec in new if spec.node is not None}, portable.library_path())
        for spec in new:
            remote = ray.remote(_Worker).options(
                **self._placement.options(spec),
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"env_vars": worker_variables(spec.threads)},
                name=None,
            )
            self._specs[spec.worker] = spec
            self._actors[spec.worker] = cast(
                ActorHandle, remote.remote(spec, os.getcwd(), self._switchboard.line(spec.worker))
            )
            if spec.node is not None:
                self._nodes[spec.worker] = spec.node

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """See Session; a collective stage gets a process group with a rendezvous of its own."""
        return self._set_up(spec, contexts, {context.worker for context in contexts})

    def _set_up(self, spec: StageSpec, contexts: Sequence[StageContext], anew: Collection[int]) -> list[object]:
        """Builds a stage in the workers `anew`; in the others it is there, and gets another group."""
        rendezvous, limit_s = None, self._limits.call_timeout_s
        if spec.collective and len(contexts) > 1:
            rendezvous = self._actors[contexts[0].worker].meeting_place.remote()  # goes to the members unread
        refs = []
        for context in contexts:
            context.shared = {}
            actor = self._actors[context.worker]
            if context.worker in anew:
                refs.append(actor.add_stage.remote(spec, context, rendezvous, limit_s))
            elif rendezvous is not None:
                refs.append(actor.regroup.remote(spec.name, context, rendezvous, limit_s))
            else:
                continue
            self._note(refs[-1], context.worker, f"{spec.name}.setup")
        return self.fetch(refs, f"{spec.name}.setup")

    def replace(self, workers: Sequence[int]) -> None:
        """See Session."""
        self.attempt += 1
        self._forget_calls()
        lost = self._at_fault(workers)
        for worker in lost:
            self._end(worker, at_once=True)
        self._switchboard.abandon(self.attempt)
        for worker in self._stuck():
            _LOG.warning("worker %d does not let go of what it does: it is started anew, too", worker)
            lost.add(worker)
            self._end(worker, at_once=True)
        try:
            self._require_nodes()
        except LostNodeError:
            self._end_all(at_once=True)
            raise
        self.start([self._specs[worker] for worker in sorted(lost)])

    def _forget_calls(self) -> None:
        for forgotten in (self._waiting, self._makers, self._failed, self._looked):
            forgotten.clear()

    def _at_fault(self, workers: Sequence[int]) -> set[int]:
        """Returns those of the workers that are there, and all whose processes ended."""
        gone = {caller.worker for caller in self._switchboard.gone()}
        return {worker for worker in (*workers, *gone) if worker in self._actors}

    def _require_nodes(self) -> None:
        gone = lost_nodes(set(self._nodes.values()))
        if gone:
            here = tuple(worker for worker, node in self._nodes.items() if node in gone)
            raise LostNodeError(f"the nodes {', '.join(gone.values())} are gone, with workers {here}", here)

    # --------------------------------------------------------------------------------------------------------- mending
    def can_renew(self, spec: StageSpec, workers: Sequence[int]) -> bool:
        """See MendingSession."""
        if len(workers) < 2:
            return True
        refs = [self._actors[worker].holds_group.remote(spec.name) for worker in workers]
        for ref, worker in zip(refs, workers, strict=True):
            self._note(ref, worker, f"{spec.name}.setup")
        return not any(self.fetch(refs, f"{spec.name}.setup"))

    def renew_stage(self, spec: StageSpec, contexts: Sequence[StageContext], anew: Collection[int]) -> None:
        """See MendingSession."""
        self._set_up(spec, contexts, anew)

    def mend(self, workers: Sequence[int]) -> frozenset[int]:
        """See MendingSession."""
        self._require_nodes()
        lost: set[int] = set()
        self._switchboard.abandon(self.attempt)  # no attempt is older: only groups are closed, in which others may wait
        ending = self._at_fault(workers)
        while ending:
            for worker in ending:
                self._end(worker, at_once=True)
            lost |= ending
            ending = self._in_trouble() or self._deaf()
        self._require_nodes()
        self._forget_calls()
        self.attempt += 1
        self.start([self._specs[worker] for worker in sorted(lost)])
        return frozenset(lost)

    def _in_trouble(self) -> set[int]:
        """Returns when every call has ended; or before, with workers that die or hang meanwhile."""
        while True:
            self._look(list(self._waiting))
            gone = self._at_fault(())
            pending = [cast(ray.ObjectRef, ref) for ref in self._waiting if ref not in self._looked]
            if gone or not pending:
                return gone
            if ray.wait(pending, num_returns=len(pending), timeout=_TICK_S)[1]:
                try:
                    self._diagnose("the calls under way, before lost workers are started anew")
                except HangError as error:
                    return self._at_fault(error.workers)

    def _deaf(self) -> set[int]:
        """Returns workers that have not heard by now that groups are closed: they might close those that follow."""
        deadline, deaf = time.monotonic() + _LET_GO_S, set(self._switchboard.callers)
        while deaf and time.monotonic() < deadline:
            callers = self._switchboard.ask(_ANSWER_S)
            deaf = {worker for worker in deaf & callers.keys() if callers[worker].silent_since is not None}
        for worker in deaf:
            _LOG.warning("worker %d answers nothing: it is started anew, too", worker)
        return self._at_fault(tuple(deaf))

    def failed(self, receipts: Sequence[Ref]) -> list[bool]:
        """See MendingSession."""
        return [self._is_error(cast(ray.ObjectRef, ref)) for ref in receipts]

    def _is_error(self, ref: ray.ObjectRef) -> bool:
        try:
            ray.get(ref)
        except RayError:
            return True
        return False

    def _stuck(self) -> list[int]:
        """Returns the workers that run calls of the old attempt still, or are dead; those that only start are not."""
        up = [worker for worker in self._actors if worker in self._switchboard.callers]
        waits: dict[Ref, int] = {self._actors[worker].let_go.remote(): worker for worker in up}
        refs = cast("list[ray.ObjectRef]", list(waits))
        done, late = ray.wait(refs, num_returns=len(refs), timeout=_LET_GO_S) if refs else ([], [])
        stuck = [waits[ref] for ref in late]
        for ref in done:
            try:
                ray.get(ref)
            except RayError:
                stuck.append(waits[ref])
        return stuck

    def _end(self, worker: int, at_once: bool = False) -> None:
        """Ends a worker; one that is stopped, or that hangs (`at_once`), by the system: Ray would wait for it."""
        caller = self._switchboard.callers.get(worker)
        here = caller is not None and not caller.gone and self._is_here(caller)
        if caller is not None and here and (at_once or is_stopped(caller.pid)):
            with suppress(ProcessLookupError):
                os.kill(caller.pid, signal.SIGKILL)
        self._switchboard.forget(worker)
        self._methods = {key: method for key, method in self._methods.items() if key[0] != worker}
        ray.kill(self._actors.pop(worker), no_restart=True)

    def _end_all(self, at_once: bool = False) -> None:
        for worker in tuple(self._actors):
            self._end(worker, at_once)
        self._nodes.clear()
        self._files.close()
        self._placement.release()

    def processes(self) -> dict[int, int]:
        """Returns the process ids of the workers that run on this machine, by worker."""
        gone = {caller.worker for caller in self._switchboard.gone()}
        callers = self._switchboard.callers.values()
        return {c.worker: c.pid for c in callers if self._is_here(c) and c.worker not in gone}

    def _is_here(self, caller: Caller) -> bool:
        return caller.node == self._switchboard.node

    # ----------------------------------------------------------------------------------------------------------- calls
    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        """See Session; collective calls need only be submitted in one go: each actor takes calls in order."""
        answers = []
        stored: dict[int, Ref] = {}  # one object in the store, however many workers get it
        for worker, call, payloads in calls:
            if call.argument is not None and id(call.argument) not in stored:
                stored[id(call.argument)] = ray.put(tensor_wire.pack(call.argument))
            sent, made = to_wire(call, self.attempt), call.num_results + 1
            if call.relay:  # the references are handed on, so that it begins when the first of them is there
                peers = {part.worker: self._actors[part.worker] for shard in call.relay for part in shard}
                refs = self._method(worker, "relay", made)(sent, peers, list(payloads))
            else:
                refs = self._method(worker, "invoke", made)(sent, stored.get(id(call.argument)), *payloads)
            refs = refs if made > 1 else [refs]
            makers = {self._makers.get(cast(ray.ObjectRef, ref).binary(), 0) for ref in payloads}
            self._note(refs[-1], worker, str(call), tuple(makers - {0}))
            for ref in refs[:-1]:
                self._makers[ref.binary()] = self._submitted
            answers.append(refs)
        return answers

    def _method(self, worker: int, name: str, num_returns: int) -> Callable[..., Any]:
        """Returns what submits a worker's method; Ray makes such an object anew at each mention."""
        key = (worker, name, num_returns)
        if key not in self._methods:
            self._methods[key] = getattr(self._actors[worker], name).options(num_returns=num_returns).remote
        return self._methods[key]

    def _note(self, receipt: Ref, worker: int, call: str, inputs: tuple[int, ...] = ()) -> None:
        self._submitted += 1
        self._waiting[receipt] = Pending(self._submitted, worker, call, time.monotonic(), inputs)

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        """See Session."""
        given = cast("list[ray.ObjectRef]", list(refs))
        self._await(given, waiting)
        try:
            values = ray.get(given)
        except RayError as error:
            self._look(given)
            if not self._failed:  # of a value that is no receipt
                self._failed[0] = self._ours(error, Pending(0, -1, waiting, time.monotonic()))
            raise self._cause(waiting) from None
        for ref in refs:
            self._waiting.pop(ref, None)
            self._looked.discard(ref)
        if not self._waiting:
            self._makers.clear()
        return [_unpacked(value) for value in values]

    def secure(self, refs: Sequence[Ref]) -> None:
        """See Session: a copy of each comes to the store of the driver's node."""
        self._await(cast("list[ray.ObjectRef]", list(refs)), "a snapshot")

    def stored(self, refs: Sequence[Ref]) -> Stored | None:
        """See Session; small values, which Ray keeps with their owner, take nothing."""
        known = get_object_locations(cast("list[ray.ObjectRef]", list(refs)))
        return Stored(sum(int(value.get("object_size") or 0) for value in known.values()), store_room())

    def provide(self, workers: Sequence[int], path: Path) -> None:
        """See Session."""
        self._files.provide(path, [self._nodes[worker] for worker in workers if worker in self._nodes])

    def collect(self, workers: Sequence[int], path: Path) -> int:
        """See Session."""
        return self._files.collect(path, [self._nodes[worker] for worker in workers if worker in self._nodes])

    def _await(self, refs: list[ray.ObjectRef], waiting: str) -> None:
        """Waits until all are there, and meanwhile looks after the workers."""
        while refs and ray.wait(refs, num_returns=len(refs), timeout=_TICK_S)[1]:
            self._look(list(self._waiting))
            if self._failed or self._switchboard.gone():
                raise self._cause(waiting)
            self._diagnose(waiting)

    def _look(self, refs: list) -> None:
        """Notes the errors among those receipts that have come."""
        fresh = [ref for ref in refs if ref not in self._looked and ref in self._waiting]
        answered, _ = ray.wait(fresh, num_returns=len(fresh), timeout=0) if fresh else ([], [])
        for ref in answered:
            self._looked.add(ref)
            call = self._waiting[ref]
            try:
                ray.get(ref)
            except RayError as error:
                self._failed[call.number] = self._ours(error, call)

    def _ours(self, error: BaseException, call: Pending) -> RlinfError:
        """Returns an error of Ray's as one of ours."""
        while isinstance(error, RayTaskError):
            error = cast(BaseException, error.cause)
        if isinstance(error, RlinfError):
            return error
        who = f"worker {call.worker}, in {call.call}"
        if isinstance(error, ActorDiedError) and error.actor_init_failed:  # it raised, and would again
            return WorkerError(f"{who}: it could not be started: {str(error).splitlines()[-1]}", (call.worker,))
        if isinstance(error, ActorDiedError | NodeDiedError | OutOfMemoryError):
            return LostWorkerError(f"{who}: {_first_line(error)}", self._dead(error, call))
        if isinstance(error, RayActorError):
            return LostWorkerError(f"{who}: cannot be reached ({_first_line(error)})", (call.worker,))
        if isinstance(error, RayError):  # an object was lost with whoever held it
            return PeerError(f"{who}: what it needs is lost ({_first_line(error)})")
        return WorkerError(f"{who}: {type(error).__name__}: {error}", (call.worker,))

    def _dead(self, error: BaseException, call: Pending) -> tuple[int, ...]:
        """Returns the worker that an error of Ray's is about: not always the one whose call failed."""
        told = getattr(error, "actor_id", None)
        by_id = {actor._actor_id.hex(): worker for worker, actor in self._actors.items()}
        return (by_id.get(told, call.worker),) if told else (call.worker,)

    # --------------------------------------------------------------------------------------------------------- trouble
    def _cause(self, waiting: str) -> RlinfError:
        """Returns the error that all others are consequences of; what has failed is forgotten with it."""
        cause = self._first_cause(waiting)
        for ref in [ref for ref, call in self._waiting.items() if call.number in self._failed]:
            del self._waiting[ref]
            self._looked.discard(ref)
        self._failed.clear()
        return cause

    def _first_cause(self, waiting: str) -> RlinfError:
        """Gives the cause of what has been seen a moment to show."""
        deadline = time.monotonic() + _EVIDENCE_S
        while True:
            self._look(list(self._waiting))
            gone = self._switchboard.gone()
            errors = [self._failed[number] for number in sorted(self._failed)]
            own = [e for e in errors if not isinstance(e, LostWorkerError | PeerError | HangError | StaleCallError)]
            if gone or time.monotonic() > deadline:
                break
            if own:  # of the work itself, unless a worker's end was behind it
                deadline = min(deadline, time.monotonic() + _SETTLE_S)
            pending = [ref for ref in self._waiting if ref not in self._looked]
            ray.wait(pending, timeout=0.2) if pending else time.sleep(0.2)
        if gone:
            return LostWorkerError(self._obituary(gone, waiting, errors), tuple(caller.worker for caller in gone))
        if own:
            return own[0]
        rank = {LostWorkerError: 0, HangError: 1}
        return min(errors, key=lambda error: rank.get(type(error), 2))

    def _obituary(self, gone: Sequence[Caller], waiting: str, errors: Sequence[RlinfError]) -> str:
        said = []
        for caller in gone:
            calls = [call.call for ref, call in self._waiting.items() if call.worker == caller.worker]
            told = [str(e) for e in errors if isinstance(e, LostWorkerError) and caller.worker in e.workers]
            why = f" ({told[0]})" if told else ""
            said.append(
                f"{caller} died: its process ended while it was asked for {calls[0] if calls else 'nothing'}{why}"
            )
        return "; ".join(said) + f". The driver waited for {waiting}. Look for its last words in Ray's logs"

    def _diagnose(self, waiting: str) -> None:
        """Looks what the workers do.

        Raises:
            HangError: one makes no progress.
        """
        callers = self._switchboard.ask(_ANSWER_S)
        self._history.learn([caller.beat for caller in callers.values() if caller.beat is not None])
        pending = [call for ref, call in self._waiting.items() if ref not in self._looked]
        stopped = lambda caller: self._is_here(caller) and is_stopped(caller.pid)  # noqa: E731
        found = diagnose(pending, callers, self._history, self._limits, time.monotonic(), stopped)
        if found is None:
            return
        self._history.suspect([beat for w in found.culprits if w in callers and (beat := callers[w].beat) is not None])
        callers = self._switchboard.ask(_ANSWER_S, stacks=found.culprits)
        beats = [(callers[w], callers[w].beat) for w in found.culprits if w in callers]
        stacks = [f"{caller} is at\n{beat.stack}" for caller, beat in beats if beat is not None and beat.stack]
        raise HangError("\n".join([f"the driver waits for {waiting}", found.told, *stacks]), found.culprits)

    # ------------------------------------------------------------------------------------------------------------- end
    def clear(self) -> None:
        """See Session."""
        refs = [actor.clear.remote() for actor in self._actors.values()]
        for worker, ref in zip(self._actors, refs, strict=True):
            self._note(ref, worker, "clear")
        self.fetch(refs, "clear")

    def close(self) -> None:
        """See Session; ends Ray too if this session started it."""
        self._end_all()
        self._switchboard.close()
        self._folder.cleanup()
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def start_ray(object_store_bytes: int | None = None) -> str | None:
    """Starts Ray in this process, quietly, and returns its folder; or joins the cluster that RAY_ADDRESS names."""
    prepare_driver()
    if os.environ.get("RAY_ADDRESS"):
        with kept_from_others():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for attempt in range(_START_ATTEMPTS):
        try:
            with kept_from_others():
                started = ray.init(
                    address="local",  # never one that somebody started here, or that a killed run left a note of
                    num_cpus=max(cores, 8),  # Ray's CPUs are book-keeping here: workers are placed by the plan
                    include_dashboard=False,
                    object_store_memory=object_store_bytes or store_bytes(),
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=True,
                )
            return str(cast(Any, started).address_info["session_dir"])
        except Exception as error:  # Ray has no class for it
            ray.shutdown()
            if _SLOW_START not in str(error) or attempt + 1 == _START_ATTEMPTS:
                raise
            _LOG.warning("Ray did not start within its 30 s, as it happens on busy machines: trying again")
