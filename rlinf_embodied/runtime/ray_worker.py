"""A worker as a Ray actor: a process that hosts stages, and meets others in the groups of collective ones."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import cast

import ray
from ray.actor import ActorHandle

from rlinf_embodied import portable
from rlinf_embodied.cluster.hardware import EMULATED
from rlinf_embodied.learning.groups import Group, SoloGroup
from rlinf_embodied.runtime import node_files, tensor_wire
from rlinf_embodied.runtime.call_wire import Wire, from_wire, pack_result
from rlinf_embodied.runtime.heartbeat import Line, Pulse
from rlinf_embodied.runtime.host import StageContext, WorkerHost, WorkerSpec
from rlinf_embodied.runtime.ray_peers import RayPeers
from rlinf_embodied.runtime.rendezvous import MeetingPlace, Rendezvous, use_interface_of
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.runtime.socket_group import SocketGroup
from rlinf_embodied.runtime.worker_process import worker_variables
from rlinf_embodied.workflow.graph import StageSpec


def launch(spec: WorkerSpec, placement: Mapping[str, object], line: Line) -> ActorHandle:
    """Starts a worker, and returns before it is there.

    Args:
        spec: of the worker.
        placement: Ray's options that say where.
        line: where it reports what it does.
    """
    remote = ray.remote(_Worker).options(
        **placement,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": worker_variables(spec.threads, spec.device)},
        name=None,
    )
    return cast(ActorHandle, remote.remote(spec, os.getcwd(), line))


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

    def clear(self) -> None:
        self._host.clear()

    def let_go(self) -> None:
        """Answers when all calls before it are over."""

    def invoke(self, wire: Wire, argument: object, *payloads: object) -> object:
        call = from_wire(wire, tensor_wire.unpack(argument))
        results = self._host.invoke(call, [tensor_wire.unpack(payload) for payload in payloads])
        packed = [pack_result(result) for result in results]
        return packed if len(packed) > 1 else packed[0]

    def relay(self, wire: Wire, actors: dict[int, ActorHandle], opened: list[Ref]) -> object:
        call = from_wire(wire)
        peers = RayPeers(actors, call.step_context.attempt, self._host.activity)
        return [pack_result(result) for result in self._host.invoke(call, opened, peers)]


def _group(context: StageContext, rendezvous: Rendezvous, meeting: MeetingPlace | None, timeout_s: float) -> Group:
    """Returns this worker's member of a new group; torch.distributed is imported only where tensors are exchanged."""
    rank, size = context.owners[context.blocks[0]], len(set(context.owners))
    if context.device == EMULATED:
        return cast(Group, SocketGroup(rank, size, meeting or rendezvous, timeout_s))
    from rlinf_embodied.runtime.process_group import TorchGroup

    use_interface_of(ray.util.get_node_ip_address())
    listener = None if meeting is None else meeting.socket
    return TorchGroup(rank, size, rendezvous.url, timeout_s, context.device, listener)
