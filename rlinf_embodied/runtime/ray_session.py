"""A session on Ray: workers are actors, data and weights are in its object store.

    driver ----submit----> actor per device (WorkerHost) --refs--> actor ...
       <----fetch-----

An actor runs its calls in the order of submission; a call whose arguments are late delays the ones after it, so the
driver's topological order of submission *is* the pipeline.  Ray restarts no actor (`max_restarts=0`): a restarted one
would have no stages and still accept later calls.

ray_worker.py is the actor's side; health.py watches the workers while the driver waits for them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental import get_object_locations

from rlinf_embodied.cluster.hardware import EMULATED
from rlinf_embodied.errors import LostNodeError, LostWorkerError
from rlinf_embodied.runtime import tensor_wire
from rlinf_embodied.runtime.diagnosis import History, Watched
from rlinf_embodied.runtime.health import START, Health, first_line
from rlinf_embodied.runtime.host import Call, StageContext, WorkerSpec
from rlinf_embodied.runtime.ray_cluster import here, is_up, lost_nodes, on_node, start_ray, task_variables
from rlinf_embodied.runtime.ray_worker import Members, launch, to_wire, unpack_result
from rlinf_embodied.runtime.session import Ref, of_type
from rlinf_embodied.workflow.graph import StageSpec

_LOG = logging.getLogger(__name__)
_GRACE_S = 3.0  # in which a worker should end by itself


class _Keeper:
    """A Ray actor that holds copies of values in its node's store, which may drop values without a reference."""

    def keep(self, refs: list[ray.ObjectRef]) -> None:
        """Holds these values, and drops the ones before."""
        self._kept = ray.get(refs)


