"""Starts or joins Ray, examines its nodes, and places the workers of a plan.

    driver ----ray.nodes()----> ids, addresses, resources with which each node joined Ray
       ----a task per node----> GPUs, cores, memory, versions (NodeFacts)
       ----an actor per device> on the device's node, where it reserves a core or a GPU in Ray

On a single machine nothing is reserved: the plan knows the devices, and Ray would only refuse workers beyond its number
of cores.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import psutil
import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_embodied import portable
from rlinf_embodied.cluster.hardware import EMULATED, RAY_GPUS, gpus, host_memory_bytes, num_cores, store_bytes
from rlinf_embodied.cluster.nodes import NodeFacts, RayNode, require_alike
from rlinf_embodied.device import is_accelerator, kind_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.runtime import fork_server
from rlinf_embodied.runtime.host import WorkerSpec
from rlinf_embodied.telemetry.run_folder import library_versions

_LOG = logging.getLogger(__name__)
_START_ATTEMPTS, _SLOW_START = 3, "timed out during startup"
_NO_MEMORY = "available for tasks and actors"  # in the error of a Ray that has too little memory
_KNOCK_S = 5.0
# methods of Ray that take half of its start time; it has no option to skip them, and other versions may lack the names
_UNUSED = ("start_api_server", "start_log_monitor", "start_monitor")
_BEGUN: list[Future[None]] = []  # a start of Ray that was not waited for yet
_PACKAGES = ("rlinf_embodied", "envs", "policies")
_FACTS: dict[str, NodeFacts] = {}  # by node id: each node is examined once
_DRIVER = {  # environment variables that Ray reads when it starts or is joined
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's default, 15, yields every core to whatever else runs
    "RAY_prestart_worker_first_driver": "0",  # no actor with separate variables can use them
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # every receipt is fetched, so every error is raised
}


# ------------------------------------------------------------------------------------------------------ start and join
def _init(**options: object) -> None:
    for name, value in _DRIVER.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **cast(Any, options))


def _in_thread(start: Callable[[], None]) -> Future[None]:
    """Runs the start of Ray in a thread, where Ray does not replace the handler of SIGTERM.

    The thread stays alive: the kernel ends Ray's processes with the thread that started them.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            start()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            done.set_exception(error)
        else:
            done.set_result(None)
            threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    return done


def begin_ray(object_store_bytes: int | None = None, modules: Sequence[str] | None = None) -> None:
    """Starts Ray in the background, while this process imports slow modules; `start_ray` waits for it.

    Args:
        object_store_bytes: size of Ray's store; None: a share of this machine's memory.
        modules: modules that workers import in addition to torch, imported once for all of them by the fork server;
            None: each worker imports them itself.
    """
    if not ray.is_initialized() and not _BEGUN:
        if modules is not None and not os.environ.get("RAY_ADDRESS"):
            fork_server.start(modules, worker_variables(1))
        _BEGUN.append(_in_thread(lambda: _start(object_store_bytes)))
        atexit.register(lambda: wait(_BEGUN))  # Ray can be ended only once it has started


def start_ray(object_store_bytes: int | None = None, modules: Sequence[str] | None = None) -> None:
    """Starts Ray in this process, quietly; or joins the cluster that RAY_ADDRESS names."""
    begin_ray(object_store_bytes, modules)
    _BEGUN.pop().result()


def is_up() -> bool:
    """Returns whether other code has connected this process to Ray."""
    return ray.is_initialized() and not _BEGUN


def _start(object_store_bytes: int | None) -> None:
    if os.environ.get("RAY_ADDRESS"):
        return _init()
    for attempt in range(_START_ATTEMPTS):
        try:
            with (
                patch.multiple(Node, create=True, **dict.fromkeys(_UNUSED, lambda self, **options: None)),
                patch.object(ray_constants, "SETUP_WORKER_FILENAME", fork_server.__file__),  # an absolute path
            ):
                return _init(
                    address="local",  # never a Ray that is running here, or whose address a killed run left behind
                    num_cpus=max(num_cores(), 8),  # only a count for Ray: workers are placed by the plan
                    include_dashboard=False,
                    object_store_memory=object_store_bytes or store_bytes(),
                    configure_logging=True,
                )
        except Exception as error:  # Ray has no class for it
            ray.shutdown()
            if _NO_MEMORY in str(error):
                free = psutil.virtual_memory().available / 1e9
                action = "end other programs, or run in one process: cluster=serial plan=collocated"
                raise ConfigError(f"Ray cannot start with {free:.1f} GB of free memory: {action}") from error
            if _SLOW_START not in str(error) or attempt + 1 == _START_ATTEMPTS:
                raise
            _LOG.warning("Ray did not start within its limit of 30 s, as happens on busy machines: trying again")


def join(address: str) -> None:
    """Connects this process to a running Ray cluster, unless it is connected already.

    Raises:
        ConfigError: nothing answers at the address, or this machine is not a node of the cluster.
    """
    if ray.is_initialized():
        return
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            _knock(host.strip("[]"), int(port))
        except OSError as error:
            raise ConfigError(
                f"cluster.address is {address!r}, but nothing answers there ({error}): run `ray start --head` on that "
                "machine, and let the port through its firewall (docs/clusters.md)"
            ) from error
    try:
        _in_thread(lambda: _init(address=address)).result()
    except (RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"cluster.address is {address!r}, but this machine is no node of a Ray cluster there ({first}): run `ray "
            "start --head` here, or `ray start --address=<head>:6379` to join one (docs/clusters.md); or leave "
            "cluster=ray out to train on this machine alone"
        ) from error


