"""What is lost is done again: workers are replaced, a state is restored, and the work is repeated.

work --error--> is it a fault of the machine?  no: it is raised
                how many in the window?        too many: it is raised, after a checkpoint (trainer.py)
                Session.replace --> restore --> work again
                  a node is gone: regroup --> restore --> work again
    `mend`      the same, from within the work: it goes on, and only what is lost is done again (execution/mending.py)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rlinf_embodied.config import RecoveryConfig
from rlinf_embodied.errors import HangError, LostNodeError, LostWorkerError, PlugInError, RlinfError, WorkerError
from rlinf_embodied.execution.mending import Repeated
from rlinf_embodied.runtime.session import Session

_Result = TypeVar("_Result")


def is_fault(error: RlinfError) -> bool:
    """Returns whether an error is of the machine or of unknown cause: not the user's, nor the configuration's."""
    return isinstance(error, WorkerError | HangError) and not isinstance(error, PlugInError)


@dataclass(slots=True)
class Mended:
    """What a fault cost, in seconds."""

    at: float  # since the epoch, when the driver knew of it
    work: str  # what had to be done again: "iteration 3"
    error: str  # the class of what was raised
    workers: tuple[int, ...]  # at fault
    lost_s: float  # of work, the time until it was known included
    recovery_s: float = 0.0  # until the work could begin again
    repeated: dict[str, int] | None = None  # blocks that were done again, by stage; None: all of the work
    num_blocks: int = 0  # that there are


class Safely(Protocol):
    """Does what works with the stages as they are between iterations; again if workers are lost in it."""

    def __call__(self, what: str, work: Callable[[], _Result], /) -> _Result:
        """Returns what `work` returns; `what` is its name for people.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        ...


class Recovery:
    """Counts faults; see the picture above."""

    def __init__(
        self,
        session: Session,
        config: RecoveryConfig,
        note: Callable[[str], None],
        record: Callable[[Mended], None] = lambda mended: None,
        regroup: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes whose workers are replaced, how often, whom to tell, who keeps account, and who plans after a node."""
        self._regroup = regroup
        self._session, self._config, self._note, self._record = session, config, note, record
        self._times: list[float] = []
        self._last = ""  # what a worker raised last, and in what
        self._what, self._began = "", 0.0  # the work under way
        self._admitted: RlinfError | None = None  # the newest that was counted ...
        self._refused: RlinfError | None = None  # ... and that was not to be recovered from

    def repeat(self, what: str, work: Callable[[], _Result], restore: Callable[[], object]) -> _Result:
        """Returns what `work` returns, which is done again after `restore` where a fault got in its way.

        Raises:
            RlinfError: no fault; one too many; or one that a worker raised again, word for word.
        """
        fault: Mended | None = None
        while True:
            start = time.time()
            try:
                if fault is not None:
                    restore()
                    self._close(fault)
                    start = time.time()
                self._what, self._began = what, start
                return work()
            except (WorkerError, HangError) as error:
                now = time.time()
                if fault is not None and not fault.recovery_s:  # another one came before this was mended
                    self._close(fault)
                if error is not self._admitted:  # and could not be mended
                    self._admit(what, error)
                self._admitted = None
                fault = Mended(now, what, type(error).__name__, error.workers, now - start)
                self._note(f"{what}: {error}\nworkers are replaced, and it is done again")
                try:
                    self._session.replace(error.workers)
                except LostNodeError as lost:
                    self._note(f"{what}: {lost}")
                    self._regroup()

    def mend(self, error: WorkerError | HangError, mending: Callable[[], Repeated]) -> None:
        """Mends the work under way, called from within it.

        Raises:
            RlinfError: as `repeat`; or what `mending` raises, the error itself where it cannot mend this one: then the
                work is done again as a whole.
        """
        now = time.time()
        self._admit(self._what, error)
        fault = Mended(now, self._what, type(error).__name__, error.workers, now - self._began)
        self._note(f"{self._what}: {error}\nworkers are replaced, and what is lost is done again")
        try:
            found = mending()
            fault.workers, fault.repeated, fault.num_blocks = found.workers, found.blocks, found.num_blocks
        except RlinfError as another:
            if another is not error:
                fault.repeated = {}  # what it cost is the next one's
                self._close(fault)
            raise
        self._began = time.time()
        self._close(fault)

    def _close(self, fault: Mended) -> None:
        fault.recovery_s = time.time() - fault.at
        self._record(fault)
        self._note(
            f"{fault.work}: {fault.lost_s:.1f} s of work lost, replaced and restored in {fault.recovery_s:.1f} s"
            if fault.repeated is None
            else f"{fault.work}: replaced and restored in {fault.recovery_s:.1f} s, done again: {_told(fault)}"
        )

    def _admit(self, what: str, error: WorkerError | HangError) -> None:
        """Raises an error that is not to be recovered from."""
        if error is self._refused or not is_fault(error):
            raise error
        self._refused = error
        if not isinstance(error, LostWorkerError | HangError):
            told = f"{what}: {re.sub(r'pid [0-9]+', '', str(error))}"
            if told == self._last:  # it is no accident
                raise error
            self._last = told
        now = time.monotonic()
        self._times = [t for t in self._times if now - t < self._config.window_s]
        if len(self._times) >= self._config.max_restarts:
            if self._times:
                error.add_note(
                    f"{len(self._times)} faults within {self._config.window_s:g} s (recovery.window_s): "
                    "recovery.max_restarts allows no more"
                )
            raise error
        self._times.append(now)
        self._refused, self._admitted = None, error


def _told(fault: Mended) -> str:
    """Returns, for example, "env 2, policy 2, actor 4 of 4 blocks"."""
    parts = ", ".join(f"{stage} {number}" for stage, number in (fault.repeated or {}).items())
    return f"{parts} of {fault.num_blocks} blocks" if parts else "nothing"
