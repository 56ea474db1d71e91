"""Files from node to node over Ray: a process per node reads and writes; the driver lists names, and reads no file.

provide   the driver's node -> nodes of workers     what a stage reads: policy folders, checkpoints, data sets
collect   nodes of workers  -> the driver's node    what a stage writes: checkpoints, videos
keep      values that a node's store holds, so that they outlive another node: snapshots
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.experimental import get_object_locations

from rlinf_embodied.errors import DataError, LostWorkerError, RlinfError
from rlinf_embodied.runtime import node_files
from rlinf_embodied.runtime.node_files import Entry
from rlinf_embodied.runtime.ray_cluster import here, on_node, task_variables

_Result = TypeVar("_Result")
_MOST_BYTES = 32 << 30  # more is a data set, which a node is better given once and for all
_UNDER_WAY = 8  # portions


class _Clerk:
    """The Ray actor: executes file requests on its node, in their order."""

    def do(self, function: Callable[..., object], *arguments: object) -> object:
        return function(*arguments)

    def keep(self, refs: list[ray.ObjectRef]) -> None:
        """Holds copies of values in this node's store, which may drop those that nobody holds, until the next call."""
        self._kept = ray.get(refs)


class RayFiles:
    """The files of a session's nodes; nothing runs before a second node has a worker."""

    def __init__(self) -> None:
        self._clerks: dict[str, ActorHandle] = {}  # by node id

    def prepare(self, nodes: Iterable[str], kernels: Path | None) -> None:
        """Gives nodes what a worker needs before anything else: the driver's working folder, and the pinned kernels.

        Raises:
            DataError: a node cannot have it; names the path and the node.
        """
        for node in self._others(nodes):
            self._fetch(node, node_files.work_in, os.getcwd())
        if kernels is not None:
            self.provide(kernels, nodes)

    def provide(self, path: Path, nodes: Iterable[str]) -> None:
        """Sends what lies at a path of the driver's node to nodes that do not have it."""
        path = path.absolute()
        for node in self._others(nodes):
            held = self._fetch(node, node_files.listing, str(path))
            self._send(path, here(), node, node_files.listing(str(path)), held)

    def collect(self, path: Path, nodes: Iterable[str]) -> int:
        """Brings what lies at a path of other nodes to the driver's, as far as that lacks it: so many files."""
        path, number = path.absolute(), 0
        for node in self._others(nodes):
            there = self._fetch(node, node_files.listing, str(path))
            number += self._send(path, node, here(), there, node_files.listing(str(path)))
        return number

    def keep(self, refs: Sequence[ray.ObjectRef], nodes: Collection[str]) -> None:
        """Has each value held on one node where it was not made, each node in turn; nothing where there is one node."""
        everywhere = sorted({*nodes, here()}) if nodes else []
        known = get_object_locations(list(refs)) if len(everywhere) > 1 else {}
        chosen: dict[str, list[ray.ObjectRef]] = {}
        for number, (ref, value) in enumerate(known.items()):
            others = [node for node in everywhere if node not in value["node_ids"]]
            if value["node_ids"] and others:  # Ray keeps small values with their owner, the driver
                chosen.setdefault(others[number % len(others)], []).append(ref)
        held = [(node, self._clerk(node).keep.remote(chosen.get(node, []))) for node in everywhere if known]
        for node, ref in held:
            try:
                ray.get(ref)
            except RayError as error:
                raise self._lost(node, error) from error

    def close(self) -> None:
        for clerk in self._clerks.values():
            ray.kill(clerk, no_restart=True)
        self._clerks.clear()

    def _others(self, nodes: Iterable[str]) -> list[str]:
        """Returns these nodes without the driver's, each once."""
        every = dict.fromkeys(nodes)
        return [node for node in every if node != here()] if every else []

    def _send(self, path: Path, source: str, target: str, there: Sequence[Entry], held: Sequence[Entry]) -> int:
        """Sends the files that the target lacks, in the order of their times: what seals a folder comes last."""
        missing = sorted(set(there) - set(held), key=lambda entry: (entry.mtime_ns, entry.path))
        size = sum(entry.size for entry in missing)
        if size > _MOST_BYTES:
            raise DataError(
                f"{path} holds {size / 1e9:.0f} GB that node {_address(target)} does not have, too much to be sent at "
                "each start: copy it to the same path there, or put it on a file system that all nodes share"
            )
        under_way: deque[object] = deque()
        for entry in missing:
            for offset in range(0, max(entry.size, 1), node_files.PORTION_BYTES):
                data = self._clerk(source).do.remote(node_files.read, str(path), entry.path, offset)
                under_way.append(self._clerk(target).do.remote(node_files.write, str(path), entry, offset, data))
                if len(under_way) > _UNDER_WAY:
                    self._get(target, under_way.popleft())
        for answer in under_way:
            self._get(target, answer)
        return len(missing)

    def _fetch(self, node: str, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Runs a function on a node and returns what it gives."""
        return cast(_Result, self._get(node, self._clerk(node).do.remote(function, *arguments)))

    def _get(self, node: str, answer: object) -> object:
        try:
            return ray.get(cast(ray.ObjectRef, answer))
        except RayTaskError as error:
            cause = error.cause
            told = f"a file on its way to or from node {_address(node)} is lost ({cause}): start the run again"
            raise (cause if isinstance(cause, RlinfError) else DataError(told)) from None
        except RayError as error:
            raise self._lost(node, error) from error

    def _lost(self, node: str, error: RayError) -> LostWorkerError:
        self._clerks.clear()  # of either node: a new one is started when it is needed
        return LostWorkerError(
            f"node {_address(node)} runs no process that reads or writes files ({str(error).splitlines()[0]}): look at "
            "its logs in /tmp/ray, or take it out of the cluster"
        )

    def _clerk(self, node: str) -> ActorHandle:
        if node not in self._clerks:
            runtime_env = {"env_vars": task_variables()}
            made = ray.remote(_Clerk).options(num_cpus=0, scheduling_strategy=on_node(node), runtime_env=runtime_env)
            self._clerks[node] = cast(ActorHandle, made.remote())
        return self._clerks[node]


def _address(node_id: str) -> str:
    return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id), node_id)
