"""The Ray actor of a worker: a process that hosts stages, joins groups of workers, and calls others in relays.

Its calls run in order in one thread; another thread answers health checks and receives messages meanwhile.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from rlinf_embodied import portable
from rlinf_embodied.cluster.hardware import EMULATED
from rlinf_embodied.errors import DataError, PeerError
from rlinf_embodied.learning.groups import Group, SoloGroup
from rlinf_embodied.runtime import tensor_wire
from rlinf_embodied.runtime.health import GROUP, translated
from rlinf_embodied.runtime.host import Call, LocalRef, Receipt, StageContext, StepContext, WorkerHost, WorkerSpec
from rlinf_embodied.runtime.ray_cluster import place, worker_variables
from rlinf_embodied.runtime.relay import Ref
from rlinf_embodied.runtime.stage_group import Key, Mailbox, MailGroup
from rlinf_embodied.runtime.worker_state import Status, WorkerState
from rlinf_embodied.workflow.graph import StageSpec

RENDEZVOUS = "rendezvous"
_TICK_S = 1.0  # between two checks whether the attempt was abandoned
Wire = dict[str, Any]  # a call as plain values, for msgpack, where a dataclass would need a pickler


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a new group."""

    name: str  # unique
    actors: tuple[ActorHandle, ...]  # by rank
    attempt: int


def launch(spec: WorkerSpec) -> ActorHandle:
    """Starts a worker without waiting for its process; its first call must be `start`."""
    remote = cast(Any, ray.remote)(concurrency_groups={GROUP: 1})(_Worker).options(
        **place(spec),
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": worker_variables(spec.threads, spec.device)},
        name=None,
    )
    return cast(ActorHandle, remote.remote())


class _Worker:
    """The Ray actor: a WorkerHost behind the wire's codec."""

    def __init__(self) -> None:
        self._host: WorkerHost | None = None
        self._state = WorkerState()
        self._mail = Mailbox()
        self._listener: socket.socket | None = None  # of the next torch group in which this worker is rank 0

    # --------------------------------------------------------------------------------------------- calls, in one thread
    def start(self, spec: WorkerSpec, folder: str) -> tuple[int, str]:
        """Creates the host in the thread of the calls, since devices are set per thread; returns pid and hostname."""
        try:
            os.chdir(folder)  # a relative path means the same as in the driver
        except OSError as error:
            raise DataError(
                f"node {socket.gethostname()} does not have the driver's folder {folder} ({error}): start the run in a "
                "folder on a file system that all nodes share"
            ) from error
        if spec.device != EMULATED:  # a worker that only sleeps does without torch
            portable.verify()
        self._host = WorkerHost(spec, self._state, alone=True)
        return os.getpid(), socket.gethostname()

    @property
    def host(self) -> WorkerHost:
        assert self._host is not None, "the first call is `start`"
        return self._host

    def listen(self) -> str:
        from rlinf_embodied.runtime.process_group import listen

        self._listener, rendezvous = listen(ray.util.get_node_ip_address())
        return rendezvous

    def add_stage(
        self, spec: StageSpec, context: StageContext, members: Members | None, rendezvous: str | None
    ) -> object:
        group: Group = SoloGroup()
        if members is not None:
            rank = context.owners[context.blocks[0]]
            self._state.join(spec.name, rank)
            with self._state.calling(f"{spec.name}.setup"), self._state.meeting(spec.name, RENDEZVOUS):
                self._state.require_current(members.attempt)
                group = self._meet(rank, members, rendezvous, context.device)
        return self.host.add_stage(spec, context, group)

    def _meet(self, rank: int, members: Members, rendezvous: str | None, device: str) -> Group:
        if rendezvous is None:
            deliver = {
                k: cast("Callable[[Key, object], object]", a.deliver.remote) for k, a in enumerate(members.actors)
            }
            return cast(Group, MailGroup(members.name, rank, deliver, self._mail))
        from rlinf_embodied.runtime.process_group import TorchGroup, use_interface_of

        use_interface_of(ray.util.get_node_ip_address())
        listener, self._listener = self._listener, None
        return TorchGroup(rank, len(members.actors), rendezvous, device, listener)

    def clear(self) -> None:
        self.host.clear()

    def invoke(self, wire: Wire, argument: object, *payloads: object) -> object:
        call = from_wire(wire, tensor_wire.unpack(argument))
        results = self.host.invoke(call, [tensor_wire.unpack(payload) for payload in payloads])
        packed = [pack_result(result) for result in results]
        return packed if len(packed) > 1 else packed[0]

    def relay(self, wire: Wire, actors: dict[int, ActorHandle], opened: list[Ref]) -> object:
        call = from_wire(wire)
        peers = RayPeers(actors, call.step_context.attempt, self._state)
        return [pack_result(result) for result in self.host.invoke(call, opened, peers)]

    # ------------------------------------------------------------------------------------- answered while a call runs
    @ray.method(concurrency_group=GROUP)
    def status(self, stack: bool = False) -> Status:
        return self._state.status(stack)

    @ray.method(concurrency_group=GROUP)
    def abandon(self, attempt: int) -> None:
        """Abandons calls of older attempts, and closes this worker's groups.

        Raises:
            PeerError: it waits in a rendezvous, which cannot be interrupted.
        """
        self._state.abandon(attempt)
        if any(of.waits_in == RENDEZVOUS for of in self._state.status().groups.values()):
            raise PeerError("this worker waits in a rendezvous")
        if self._host is not None:
            self._host.close_groups()

    @ray.method(concurrency_group=GROUP)
    def deliver(self, key: Key, value: object) -> None:
        self._mail.deliver(key, value)


