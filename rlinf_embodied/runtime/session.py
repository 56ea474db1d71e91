"""Sessions run workers: the protocol, and its implementation in one process; ray_session.py implements it on Ray.

The driver submits calls and gets references.  It passes references to other calls as payloads, and fetches those whose
values it needs itself.  A worker runs its calls in the order of submission.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, cast

from rlinf_embodied.cluster.hardware import Cluster, cluster_at_hand
from rlinf_embodied.cluster.nodes import cluster_of
from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.errors import HangError
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.runtime.host import Call, StageContext, WorkerHost, WorkerSpec
from rlinf_embodied.workflow.graph import StageSpec

Ref = object  # opaque to everyone but the session that made it
_Kind = TypeVar("_Kind")


def of_type(values: Iterable[object], kind: type[_Kind]) -> list[_Kind]:
    """Returns values from workers as a list, after checking that all of them are of this type."""
    checked = list(values)
    for value in checked:
        assert isinstance(value, kind), f"a worker returned a {type(value).__name__}, not a {kind.__name__}"
    return cast("list[_Kind]", checked)


class Session(Protocol):
    """Workers, numbered by their device, and the calls to them."""

    @property
    def relays(self) -> bool:
        """Whether its workers may call each other (runtime/relay.py); a relay gets its payloads as references.

        Calls of several callers reach a worker in any order, and those that wait for payloads do not delay another
        caller's.
        """
        ...

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Starts those of these workers that do not run yet."""
        ...

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """Builds a stage in each of its workers (in the order of its group's ranks) and returns their facts.

        The host sets the context's group and shared objects.
        """
        ...

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        """Submits calls (worker, call, payloads); returns for each its block results, then its receipt, as references.

        Collective calls exchange data with each other while they run.
        """
        ...

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        """Waits for values.

        Raises:
            LostWorkerError: a worker's process is gone; the message names it and its call.
            HangError: a worker makes no progress; the message names it and the workers that wait for it.
            RlinfError: the error of the worker that failed, not of one that waited for it.
        """
        ...

    def secure(self, refs: Sequence[Ref]) -> None:
        """Ensures that these values outlive the workers that produced them; raises as `fetch`."""
        ...

    def replace(self, workers: Sequence[int]) -> None:
        """Begins a new attempt after an error: these workers are restarted, without stages.

        Running calls of the other workers are abandoned, and their collectives are closed; a worker that does not
        abandon its calls in time is restarted as well.

        Raises:
            LostNodeError: a node is gone; the session then has no workers, and can start new ones.
        """
        ...

    def clear(self) -> None:
        """Drops all stages of all workers; the workers stay."""
        ...

    def close(self) -> None: ...


class SerialSession:
    """All workers in this process, one call at a time: for debuggers and unit tests."""

    relays = False

    def __init__(self, timeout_s: float = 86400.0) -> None:
        """Takes the limit after which collective calls stop waiting for each other."""
        self.attempt = 0
        self._timeout_s = timeout_s
        self._hosts: dict[int, WorkerHost] = {}
        self._groups: dict[str, list[ThreadGroup]] = {}  # by stage

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        for spec in workers:
            self._hosts.setdefault(spec.worker, WorkerHost(spec))

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        collective = spec.collective and len(contexts) > 1
        self._groups[spec.name] = ThreadGroup.make(len(contexts), timeout_s=self._timeout_s) if collective else []
        facts = []
        for rank, context in enumerate(contexts):
            group = self._groups[spec.name][rank] if collective else SoloGroup()
            facts.append(self._hosts[context.worker].add_stage(spec, context, group))
        return facts

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        """Runs collective calls in separate threads, and all others immediately in this one."""
        at = [replace(call.step_context, attempt=self.attempt) for _, call, _ in calls]
        calls = [(w, replace(c, step_context=now), p) for (w, c, p), now in zip(calls, at, strict=True)]
        if not collective or len(calls) == 1:
            return [self._hosts[worker].invoke(call, payloads) for worker, call, payloads in calls]
        results: list[list[Ref]] = [[] for _ in calls]
        errors: list[BaseException] = []

        def member(index: int) -> None:
            worker, call, payloads = calls[index]
            try:
                results[index] = self._hosts[worker].invoke(call, payloads)
            except BaseException as error:  # noqa: BLE001 - raised again below, in the driver's thread
                errors.append(error)
                for group in self._groups[call.stage]:
                    group.close()

        threads = [threading.Thread(target=member, args=(index,), daemon=True) for index in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._timeout_s)
        if errors:
            raise next((e for e in errors if not isinstance(e, HangError)), errors[0])
        if any(thread.is_alive() for thread in threads):
            raise HangError(f"the driver waited {self._timeout_s:.0f} s for {calls[0][1]}: one of its workers hangs")
        return results

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        """Returns the values: all calls have run already."""
        return list(refs)

    def secure(self, refs: Sequence[Ref]) -> None:
        """Does nothing: values are in this process."""

    def replace(self, workers: Sequence[int]) -> None:
        """Begins a new attempt; a thread that hangs is not ended."""
        self.attempt += 1
        for worker, host in self._hosts.items():
            host.state.abandon(self.attempt)
            host.close_groups()
            if worker in workers:
                host.tear_down()  # its threads would not end with it, as those of a process do
                self._hosts[worker] = WorkerHost(host.spec)

    def clear(self) -> None:
        self._groups.clear()
        for host in self._hosts.values():
            host.clear()

    def close(self) -> None:
        for host in self._hosts.values():
            host.tear_down()
        self._hosts.clear()


# ------------------------------------------------------------------------------------------------------- of a run
# ray takes half a second to import, so it is imported only if it is used
def make_session(config: ClusterConfig) -> Session:
    """Returns the session that `cluster.session` names."""
    if config.session == "serial":
        return SerialSession()
    from rlinf_embodied.runtime.ray_cluster import join
    from rlinf_embodied.runtime.ray_session import RaySession

    if config.address is not None:
        join(config.address)
    return RaySession(config.object_store_bytes, config.hang_after_s, config.first_progress_s)


def find_cluster(config: ClusterConfig) -> Cluster:
    """Returns the cluster of a run: this machine, or the nodes of the Ray cluster at `cluster.address`.

    Raises:
        ConfigError: it has fewer devices than requested, does not exist, or its nodes differ.
    """
    if config.address is None:
        return cluster_at_hand(config)
    from rlinf_embodied.runtime.ray_cluster import ray_nodes

    return cluster_of(ray_nodes(config.address, config.first_progress_s), config)


def find_remaining(config: ClusterConfig) -> Cluster:
    """Returns the remaining cluster after a node was lost, with no more devices than the run was given."""
    left = find_cluster(replace(config, num_devices=None))
    asked = config.num_devices
    return find_cluster(config) if asked is not None and asked < left.num_computing else left
