"""Monitors the workers of a session while the driver waits for them: lost workers, hangs, and the first failure.

    driver --calls--> worker    ordinary calls, in order
       |                ^ ^
       '--asks--> monitor --'   health checks, in a Ray concurrency group of the worker's actor: answered during calls

A health check sent by the driver would queue behind its calls whose arguments are not ready, so a separate actor, the
monitor, sends them.  It starts when the driver waits for long for the first time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, cast

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from rlinf_embodied.errors import HangError, LostWorkerError, PeerError, RlinfError, StaleCallError, WorkerError
from rlinf_embodied.runtime import fork_server
from rlinf_embodied.runtime.diagnosis import History, Pending, Watched, diagnose
from rlinf_embodied.runtime.ray_cluster import here, on_node
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.runtime.worker_state import Status

GROUP = "health"  # of the workers' actors
START = "start"  # a worker's first call
_TICK_S = 1.0  # between two checks of the workers while the driver waits
_FIRST_S = 5.0  # a shorter wait needs no monitor: the calls of lost workers raise
_ANSWER_S = 0.3  # within which a worker answers a health check
_EVIDENCE_S = 3.0  # within which the cause of an error is reported, after its first consequence ...
_SETTLE_S = 0.3  # ... and a worker's end, after an error that may be a consequence of it
_REPORT_S = 15.0  # within which a hang is reported, even if some of the other workers do not answer a check
_LINES = 4  # of a traceback: a place or two, and the error
_ABANDON_S = 20.0  # within which a worker acknowledges that an attempt is abandoned

_LOG = logging.getLogger(__name__)


class _Monitor:
    """The actor that sends health checks; one check per worker is under way at a time."""

    def __init__(self) -> None:
        self._asked: dict[str, ray.ObjectRef] = {}  # by actor

    def ask(self, actors: Mapping[int, ActorHandle], within_s: float, stacks: Sequence[int] = ()) -> dict[int, Status]:
        """Returns the statuses of the workers that answer in time."""
        ids = {actor._actor_id.hex(): worker for worker, actor in actors.items()}
        self._asked = {name: ref for name, ref in self._asked.items() if name in ids}
        for name in ids.keys() - self._asked.keys():
            self._asked[name] = actors[ids[name]].status.remote(ids[name] in stacks)
        refs = list(self._asked.values())
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=within_s)[0]) if refs else set()
        statuses: dict[int, Status] = {}
        for name, ref in [(name, ref) for name, ref in self._asked.items() if ref in ready]:
            del self._asked[name]
            with suppress(RayError):  # the worker is lost, which its calls report
                statuses[ids[name]] = cast(Status, ray.get(ref))
        return statuses

    def abandon(self, actors: Mapping[int, ActorHandle], attempt: int, within_s: float) -> list[int]:
        """Makes workers abandon the calls of earlier attempts; returns those that do not acknowledge it in time."""
        refs: dict[Any, int] = {actors[worker].abandon.remote(attempt): worker for worker in actors}
        ray.wait(list(refs), num_returns=len(refs), timeout=within_s) if refs else None
        stuck = []
        for ref, worker in refs.items():
            try:
                ray.get(ref, timeout=0)
            except RayError:  # it is dead, or late
                stuck.append(worker)
        return stuck


class Health:
    """Tracks the calls and the health of one session's workers."""

    def __init__(self, actors: Mapping[int, ActorHandle], node: str, history: History) -> None:
        self.workers: dict[int, Watched] = {}
        self._actors, self._node, self._history = actors, node, history
        self._monitor: ActorHandle | None = None
        self._asked: ray.ObjectRef | None = None  # a check under way
        self._trouble_since: float | None = None  # seconds, monotonic: when a hang was first diagnosed
        self._waiting: dict[Ref, Pending] = {}  # calls whose receipts were not read yet, by receipt
        self._makers: dict[bytes, int] = {}  # a result's id -> its call; a reference would keep the value in the store
        self._submitted, self._swept = 0, 256
        self._failed: dict[Ref, RlinfError] = {}  # by receipt

    # ----------------------------------------------------------------------------------------------------------- calls
    def note(
        self, receipt: Ref, worker: int, call: str, payloads: Sequence[Ref] = (), results: Sequence[ray.ObjectRef] = ()
    ) -> None:
        self._submitted += 1
        inputs = tuple({self._makers.get(cast(ray.ObjectRef, ref).binary(), 0) for ref in payloads} - {0})
        outputs = tuple(ref.binary() for ref in results)
        self._waiting[receipt] = Pending(self._submitted, worker, call, time.monotonic(), inputs, outputs)
        for output in outputs:
            self._makers[output] = self._submitted
        if len(self._waiting) > self._swept:  # receipts that nobody fetches
            self._look()
            self._swept = max(256, 2 * len(self._waiting))

    def get(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        """Waits for values and returns them as they were sent.

        Raises:
            HangError: a worker makes no progress.
            RlinfError: what a worker raised first, or that it was lost.
        """
        object_refs = cast("list[ray.ObjectRef]", list(refs))
        self.wait(object_refs, waiting)
        try:
            values = ray.get(object_refs)
        except RayError as error:
            self._look()  # finds no failure if the value is not a receipt
            cause = self._cause(waiting) if self._failed else translated(error, -1, waiting, self._actors)
            raise cause from None
        for ref in refs:
            self._answered(ref)
        return values

    def wait(self, refs: Iterable[Ref], waiting: str, local: bool = True) -> None:
        """Waits until values are in the store of the driver's node or, unless `local`, of any; raises as `get`."""
        pending = cast("list[ray.ObjectRef]", list(dict.fromkeys(refs)))
        start = time.monotonic()
        while pending and ray.wait(pending, num_returns=len(pending), timeout=_TICK_S, fetch_local=local)[1]:
            self._look()
            if self._failed:
                raise self._cause(waiting)
            self._require_starts()
            if self._monitor is not None or time.monotonic() - start > _FIRST_S:
                self._require_progress(waiting)

    def _require_starts(self) -> None:
        """Raises a WorkerError if a process that was forked for a worker could not become one."""
        reason = fork_server.failure()
        starting = sorted({call.worker for call in self._waiting.values() if call.call == START})
        if reason and starting:
            who = f"worker{'s' * (len(starting) > 1)} {', '.join(map(str, starting))}"
            action = "correct that module, the installation or PYTHONPATH, then give the same command again"
            raise WorkerError(f"{who} cannot start ({reason}): {action}", tuple(starting))

    def forget(self) -> None:
        """Drops all calls, since their work starts again."""
        self._waiting, self._makers, self._failed = {}, {}, {}
        self._asked = self._trouble_since = None  # of workers that may be replaced since

    def _answered(self, receipt: Ref) -> None:
        call = self._waiting.pop(receipt, None)
        for result in call.results if call else ():
            self._makers.pop(result, None)

    def _look(self) -> None:
        """Reads the receipts that have arrived, and sorts them into answers and errors."""
        fresh = [cast(ray.ObjectRef, ref) for ref in self._waiting if ref not in self._failed]
        for ref in ray.wait(fresh, num_returns=len(fresh), timeout=0)[0] if fresh else ():
            try:
                ray.get(ref)
            except RayError as error:
                self._failed[ref] = translated(error, self._waiting[ref].worker, self._waiting[ref].call, self._actors)
            else:
                self._answered(ref)

    # ---------------------------------------------------------------------------------------------------------- causes
    def _cause(self, waiting: str) -> RlinfError:
        """Returns the error of which all others are consequences, and drops the failed calls."""
        deadline = time.monotonic() + _EVIDENCE_S
        while True:
            self._look()
            order = sorted(self._failed, key=lambda ref: self._waiting[ref].number)
            errors = [self._failed[ref] for ref in order]
            failures = [
                e for e in errors if not isinstance(e, LostWorkerError | PeerError | HangError | StaleCallError)
            ]
            hangs = [e for e in errors if isinstance(e, HangError)]  # likelier causes than lost peers and stale calls
            lost = {w for e in errors if isinstance(e, LostWorkerError) for w in e.workers}
            if lost or time.monotonic() > deadline:
                break
            if failures:  # raised by a stage, unless a worker's end caused it
                deadline = min(deadline, time.monotonic() + _SETTLE_S)
            pending = [ref for ref in self._waiting if ref not in self._failed]
            ray.wait(cast("list[ray.ObjectRef]", pending), timeout=0.1) if pending else None
            time.sleep(0.05)
        cause = self._loss(sorted(lost), waiting, errors) if lost else (failures or hangs or errors)[0]
        for ref in order:
            self._answered(ref)
        self._failed.clear()
        return cause

    def _loss(self, lost: Sequence[int], waiting: str, errors: Sequence[RlinfError]) -> LostWorkerError:
        lines = []
        for worker in lost:
            calls = (call.call for call in self._waiting.values() if call.worker == worker)
            reason = next(str(e) for e in errors if isinstance(e, LostWorkerError) and worker in e.workers)
            of = self.workers.get(worker, Watched(worker))
            lines.append(f"{of} died: its process ended in {next(calls, 'no call')} ({reason})")
        text = f"{'; '.join(lines)}. The driver waited for {waiting}. Ray's logs hold the last output of the process"
        return LostWorkerError(text, tuple(lost))

    # ---------------------------------------------------------------------------------------------------------- health
    def _require_progress(self, waiting: str) -> None:
        answered = self.check()
        for of in self.workers.values():
            if of.status is not None:
                self._history.note(of.status.step, of.status.longest_s)
        now = time.monotonic()
        trouble = diagnose(list(self._waiting.values()), self.workers, self._history, now)
        if trouble is None:
            self._trouble_since = None
            return
        self._trouble_since = self._trouble_since or now
        others = self.workers.keys() - trouble.culprits  # the report names those that wait, from their answers
        if not others <= answered and now - self._trouble_since < _REPORT_S:
            return
        lines = [f"the driver waits for {waiting}", trouble.message]
        self.check(stacks=trouble.culprits)
        for of in (self.workers[w] for w in trouble.culprits if w in self.workers):
            if of.status is not None:
                self._history.note(of.status.step, of.status.step_s)
                lines += [f"{of} is at\n{of.status.stack}"] if of.status.stack else []
        raise HangError("\n".join(lines), trouble.culprits)

    def check(self, stacks: Sequence[int] = ()) -> Set[int]:
        """Updates the status of the workers that answer in time and returns these; the others count as silent."""
        start = time.monotonic()
        for of in self.workers.values():
            stopped = of.pid and of.node == self._node and is_stopped(of.pid)
            of.stopped_since = (of.stopped_since or start) if stopped else None
        statuses = self._statuses(stacks)
        if statuses is None:
            return set()
        for worker, of in self.workers.items():
            of.silent_since = None if worker in statuses else of.silent_since or start
            of.status = statuses.get(worker, of.status)
        return statuses.keys()

    def _statuses(self, stacks: Sequence[int]) -> dict[int, Status] | None:
        """Returns the monitor's answer; None while it starts."""
        if self._asked is None:
            present = {worker: self._actors[worker] for worker in self.workers if worker in self._actors}
            self._asked = self._require_monitor().ask.remote(present, _ANSWER_S, list(stacks))
        if not ray.wait([self._asked], timeout=_TICK_S)[0]:
            return None
        asked, self._asked = self._asked, None
        try:
            return cast("dict[int, Status]", ray.get(cast(Any, asked)))
        except RayActorError:
            _LOG.warning("the process that checks the workers' health died: it is started again")
            self._monitor = None
            return None

    def _require_monitor(self) -> Any:
        if self._monitor is None:
            monitor = cast(Any, ray.remote(_Monitor)).options(num_cpus=0, scheduling_strategy=on_node(here()))
            self._monitor = monitor.remote()
        return self._monitor

    def abandon(self, attempt: int) -> list[int]:
        """Makes all workers abandon the calls of older attempts; returns those that are dead or do not acknowledge it.

        A worker that missed it could close a group of the new attempt later.
        """
        started = {worker: self._actors[worker] for worker in self._actors if self.workers[worker].pid}
        try:
            return sorted(ray.get(self._require_monitor().abandon.remote(started, attempt, _ABANDON_S)))
        except RayActorError:
            self._monitor = None
            return sorted(started)

    def close(self) -> None:
        if self._monitor is not None:
            ray.kill(self._monitor)
        self._monitor = self._asked = None


def translated(error: BaseException, worker: int, call: str, actors: Mapping[int, ActorHandle]) -> RlinfError:
    """Translates Ray's error of a worker's call into one of this project's."""
    while isinstance(error, RayTaskError):
        error = cast(BaseException, error.cause)
    if isinstance(error, RlinfError):
        return error
    who = f"worker {worker}, in {call}"
    if isinstance(error, ActorDiedError) and error.actor_init_failed:  # its constructor would raise again
        return WorkerError(f"{who}: it could not be started: {str(error).splitlines()[-1]}", (worker,))
    if isinstance(error, ActorDiedError | NodeDiedError | OutOfMemoryError):
        dead = getattr(error, "actor_id", None)  # not always the one whose call failed
        of = next((w for w, actor in actors.items() if actor._actor_id.hex() == dead), worker)
        return LostWorkerError(f"{who}: {first_line(error)}", (of,))
    if isinstance(error, RayActorError):
        return LostWorkerError(f"{who}: cannot be reached ({first_line(error)})", (worker,))
    if isinstance(error, RaySystemError) and error.traceback_str:  # such as an import of a plug-in
        lines = "\n".join(error.traceback_str.rstrip().splitlines()[-_LINES:])
        return WorkerError(f"{who}: what was sent to it cannot be unpickled there:\n{lines}", (worker,))
    if isinstance(error, RayError):  # an object was lost with the worker that held it
        return PeerError(f"{who}: an input of it is lost ({first_line(error)})")
    return WorkerError(f"{who}: {type(error).__name__}: {error}", (worker,))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def is_stopped(pid: int) -> bool:
    """Returns whether a process of this machine is stopped; False if the system does not report it."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False
