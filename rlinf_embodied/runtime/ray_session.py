"""Ray as the engine: workers are actors, data and weights lie in its store.

    driver ----submit----> actor per device (WorkerHost) --refs--> actor ...
       <----fetch-----

An actor runs its calls in the order of submission; a call whose arguments are late holds up the ones behind it, so the
driver's topological order of submission *is* the pipeline.  Nothing restarts by itself (`max_restarts=0`): a restarted
actor would be empty and still take later calls.

ray_worker.py is the actor's side; ray_lookout.py looks after the workers while the driver waits for them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.experimental import get_object_locations

from rlinf_embodied import portable
from rlinf_embodied.errors import LostNodeError
from rlinf_embodied.runtime import tensor_wire
from rlinf_embodied.runtime.call_wire import to_wire, unpack_result
from rlinf_embodied.runtime.host import Call, StageContext, WorkerSpec
from rlinf_embodied.runtime.own_folder import OwnFolder
from rlinf_embodied.runtime.placement import Placement
from rlinf_embodied.runtime.ray_files import RayFiles
from rlinf_embodied.runtime.ray_lookout import Lookout
from rlinf_embodied.runtime.ray_nodes import lost_nodes, store_room
from rlinf_embodied.runtime.ray_start import start_ray
from rlinf_embodied.runtime.ray_worker import launch
from rlinf_embodied.runtime.session import Ref, Stored
from rlinf_embodied.runtime.switchboard import Switchboard, is_stopped
from rlinf_embodied.runtime.watch import Limits
from rlinf_embodied.workflow.graph import StageSpec

_LOG = logging.getLogger(__name__)


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
        self._lookout = Lookout(self._switchboard, self._actors, self._limits)

    # --------------------------------------------------------------------------------------------------------- workers
    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """See Session."""
        new = [spec for spec in workers if spec.worker not in self._actors]
        self._placement.reserve(new)
        self._files.prepare({spec.node for spec in new if spec.node is not None}, portable.library_path())
        for spec in new:
            placement, line = self._placement.options(spec), self._switchboard.line(spec.worker)
            self._specs[spec.worker] = spec
            self._actors[spec.worker] = launch(spec, placement, line)
            if spec.node is not None:
                self._nodes[spec.worker] = spec.node

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """See Session; a collective stage gets a process group with a rendezvous of its own."""
        rendezvous, limit_s = None, self._limits.call_timeout_s
        if spec.collective and len(contexts) > 1:
            rendezvous = self._actors[contexts[0].worker].meeting_place.remote()  # goes to the members unread
        refs = []
        for context in contexts:
            context.shared = {}
            refs.append(self._actors[context.worker].add_stage.remote(spec, context, rendezvous, limit_s))
            self._lookout.note(refs[-1], context.worker, f"{spec.name}.setup")
        return self.fetch(refs, f"{spec.name}.setup")

    def replace(self, workers: Sequence[int]) -> None:
        """See Session."""
        self.attempt += 1
        self._lookout.forget()
        lost = self._lookout.at_fault(workers)
        for worker in lost:
            self._end(worker, at_once=True)
        self._switchboard.abandon(self.attempt)
        for worker in self._lookout.stuck():
            _LOG.warning("worker %d does not let go of what it does: it is started anew, too", worker)
            lost.add(worker)
            self._end(worker, at_once=True)
        try:
            self._require_nodes()
        except LostNodeError:
            self._end_all(at_once=True)
            raise
        self.start([self._specs[worker] for worker in sorted(lost)])

    def _require_nodes(self) -> None:
        gone = lost_nodes(set(self._nodes.values()))
        if gone:
            here = tuple(worker for worker, node in self._nodes.items() if node in gone)
            raise LostNodeError(f"the nodes {', '.join(gone.values())} are gone, with workers {here}", here)

    def _end(self, worker: int, at_once: bool = False) -> None:
        """Ends a worker; one that is stopped, or that hangs (`at_once`), by the system: Ray would wait for it."""
        caller = self._switchboard.callers.get(worker)
        here = caller is not None and not caller.gone and self._switchboard.is_here(caller)
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
        return {c.worker: c.pid for c in callers if self._switchboard.is_here(c) and c.worker not in gone}

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
            self._lookout.note(refs[-1], worker, str(call), payloads, refs[:-1])
            answers.append(refs)
        return answers

    def _method(self, worker: int, name: str, num_returns: int) -> Callable[..., Any]:
        """Returns what submits a worker's method; Ray makes such an object anew at each mention."""
        key = (worker, name, num_returns)
        if key not in self._methods:
            self._methods[key] = getattr(self._actors[worker], name).options(num_returns=num_returns).remote
        return self._methods[key]

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        """See Session."""
        return [unpack_result(value) for value in self._lookout.get(refs, waiting)]

    def secure(self, refs: Sequence[Ref]) -> None:
        """See Session: a copy of each comes to the store of the driver's node."""
        self._lookout.secure(refs, "a snapshot")

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

    # ------------------------------------------------------------------------------------------------------------- end
    def clear(self) -> None:
        """See Session."""
        refs = [actor.clear.remote() for actor in self._actors.values()]
        for worker, ref in zip(self._actors, refs, strict=True):
            self._lookout.note(ref, worker, "clear")
        self.fetch(refs, "clear")

    def close(self) -> None:
        """See Session; ends Ray too if this session started it."""
        self._end_all()
        self._switchboard.close()
        self._folder.cleanup()
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()