class RaySession:
    """Workers as Ray actors on this machine or cluster; see Session for the protocol."""

    relays = True

    def __init__(
        self, object_store_bytes: int | None = None, hang_after_s: float = 25.0, first_progress_s: float = 600.0
    ) -> None:
        """Connects to the running Ray of this process, or starts one."""
        self.attempt = 0
        self._methods: dict[tuple[int, str, int], Callable[..., Any]] = {}  # by worker and number of results
        self._actors: dict[int, ActorHandle] = {}
        self._specs: dict[int, WorkerSpec] = {}
        self._starts: dict[Ref, int] = {}  # receipt -> worker, of workers that are starting
        self._groups = 0  # number of groups so far, for unique names
        self._owns_ray = not is_up()
        self._keepers: dict[str, ActorHandle] = {}  # by node
        self._nodes: dict[int, str] = {}  # of workers that have one, see WorkerSpec
        if self._owns_ray:
            start_ray(object_store_bytes)
        self._health = Health(self._actors, socket.gethostname(), History(hang_after_s, first_progress_s))

    # --------------------------------------------------------------------------------------------------------- workers
    def start(self, workers: Sequence[WorkerSpec]) -> None:
        new = [spec for spec in workers if spec.worker not in self._actors]
        for spec in new:
            self._specs[spec.worker] = spec
            self._actors[spec.worker] = launch(spec)
            self._health.workers[spec.worker] = Watched(spec.worker)
            started = self._actors[spec.worker].start.remote(spec, os.getcwd())
            self._health.note(started, spec.worker, START)
            self._starts[started] = spec.worker
            if spec.node is not None:
                self._nodes[spec.worker] = spec.node

    def _require_started(self) -> None:
        started = of_type(self._health.get(list(self._starts), "the start of workers"), tuple)
        starts, self._starts = self._starts, {}  # not before `get` succeeds: after a failure the others are read again
        for worker, process in zip(starts.values(), started, strict=True):
            of = self._health.workers[worker]
            of.pid, of.node = process

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """Builds a stage in its workers; a collective one's communicate by Ray messages, or by torch's collectives."""
        self._require_started()
        members, rendezvous = None, None
        if spec.collective and len(contexts) > 1:
            self._groups += 1
            actors = tuple(self._actors[context.worker] for context in contexts)
            members = Members(f"{spec.name} {self._groups}", actors, self.attempt)
            if contexts[0].device != EMULATED:
                rendezvous = actors[0].listen.remote()  # passed to the members as a reference
        refs = []
        for context in contexts:
            refs.append(self._actors[context.worker].add_stage.remote(spec, context, members, rendezvous))
            self._health.note(refs[-1], context.worker, f"{spec.name}.setup")
        return self.fetch(refs, f"{spec.name}.setup")

    def replace(self, workers: Sequence[int]) -> None:
        self.attempt += 1
        self._health.forget()
        lost = {worker for worker in workers if worker in self._actors}
        for worker in lost:
            self._end(worker)
        for worker in self._health.abandon(self.attempt):
            _LOG.warning("worker %d does not abandon its calls in time: it is restarted as well", worker)
            lost.add(worker)
            self._end(worker)
        gone_nodes = lost_nodes(set(self._nodes.values()))
        if gone_nodes:
            gone = tuple(worker for worker, node in self._nodes.items() if node in gone_nodes)
            self._end_all()
            self._starts.clear()
            raise LostNodeError(f"the nodes {', '.join(gone_nodes.values())} are gone, with workers {gone}", gone)
        self._starts = {ref: worker for ref, worker in self._starts.items() if worker not in lost}
        for ref, worker in self._starts.items():
            self._health.note(ref, worker, START)
        self.start([self._specs[worker] for worker in sorted(lost)])

    def _end(self, worker: int) -> None:
        """Ends a worker, by SIGKILL if it is on this node, since Ray would wait for one that is stopped or hangs."""
        of = self._health.workers.pop(worker)
        if of.pid and of.node == socket.gethostname():
            with suppress(ProcessLookupError):
                os.kill(of.pid, signal.SIGKILL)
        self._methods = {key: method for key, method in self._methods.items() if key[0] != worker}
        ray.kill(self._actors.pop(worker), no_restart=True)

    def _end_all(self) -> None:
        for worker in tuple(self._actors):
            self._end(worker)
        for keeper in self._keepers.values():
            ray.kill(keeper)
        self._nodes, self._keepers = {}, {}

    def processes(self) -> dict[int, int]:
        """Returns the process ids of the workers that run on this machine, by worker."""
        self._require_started()
        return {of.worker: of.pid for of in self._health.workers.values() if of.node == socket.gethostname()}

    # ----------------------------------------------------------------------------------------------------------- calls
    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        """Submits calls; collective ones need no special treatment, since each actor runs calls in order."""
        answers = []
        stored: dict[int, Ref] = {}  # one object in the store for all workers that get the argument
        for worker, call, payloads in calls:
            if call.argument is not None and id(call.argument) not in stored:
                stored[id(call.argument)] = ray.put(tensor_wire.pack(call.argument))
            wire, num_returns = to_wire(call, self.attempt), call.num_results + 1
            if call.relay:  # payloads in a list are passed as references, so it does not wait for all of them
                peers = {opener: self._actors[opener] for shard in call.relay for opener in shard}
                refs = self._method(worker, "relay", num_returns)(wire, peers, list(payloads))
            else:
                refs = self._method(worker, "invoke", num_returns)(wire, stored.get(id(call.argument)), *payloads)
            refs = refs if num_returns > 1 else [refs]
            self._health.note(refs[-1], worker, str(call), payloads, refs[:-1])
            answers.append(refs)
        return answers

    def _method(self, worker: int, name: str, num_returns: int) -> Callable[..., Any]:
        """Returns the function that submits a worker's method, cached: Ray creates one at each attribute access."""
        key = (worker, name, num_returns)
        if key not in self._methods:
            self._methods[key] = getattr(self._actors[worker], name).options(num_returns=num_returns).remote
        return self._methods[key]

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        return [unpack_result(value) for value in self._health.get(refs, waiting)]

    def secure(self, refs: Sequence[Ref]) -> None:
        """Waits until values are in the stores of their nodes, and copies each to another node if there are several."""
        self._health.wait(refs, "a snapshot", local=False)
        nodes = sorted({*self._nodes.values(), here()}) if self._nodes else []
        if len(nodes) < 2:
            return
        chosen: dict[str, list[ray.ObjectRef]] = {node: [] for node in nodes}
        locations = get_object_locations(cast("list[ray.ObjectRef]", list(dict.fromkeys(refs))))
        for number, (ref, value) in enumerate(locations.items()):
            others = [node for node in nodes if node not in value["node_ids"]]
            if value["node_ids"] and others:  # Ray keeps small values with their owner, the driver
                chosen[others[number % len(others)]].append(ref)
        receipts = [self._keeper(node).keep.remote(copies) for node, copies in chosen.items()]
        try:
            ray.get(receipts)
        except RayError as error:
            self._keepers.clear()  # new ones are started when needed
            raise LostWorkerError(f"a node that keeps copies of snapshots is lost ({first_line(error)})") from error

    def _keeper(self, node: str) -> ActorHandle:
        if node not in self._keepers:
            strategy, variables = on_node(node), {"env_vars": task_variables()}
            keeper = ray.remote(_Keeper).options(num_cpus=0, scheduling_strategy=strategy, runtime_env=variables)
            self._keepers[node] = cast(ActorHandle, keeper.remote())
        return self._keepers[node]

    # ------------------------------------------------------------------------------------------------------------- end
    def clear(self) -> None:
        refs = [actor.clear.remote() for actor in self._actors.values()]
        for worker, ref in zip(self._actors, refs, strict=True):
            self._health.note(ref, worker, "clear")
        self.fetch(refs, "clear")

    def close(self) -> None:
        """Ends the workers, and Ray if this session started it."""
        for actor in self._actors.values():  # ended by SIGKILL alone, Ray would report them as lost
            ray.kill(actor, no_restart=True)
        ours = [of.pid for of in self._health.workers.values() if of.pid and of.node == socket.gethostname()]
        until = time.monotonic() + _GRACE_S
        while any(map(psutil.pid_exists, ours)) and time.monotonic() < until:
            time.sleep(0.02)
        self._end_all()
        self._health.close()
        if self._owns_ray and ray.is_initialized():
            ray.shutdown()
