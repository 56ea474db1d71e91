"""Ray as the engine: workers are actors, data and weights lie in its store.

    driver ----submit----> actor per device (WorkerHost) --refs--> actor ...
       <----fetch-----

An actor runs its calls in the order of submission; a call whose arguments are late holds up the ones behind it, so the
driver's topological order of submission *is* the pipeline.  Nothing restarts by itself (`max_restarts=0`): a restarted
actor would be empty and still take later calls.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray._private import ray_constants, services
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlinf_embodied import portable
from rlinf_embodied.cluster.hardware import EMULATED, store_bytes
from rlinf_embodied.errors import HangError, RlinfError, WorkerError
from rlinf_embodied.flow.graph import StageSpec
from rlinf_embodied.learning.groups import Group, SoloGroup
from rlinf_embodied.runtime import node_files, tensor_wire
from rlinf_embodied.runtime.host import Call, LocalRef, Receipt, StageContext, WorkerHost, WorkerSpec
from rlinf_embodied.runtime.own_folder import OwnFolder
from rlinf_embodied.runtime.placement import Placement
from rlinf_embodied.runtime.ray_files import RayFiles
from rlinf_embodied.runtime.rendezvous import MeetingPlace, Rendezvous, use_interface_of
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.runtime.socket_group import SocketGroup
from rlinf_embodied.runtime.worker_process import prepare_driver, worker_variables
from rlinf_embodied.stop_signals import kept_from_others

_LOG = logging.getLogger(__name__)
_START_ATTEMPTS = 3
_SLOW_START = "timed out during startup"


class _Worker:
    """The Ray actor: a WorkerHost behind the wire's codec."""

    def __init__(self, spec: WorkerSpec, folder: str) -> None:
        node_files.work_in(folder)
        if spec.device != EMULATED:  # a worker that only sleeps does without torch
            portable.verify()
        self._host = WorkerHost(spec)
        self._meeting: MeetingPlace | None = None  # of the next group in which this worker is rank 0

    def meeting_place(self) -> Rendezvous:
        self._meeting = MeetingPlace(ray.util.get_node_ip_address())
        return self._meeting.rendezvous

    def add_stage(
        self, spec: StageSpec, context: StageContext, rendezvous: Rendezvous | None, timeout_s: float
    ) -> object:
        if rendezvous is None:
            context.group = SoloGroup()
        else:
            meeting, self._meeting = self._meeting, None
            context.group = _group(context, rendezvous, meeting, timeout_s)
        return self._host.add_stage(spec, context)

    def clear(self) -> None:
        self._host.clear()

    def invoke(self, call: Call, argument: object, *payloads: object) -> object:
        call = replace(call, argument=tensor_wire.unpack(argument))
        results = self._host.invoke(call, [tensor_wire.unpack(payload) for payload in payloads])
        packed = [_packed(result) for result in results]
        return packed if len(packed) > 1 else packed[0]


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

    def __init__(self, timeout_s: float = 600.0, object_store_bytes: int | None = None) -> None:
        """Connects to the running Ray of this process, or starts one."""
        self._timeout_s = timeout_s
        self._actors: dict[int, ActorHandle] = {}
        self._waiting: dict[object, str] = {}
        self._owns_ray = not ray.is_initialized()
        self._placement = Placement()
        self._files = RayFiles()
        self._nodes: dict[int, str] = {}  # of workers that have one, see WorkerSpec
        self._folder = OwnFolder()
        if self._owns_ray:
            session_folder = start_ray(object_store_bytes)
            if session_folder is not None:
                self._folder.owns_ray(session_folder)

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
            self._actors[spec.worker] = cast(ActorHandle, remote.remote(spec, os.getcwd()))
            if spec.node is not None:
                self._nodes[spec.worker] = spec.node

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """See Session; a collective stage gets a process group with a rendezvous of its own."""
        rendezvous = None
        if spec.collective and len(contexts) > 1:
            rendezvous = self._actors[contexts[0].worker].meeting_place.remote()  # goes to the members unread
        refs = []
        for context in contexts:
            context.shared = {}
            actor = self._actors[context.worker]
            refs.append(actor.add_stage.remote(spec, context, rendezvous, self._timeout_s))
            self._waiting[refs[-1]] = f"worker {context.worker} ({spec.name}.setup)"
        return self.fetch(refs, f"{spec.name}.setup")

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        """See Session; collective calls need only be submitted in one go: each actor takes calls in order."""
        answers = []
        stored: dict[int, Ref] = {}  # one object in the store, however many workers get it
        for worker, call, payloads in calls:
            if call.argument is not None and id(call.argument) not in stored:
                stored[id(call.argument)] = ray.put(tensor_wire.pack(call.argument))
            method = self._actors[worker].invoke.options(num_returns=call.num_results + 1)
            refs = method.remote(replace(call, argument=None), stored.get(id(call.argument)), *payloads)
            refs = refs if isinstance(refs, list) else [refs]
            self._waiting[refs[-1]] = f"worker {worker} ({call})"
            answers.append(refs)
        return answers

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        """See Session."""
        try:
            values = ray.get(cast("list[ray.ObjectRef]", list(refs)), timeout=self._timeout_s)
        except GetTimeoutError:
            raise HangError(f"the driver waited {self._timeout_s:.0f} s for {waiting}; {self._oldest()}") from None
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, RlinfError) else WorkerError(f"{waiting}: {cause}")) from None
        except RayActorError as error:
            who = ", ".join(sorted({self._waiting.get(ref, "a worker") for ref in refs}))
            raise WorkerError(f"a worker died while the driver waited for {waiting} from {who}: {error}") from None
        for ref in refs:
            self._waiting.pop(ref, None)
        return [_unpacked(value) for value in values]

    def _oldest(self) -> str:
        """Says which call is the oldest without an answer: whatever else is late waits for it."""
        pending = list(self._waiting)
        answered, _ = ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
        late = [self._waiting[ref] for ref in pending if ref not in set(answered)]
        if not late:
            return "its answer came just then: raise cluster.call_timeout_s"
        behind = f", {len(late) - 1} calls wait behind it (the next: {late[1]})" if len(late) > 1 else ""
        return f"no answer from {late[0]}{behind}: look at that worker, or raise cluster.call_timeout_s"

    def provide(self, workers: Sequence[int], path: Path) -> None:
        """See Session."""
        self._files.provide(path, [self._nodes[worker] for worker in workers if worker in self._nodes])

    def collect(self, workers: Sequence[int], path: Path) -> int:
        """See Session."""
        return self._files.collect(path, [self._nodes[worker] for worker in workers if worker in self._nodes])

    def clear(self) -> None:
        """See Session."""
        refs = [actor.clear.remote() for actor in self._actors.values()]
        self._waiting |= {ref: f"worker {worker} (clear)" for worker, ref in zip(self._actors, refs, strict=True)}
        self.fetch(refs, "clear")

    def close(self) -> None:
        """See Session; ends Ray too if this session started it."""
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._nodes.clear()
        self._files.close()
        self._placement.release()
        self._folder.cleanup()
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()


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
            with kept_from_others(), _in_groups_of_their_own(), _on_loopback():
                started = ray.init(
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


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Within it every process that Ray starts leads a process group, to which belongs what it starts itself.

    A terminal that closes, `timeout` and some schedulers signal the driver's whole group, and the driver needs its
    workers to finish an iteration.
    """
    starts = services.ConsolePopen  # Ray has no setting for it
    services.ConsolePopen = functools.partial(starts, process_group=0)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        services.ConsolePopen = starts


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Within it Ray starts for this machine alone: whoever reaches its ports may run any code as this user."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # what it is on other systems; Ray has no setting for it on Linux
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
