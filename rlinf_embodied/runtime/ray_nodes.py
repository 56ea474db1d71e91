"""The nodes of a running Ray cluster: joined, listed, and asked what they have.

    driver ----ray.nodes()----> ids, addresses, what each was given to Ray with
       ----a task per node----> GPUs, cores, memory, versions (NodeFacts)

A node is asked once: what it says holds as long as it lives.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_embodied.cluster.hardware import gpu_memory_bytes, gpu_names, host_memory_bytes, num_cores
from rlinf_embodied.cluster.nodes import NodeFacts, RayNode, require_alike
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime.worker_process import prepare_driver, task_variables
from rlinf_embodied.telemetry.run_folder import library_versions

_KNOCK_S = 5.0
_PACKAGES = ("rlinf_embodied", "envs", "policies")
_FACTS: dict[str, NodeFacts] = {}  # by node id


def join(address: str) -> None:
    """Connects this process to a running Ray cluster, unless it is connected already.

    Raises:
        ConfigError: nothing answers there, or this machine is no node of it.
    """
    if ray.is_initialized():
        return
    prepare_driver()
    if address != "auto":
        _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"cluster.address is {address!r}, but this machine is no node of a Ray cluster there ({first}): run `ray "
            "start --head` here, or `ray start --address=<head>:6379` to join one (docs/clusters.md); or leave "
            "cluster=ray out to train on this machine alone"
        ) from error


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.address is {address!r}, but nothing answers there ({error}): run `ray start --head` on that "
            "machine, and let the port through its firewall (docs/clusters.md)"
        ) from error


def ray_nodes(address: str, timeout_s: float) -> list[RayNode]:
    """Returns the living nodes of a cluster, this process joined to it.

    Raises:
        ConfigError: there is no such cluster, a node does not answer, or runs something else than the driver.
    """
    join(address)
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if is_up(node)]
    _ask([node for node in alive if node["NodeID"] not in _FACTS], timeout_s)
    nodes = [
        RayNode(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_cpus=int(node["Resources"].get("CPU", 0)),
            num_gpus=int(node["Resources"].get("GPU", 0)),
            is_here=node["NodeID"] == here,
            facts=_FACTS[node["NodeID"]],
        )
        for node in alive
    ]
    require_alike(nodes, versions())
    return nodes


def is_up(node: Mapping[str, Any]) -> bool:
    """Returns whether a node, one of ray.nodes(), is there: Ray learns of a node's end up to half a minute late."""
    if not node["Alive"]:
        return False
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_KNOCK_S).close()
    except OSError:
        return False
    return True


def store_room() -> int:
    """Returns the size of the object store of this node, in bytes."""
    here = ray.get_runtime_context().get_node_id()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == here]
    return int(node["Resources"].get("object_store_memory", 0))


def lost_nodes(node_ids: Collection[str]) -> dict[str, str]:
    """Returns those of these nodes that are gone, with their addresses."""
    known = {node["NodeID"]: node for node in ray.nodes()} if node_ids else {}
    gone = {node_id: known.get(node_id) for node_id in node_ids}
    gone = {node_id: node for node_id, node in gone.items() if node is None or not is_up(node)}
    return {node_id: "unknown" if node is None else node["NodeManagerAddress"] for node_id, node in gone.items()}


def versions() -> dict[str, str]:
    """Returns what has to be alike on all nodes: the libraries, and this package by its source."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return library_versions() | {"rlinf_embodied": digest.hexdigest()[:12]}


def examine() -> NodeFacts:
    """Returns what this node has."""
    return NodeFacts(
        gpus=tuple(gpu_names()),
        gpu_memory_bytes=tuple(gpu_memory_bytes()),
        num_cores=num_cores(),
        memory_bytes=host_memory_bytes(),
        versions=versions(),
    )


def _ask(nodes: list[dict], timeout_s: float) -> None:
    """Has nodes examine themselves, all at the same time."""
    asked = {}
    # Ray hides the GPUs of a node from tasks that ask for none, which this one is to see
    variables = {**task_variables(), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    for node in nodes:
        task = ray.remote(examine).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            runtime_env={"env_vars": variables},
        )
        asked[node["NodeID"]] = node["NodeManagerAddress"], task.remote()
    for node_id, (place, ref) in asked.items():
        try:
            _FACTS[node_id] = cast(NodeFacts, ray.get(ref, timeout=timeout_s))
        except GetTimeoutError as error:
            raise ConfigError(
                f"cluster.address: node {place} said nothing for {timeout_s:.0f} s (cluster.first_progress_s): look at "
                "its logs in /tmp/ray, or take it out of the cluster with `ray stop` there"
            ) from error
        except RayError as error:
            cause = str(getattr(error, "cause", error)).strip().splitlines()[-1]
            raise ConfigError(
                f"cluster.address: node {place} cannot run this package ({cause}): install it there as on the "
                f"driver's machine (python {os.path.realpath('/proc/self/exe')}; docs/clusters.md)"
            ) from error