def _knock(host: str, port: int) -> None:
    socket.create_connection((host, port), timeout=_KNOCK_S).close()


def worker_variables(threads: int, device: str = "cpu") -> dict[str, str]:
    """Returns the environment of a worker process; on CPU cores it is pinned (portable/) if the driver is."""
    if device == EMULATED:
        return task_variables(threads)
    return _variables(threads) | ({} if is_accelerator(device) else portable.worker_variables())


def task_variables(threads: int = 1) -> dict[str, str]:
    """Returns the environment of a process without torch, which examines a node or reads and writes files."""
    return _variables(threads) | {fork_server.VARIABLE: ""}


def _variables(threads: int) -> dict[str, str]:
    """Returns variables of all processes: the number of intra-op threads, and the driver's import paths.

    The same job ran 6-22 times slower when every process used as many threads as there are cores.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LP_NUM_THREADS")
    paths = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    return {name: str(threads) for name in names} | {"PYTHONPATH": os.pathsep.join(paths)}


# --------------------------------------------------------------------------------------------------------------- nodes
def here() -> str:
    """Returns the id of this process's node."""
    return ray.get_runtime_context().get_node_id()


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Returns Ray's option for a process that runs on one node and no other."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def ray_nodes(address: str, timeout_s: float) -> list[RayNode]:
    """Returns the living nodes of a cluster, this process joined to it.

    Raises:
        ConfigError: there is no such cluster, a node does not answer, or its versions differ from the driver's.
    """
    join(address)
    alive = [node for node in ray.nodes() if _is_up(node)]
    _ask([node for node in alive if node["NodeID"] not in _FACTS], timeout_s)
    nodes = [
        RayNode(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_cpus=int(node["Resources"].get("CPU", 0)),
            num_gpus=int(node["Resources"].get("GPU", 0)),
            is_here=node["NodeID"] == here(),
            facts=_FACTS[node["NodeID"]],
        )
        for node in alive
    ]
    require_alike(nodes, versions())
    return nodes


def _is_up(node: Mapping[str, Any]) -> bool:
    """Returns whether a node of ray.nodes() is reachable; Ray notices a lost node up to half a minute late."""
    if not node["Alive"]:
        return False
    try:
        _knock(node["NodeManagerAddress"], node["NodeManagerPort"])
    except OSError:
        return False
    return True


def lost_nodes(node_ids: Collection[str]) -> dict[str, str]:
    """Returns those of these nodes that are gone, with their addresses."""
    known = {node["NodeID"]: node for node in ray.nodes()} if node_ids else {}
    gone = [node_id for node_id in node_ids if node_id not in known or not _is_up(known[node_id])]
    return {node_id: known[node_id]["NodeManagerAddress"] if node_id in known else "unknown" for node_id in gone}


@cache
def versions() -> dict[str, str]:
    """Returns the versions that must be equal on all nodes: of libraries, and of this package by its source."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return library_versions() | {"rlinf_embodied": digest.hexdigest()[:12]}


def examine() -> NodeFacts:
    """Returns the hardware and the versions of this node."""
    return NodeFacts(gpus=tuple(gpus()), num_cores=num_cores(), memory_bytes=host_memory_bytes(), versions=versions())


def _ask(nodes: list[dict], timeout_s: float) -> None:
    """Examines nodes, all at the same time."""
    # Ray hides a node's GPUs from tasks that request none, but this task has to list them
    variables = {**task_variables(), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    shared = {"num_cpus": 0, "max_retries": 0, "runtime_env": {"env_vars": variables}}
    task = ray.remote(examine)
    refs = [task.options(**shared, scheduling_strategy=on_node(node["NodeID"])).remote() for node in nodes]
    for node, ref in zip(nodes, refs, strict=True):
        place = node["NodeManagerAddress"]
        try:
            _FACTS[node["NodeID"]] = cast(NodeFacts, ray.get(ref, timeout=timeout_s))
        except GetTimeoutError as error:
            raise ConfigError(
                f"cluster.address: node {place} did not answer for {timeout_s:.0f} s (cluster.first_progress_s): look "
                "at its logs in /tmp/ray, or take it out of the cluster with `ray stop` there"
            ) from error
        except RayError as error:
            cause = str(getattr(error, "cause", error)).strip().splitlines()[-1]
            raise ConfigError(
                f"cluster.address: node {place} cannot run this package ({cause}): install it there as on the "
                f"driver's machine (python {os.path.realpath('/proc/self/exe')}; docs/clusters.md)"
            ) from error


def place(spec: WorkerSpec) -> dict[str, object]:
    """Returns Ray's options for a worker's process: its node, and the core or GPU that it reserves there."""
    on_gpu = kind_of(spec.device) in RAY_GPUS
    resources = {"num_cpus": int(not on_gpu and spec.node is not None), "num_gpus": int(on_gpu)}
    return {**resources, "scheduling_strategy": on_node(spec.node or here())}
