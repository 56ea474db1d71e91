"""The driver's eye on its workers: which calls have no answer, what failed first, who is gone and who hangs.

note          a call is on its way
get, secure   wait for answers, and meanwhile look after the workers: switchboard.py asks them, watch.py judges
              an error is raised as its cause: of all that is seen within a moment, what others are consequences of
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rlinf_embodied.errors import (
    HangError,
    LostWorkerError,
    PeerError,
    RlinfError,
    StaleCallError,
    WorkerError,
)
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.runtime.switchboard import Caller, Switchboard, is_stopped
from rlinf_embodied.runtime.watch import History, Limits, Pending, diagnose

_LOG = logging.getLogger(__name__)
_TICK_S = 1.0  # between two looks at the workers while the driver waits
_ANSWER_S = 1.0  # within which a worker answers
_EVIDENCE_S = 3.0  # within which the cause of an error shows, after its first consequence ...
_SETTLE_S = 0.3  # ... and a worker's end, after an error that may come of it
_LET_GO_S = 20.0  # within which a worker gives up the calls of an old attempt


class Lookout:
    """Over the workers of one session."""

    def __init__(self, switchboard: Switchboard, actors: Mapping[int, ActorHandle], limits: Limits) -> None:
        """Takes where workers answer, the session's actors, as they come and go, and how long is too long."""
        self._switchboard, self._actors, self._limits = switchboard, actors, limits
        self._waiting: dict[Ref, Pending] = {}  # by receipt
        self._makers: dict[bytes, int] = {}  # by the id of a result: the reference itself would keep it in the store
        self._submitted = 0
        self._failed: dict[int, RlinfError] = {}  # by number of call: what has been seen of it already
        self._looked: set[Ref] = set()
        self._history = History()

    # ----------------------------------------------------------------------------------------------------------- calls
    def note(
        self, receipt: Ref, worker: int, call: str, payloads: Sequence[Ref] = (), results: Sequence[ray.ObjectRef] = ()
    ) -> None:
        """Takes note of a call that was submitted.

        Args:
            receipt: its answer.
            worker: that it is for.
            call: what it is, for people.
            payloads: results of earlier calls, which it takes.
            results: what it makes.
        """
        makers = {self._makers.get(cast(ray.ObjectRef, ref).binary(), 0) for ref in payloads}
        self._submitted += 1
        inputs = tuple(makers - {0})
        self._waiting[receipt] = Pending(self._submitted, worker, call, time.monotonic(), inputs)
        for ref in results:
            self._makers[ref.binary()] = self._submitted

    def get(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        """Returns values as they were sent, once all are there.

        Args:
            refs: to them; receipts are of calls that are noted.
            waiting: what for, for people.

        Raises:
            HangError: a worker makes no progress.
            RlinfError: what a worker raised first, or that it was lost.
        """
        given = cast("list[ray.ObjectRef]", list(refs))
        self._wait(given, waiting)
        try:
            values = ray.get(given)
        except RayError as error:
            self._look(given)
            if not self._failed:  # of a value that is no receipt
                self._failed[0] = self._ours(error, Pending(0, -1, waiting, time.monotonic()))
            raise self._cause(waiting) from None
        for ref in refs:
            self._waiting.pop(ref, None)
            self._looked.discard(ref)
        if not self._waiting:
            self._makers.clear()
        return values

    def secure(self, refs: Sequence[Ref], waiting: str) -> None:
        """Returns when values are in the store of the driver's node.

        Raises:
            HangError: a worker makes no progress.
            RlinfError: what a worker raised first, or that it was lost.
        """
        self._wait(cast("list[ray.ObjectRef]", list(refs)), waiting)

    def forget(self) -> None:
        """Forgets all calls: the work that they are of is begun anew."""
        for forgotten in (self._waiting, self._makers, self._failed, self._looked):
            forgotten.clear()

    def _wait(self, refs: list[ray.ObjectRef], waiting: str) -> None:
        """Waits until all are there, and meanwhile looks after the workers."""
        while refs and ray.wait(refs, num_returns=len(refs), timeout=_TICK_S)[1]:
            self._look(list(self._waiting))
            if self._failed or self._switchboard.gone():
                raise self._cause(waiting)
            self.diagnose(waiting)

    def _look(self, refs: list) -> None:
        """Notes the errors among those receipts that have come."""
        fresh = [ref for ref in refs if ref not in self._looked and ref in self._waiting]
        answered, _ = ray.wait(fresh, num_returns=len(fresh), timeout=0) if fresh else ([], [])
        for ref in answered:
            self._looked.add(ref)
            call = self._waiting[ref]
            try:
                ray.get(ref)
            except RayError as error:
                self._failed[call.number] = self._ours(error, call)

    def _ours(self, error: BaseException, call: Pending) -> RlinfError:
        """Returns an error of Ray's as one of ours."""
        while isinstance(error, RayTaskError):
            error = cast(BaseException, error.cause)
        if isinstance(error, RlinfError):
            return error
        who = f"worker {call.worker}, in {call.call}"
        if isinstance(error, ActorDiedError) and error.actor_init_failed:  # it raised, and would again
            return WorkerError(f"{who}: it could not be started: {str(error).splitlines()[-1]}", (call.worker,))
        if isinstance(error, ActorDiedError | NodeDiedError | OutOfMemoryError):
            return LostWorkerError(f"{who}: {_first_line(error)}", self._dead(error, call))
        if isinstance(error, RayActorError):
            return LostWorkerError(f"{who}: cannot be reached ({_first_line(error)})", (call.worker,))
        if isinstance(error, RayError):  # an object was lost with whoever held it
            return PeerError(f"{who}: what it needs is lost ({_first_line(error)})")
        return WorkerError(f"{who}: {type(error).__name__}: {error}", (call.worker,))

    def _dead(self, error: BaseException, call: Pending) -> tuple[int, ...]:
        """Returns the worker that an error of Ray's is about: not always the one whose call failed."""
        told = getattr(error, "actor_id", None)
        by_id = {actor._actor_id.hex(): worker for worker, actor in self._actors.items()}
        return (by_id.get(told, call.worker),) if told else (call.worker,)

    # --------------------------------------------------------------------------------------------------------- workers
    def at_fault(self, workers: Sequence[int]) -> set[int]:
        """Returns those of the workers that are there, and all whose processes ended."""
        gone = {caller.worker for caller in self._switchboard.gone()}
        return {worker for worker in (*workers, *gone) if worker in self._actors}

    def stuck(self) -> list[int]:
        """Returns the workers that run calls of the old attempt still, or are dead; those that only start are not."""
        up = [worker for worker in self._actors if worker in self._switchboard.callers]
        waits: dict[Ref, int] = {self._actors[worker].let_go.remote(): worker for worker in up}
        refs = cast("list[ray.ObjectRef]", list(waits))
        done, late = ray.wait(refs, num_returns=len(refs), timeout=_LET_GO_S) if refs else ([], [])
        stuck = [waits[ref] for ref in late]
        for ref in done:
            try:
                ray.get(ref)
            except RayError:
                stuck.append(waits[ref])
        return stuck

    def _cause(self, waiting: str) -> RlinfError:
        """Returns the error that all others are consequences of; what has failed is forgotten with it."""
        cause = self._first_cause(waiting)
        for ref in [ref for ref, call in self._waiting.items() if call.number in self._failed]:
            del self._waiting[ref]
            self._looked.discard(ref)
        self._failed.clear()
        return cause

    def _first_cause(self, waiting: str) -> RlinfError:
        """Gives the cause of what has been seen a moment to show."""
        deadline = time.monotonic() + _EVIDENCE_S
        while True:
            self._look(list(self._waiting))
            gone = self._switchboard.gone()
            errors = [self._failed[number] for number in sorted(self._failed)]
            own = [e for e in errors if not isinstance(e, LostWorkerError | PeerError | HangError | StaleCallError)]
            if gone or time.monotonic() > deadline:
                break
            if own:  # of the work itself, unless a worker's end was behind it
                deadline = min(deadline, time.monotonic() + _SETTLE_S)
            pending = [ref for ref in self._waiting if ref not in self._looked]
            ray.wait(pending, timeout=0.2) if pending else time.sleep(0.2)
        if gone:
            return LostWorkerError(self._obituary(gone, waiting, errors), tuple(caller.worker for caller in gone))
        if own:
            return own[0]
        rank = {LostWorkerError: 0, HangError: 1}
        return min(errors, key=lambda error: rank.get(type(error), 2))

    def _obituary(self, gone: Sequence[Caller], waiting: str, errors: Sequence[RlinfError]) -> str:
        said = []
        for caller in gone:
            calls = [call.call for ref, call in self._waiting.items() if call.worker == caller.worker]
            told = [str(e) for e in errors if isinstance(e, LostWorkerError) and caller.worker in e.workers]
            why = f" ({told[0]})" if told else ""
            said.append(
                f"{caller} died: its process ended while it was asked for {calls[0] if calls else 'nothing'}{why}"
            )
        return "; ".join(said) + f". The driver waited for {waiting}. Look for its last words in Ray's logs"

    def diagnose(self, waiting: str) -> None:
        """Looks what the workers do.

        Raises:
            HangError: one makes no progress.
        """
        callers = self._switchboard.ask(_ANSWER_S)
        self._history.learn([caller.beat for caller in callers.values() if caller.beat is not None])
        pending = [call for ref, call in self._waiting.items() if ref not in self._looked]
        stopped = lambda caller: self._switchboard.is_here(caller) and is_stopped(caller.pid)  # noqa: E731
        found = diagnose(pending, callers, self._history, self._limits, time.monotonic(), stopped)
        if found is None:
            return
        self._history.suspect([beat for w in found.culprits if w in callers and (beat := callers[w].beat) is not None])
        callers = self._switchboard.ask(_ANSWER_S, stacks=found.culprits)
        beats = [(callers[w], callers[w].beat) for w in found.culprits if w in callers]
        stacks = [f"{caller} is at\n{beat.stack}" for caller, beat in beats if beat is not None and beat.stack]
        raise HangError("\n".join([f"the driver waits for {waiting}", found.told, *stacks]), found.culprits)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
