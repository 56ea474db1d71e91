"""Replaces workers that die, hang or fail, restores the state before their work, and runs the work again.

work --error--> a fault of the machine?     no: the error is raised
                faults in the window?       too many: the error is raised
                Session.replace --> restore --> work again
                  a node was lost: regroup --> restore --> work again
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from rlinf_embodied.config import RecoveryConfig
from rlinf_embodied.errors import HangError, LostNodeError, LostWorkerError, PlugInError, WorkerError
from rlinf_embodied.runtime.session import Session

_Result = TypeVar("_Result")


@dataclass(slots=True)
class Restart:
    """A fault and its cost."""

    at: float  # seconds since the epoch, when the driver noticed it
    work: str  # what is run again: "iteration 3"
    error: str  # class of the error
    workers: tuple[int, ...]  # at fault
    lost_s: float  # seconds of lost work, including the time until the fault was noticed
    recovery_s: float = 0.0  # seconds until the work began again


class Recovery:
    """Runs work, and again after faults; see the picture above."""

    def __init__(
        self,
        session: Session,
        config: RecoveryConfig,
        note: Callable[[str], None],
        restore: Callable[[], object] = lambda: None,
        record: Callable[[Mapping[str, object]], None] = lambda restart: None,
        regroup: Callable[[], None] = lambda: None,
    ) -> None:
        """Stores the session whose workers are replaced, limits, and functions.

        `note` prints, `restore` restores the state of all stages between two iterations, `record` logs a restart, and
        `regroup` chooses another plan after a node was lost.
        """
        self._session, self._config, self._note, self._restore = session, config, note, restore
        self._record, self._regroup = record, regroup
        self._times: list[float] = []
        self._last = ""  # the last error of a worker, and its work

    def repeat(self, what: str, work: Callable[[], _Result], restore: Callable[[], object] | None = None) -> _Result:
        """Returns the result of `work`, which is run again after `restore` if a fault interrupted it.

        Raises:
            RlinfError: an error that is not a fault of the machine, a fault beyond the limit, or a repeated error.
        """
        restart: Restart | None = None
        while True:
            start = time.time()
            try:
                if restart is not None:
                    (restore or self._restore)()
                    self._close(restart)
                    start = time.time()
                return work()
            except (WorkerError, HangError) as error:
                now = time.time()
                if restart is not None and not restart.recovery_s:  # another fault during `restore`
                    self._close(restart)
                self._admit(what, error)
                restart = Restart(now, what, type(error).__name__, error.workers, now - start)
                self._note(f"{what}: {error}\nits workers are replaced, and it is run again")
                try:
                    self._session.replace(error.workers)
                except LostNodeError as lost:
                    self._note(f"{what}: {lost}")
                    self._regroup()

    def _close(self, restart: Restart) -> None:
        restart.recovery_s = time.time() - restart.at
        self._record(asdict(restart))
        self._note(f"{restart.work}: {restart.lost_s:.1f} s of work lost, restored in {restart.recovery_s:.1f} s")

    def _admit(self, what: str, error: WorkerError | HangError) -> None:
        """Raises the error if the run cannot recover from it."""
        if isinstance(error, PlugInError):  # raised by the user's code
            raise error
        if not isinstance(error, LostWorkerError | HangError):
            message = f"{what}: {re.sub(r'pid [0-9]+', '', str(error))}"
            if message == self._last:  # repeated, so not caused by the machine
                raise error
            self._last = message
        now, window_s = time.monotonic(), self._config.window_s
        self._times = [t for t in self._times if now - t < window_s]
        if len(self._times) >= self._config.max_restarts:
            error.add_note(f"recovery.max_restarts={self._config.max_restarts} faults in {window_s:g} s are allowed")
            raise error
        self._times.append(now)
