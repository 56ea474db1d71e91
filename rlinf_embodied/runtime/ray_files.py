"""Files from node to node over Ray: a task reads, a task writes; the driver hands references on and lists names.

provide   the driver's node -> nodes of workers     what a stage reads: policy folders, checkpoints, data sets
collect   nodes of workers  -> the driver's node    what a stage writes: checkpoints, videos
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_embodied.errors import DataError, RlinfError
from rlinf_embodied.runtime import node_files
from rlinf_embodied.runtime.node_files import Entry
from rlinf_embodied.runtime.worker_process import task_variables

_Result = TypeVar("_Result")
_MOST_BYTES = 32 << 30  # more is a data set, which a node is better given once and for all


def prepare(nodes: Iterable[str], kernels: Path | None) -> None:
    """Gives nodes what a worker needs before anything else: the driver's working folder, and the pinned kernels.

    Raises:
        DataError: a node cannot have it; names the path and the node.
    """
    for node in sorted(nodes):
        _fetch(node, node_files.work_in, os.getcwd())
    if kernels is not None:
        provide(kernels, nodes)


def provide(path: Path, nodes: Iterable[str]) -> None:
    """Sends what lies at a path of the driver's node to nodes that do not have it."""
    if not nodes:
        return
    here = _here()
    path = path.absolute()
    for node in sorted(set(nodes) - {here}):
        _send(path, here, node, node_files.listing(str(path)), _fetch(node, node_files.listing, str(path)))


def collect(path: Path, nodes: Iterable[str]) -> int:
    """Brings what lies at a path of other nodes to the driver's, as far as that does not have it: so many files."""
    others = [node for node in dict.fromkeys(nodes) if node != _here()]
    path, number = path.absolute(), 0
    for node in others:
        there = _fetch(node, node_files.listing, str(path))
        number += _send(path, node, _here(), there, node_files.listing(str(path)))
    return number


def _here() -> str:
    return ray.get_runtime_context().get_node_id()


def _send(path: Path, source: str, target: str, there: Sequence[Entry], held: Sequence[Entry]) -> int:
    """Sends the files that the target lacks, in the order of their times: what seals a folder comes last."""
    missing = sorted(set(there) - set(held), key=lambda entry: (entry.mtime_ns, entry.path))
    size = sum(entry.size for entry in missing)
    if size > _MOST_BYTES:
        raise DataError(
            f"{path} holds {size / 1e9:.0f} GB that node {_address(target)} does not have, too much to be sent at each "
            "start: copy it to the same path there, or put it on a file system that all nodes share"
        )
    for parts in node_files.portions(missing):
        data = _call(source, node_files.read, str(path), parts)
        _fetch(target, node_files.write, str(path), parts, data)
    return len(missing)


def _call(node: str, function: Callable[..., object], *arguments: object) -> ray.ObjectRef:
    """Runs a function on a node and returns a reference to what it gives."""
    task = ray.remote(function).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={"env_vars": task_variables()},
    )
    return cast(ray.ObjectRef, task.remote(*arguments))


def _fetch(node: str, function: Callable[..., _Result], *arguments: object) -> _Result:
    try:
        return cast(_Result, ray.get(_call(node, function, *arguments)))
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, RlinfError) else DataError(f"node {_address(node)}: {cause}")) from None


def _address(node_id: str) -> str:
    return next((node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id), node_id)