class RayPeers:
    """Calls other workers by their actor handles, which come with the relaying call; see relay.Peers."""

    def __init__(self, actors: Mapping[int, ActorHandle], attempt: int, state: WorkerState) -> None:
        self._actors, self._attempt, self._state = actors, attempt, state
        self._methods: dict[tuple[int, int], Callable[..., list[ray.ObjectRef]]] = {}

    def ask(self, worker: int, call: Call, payloads: Sequence[object]) -> list[Ref]:
        key = (worker, call.num_results + 1)
        if key not in self._methods:
            self._methods[key] = self._actors[worker].invoke.options(num_returns=key[1]).remote
        packed = [tensor_wire.pack(payload) for payload in payloads]
        return list(self._methods[key](to_wire(call, self._attempt), None, *packed))

    def take(self, refs: Sequence[Ref], workers: Sequence[int]) -> list[object]:
        pending = cast("list[ray.ObjectRef]", list(refs))
        with self._state.awaiting(workers):
            while pending and ray.wait(pending, num_returns=len(pending), timeout=_TICK_S)[1]:
                self._state.require_current(self._attempt)
            try:
                values = ray.get(pending)
            except RayError as error:
                raise translated(error, workers[0], "a step of its loop", self._actors) from None
        return [value if isinstance(value, Receipt) else tensor_wire.unpack(value) for value in values]


# ------------------------------------------------------------------------------------------------------------ the wire
def to_wire(call: Call, attempt: int) -> Wire:
    """Returns a call as plain values, with the token of an attempt and without its argument."""
    at, plain = replace(call.step_context, attempt=attempt), {f.name: getattr(call, f.name) for f in fields(call)}
    return plain | {
        "step_context": [getattr(at, f.name) for f in fields(at)],
        "blocks": list(call.blocks),
        "keep": list(call.keep),
        "argument": None,
        "relay": [[[worker, list(blocks)] for worker, blocks in shard.items()] for shard in call.relay],
    }


def from_wire(wire: Wire, argument: object = None) -> Call:
    """Returns the call of `to_wire`, with its argument."""
    at, blocks, keep = StepContext(*wire["step_context"]), tuple(wire["blocks"]), frozenset(wire["keep"])
    shards = tuple({worker: tuple(owned) for worker, owned in shard} for shard in wire["relay"])
    return Call(**wire | {"step_context": at, "blocks": blocks, "keep": keep, "argument": argument, "relay": shards})


def pack_result(result: object) -> object:
    """Returns a result in the form that is sent; of a receipt only the report is packed: spans have no tensors."""
    if isinstance(result, Receipt):
        return replace(result, report=tensor_wire.pack(result.report))
    return result if isinstance(result, LocalRef) else tensor_wire.pack(result)


def unpack_result(value: object) -> object:
    """Returns the result from which `pack_result` made a value."""
    if isinstance(value, Receipt):
        return replace(value, report=tensor_wire.unpack(value.report))
    return tensor_wire.unpack(value)
