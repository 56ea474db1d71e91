"""A session with a thread per worker and futures as references: Ray's order and waiting, without its processes.

A worker takes the calls of each caller in the order of submission, and one whose arguments are late holds up those of
the same caller behind it.  Workers pause for a random moment before each call, so that what only the order of
submission holds together falls apart.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from rlinf_embodied.errors import HangError
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.runtime.host import Call, StageContext, WorkerHost, WorkerSpec
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.workflow.graph import StageSpec

Item = tuple[Call, Sequence[Ref], list[Future]]
_DRIVER = -1


def _ready(item: Item) -> bool:
    call, payloads, _ = item
    return bool(call.relay) or all(p.done() for p in payloads if isinstance(p, Future))


class ThreadPeers:
    """See relay.Peers."""

    def __init__(self, session: ThreadSession, caller: int) -> None:
        self._session, self._caller = session, caller

    def ask(self, worker: int, call: Call, payloads: Sequence[object]) -> list[Ref]:
        return self._session.submit_as(self._caller, worker, call, payloads)

    def take(self, refs: Sequence[Ref], workers: Sequence[int]) -> list[object]:
        return self._session.fetch(refs, f"workers {list(workers)}")


class ThreadSession:
    """See Session for the protocol; a deadlock is a HangError after `timeout_s`."""

    relays = True

    def __init__(self, seed: int, pause_s: float = 0.001, timeout_s: float = 10.0) -> None:
        self._draw, self._pause_s, self._timeout_s = random.Random(seed), pause_s, timeout_s
        self._hosts: dict[int, WorkerHost] = {}
        self._lines: dict[int, dict[int, deque[Item]]] = {}  # by worker and caller
        self._changed = threading.Condition()
        self._over = False
        self._groups: dict[str, list[ThreadGroup]] = {}

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        for spec in workers:
            if spec.worker not in self._hosts:
                self._hosts[spec.worker], self._lines[spec.worker] = WorkerHost(spec), {}
                threading.Thread(target=self._serve, args=(spec.worker,), daemon=True).start()

    def _next(self, worker: int) -> Item | None:
        """Returns a call that is first in its caller's line and has its arguments; None at the end."""
        with self._changed:
            while not self._over:
                lines = [line for line in self._lines[worker].values() if line and _ready(line[0])]
                if lines:
                    return self._draw.choice(lines).popleft()
                self._changed.wait()
        return None

    def _notify(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self, worker: int) -> None:
        while (item := self._next(worker)) is not None:
            call, payloads, futures = item
            try:
                values = payloads if call.relay else [p.result(0) if isinstance(p, Future) else p for p in payloads]
                time.sleep(self._draw.random() * self._pause_s)
                results = self._hosts[worker].invoke(call, values, ThreadPeers(self, worker))
                for future, result in zip(futures, results, strict=True):
                    future.set_result(result)
            except BaseException as error:  # noqa: BLE001 - raised again where the driver fetches
                for future in futures:
                    future.set_exception(error)
                for group in self._groups.get(call.stage, ()):
                    group.close()

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        collective = spec.collective and len(contexts) > 1
        self._groups[spec.name] = ThreadGroup.make(len(contexts), self._timeout_s) if collective else []
        for rank, context in enumerate(contexts):
            context.group = self._groups[spec.name][rank] if collective else SoloGroup()
        return [self._hosts[context.worker].add_stage(spec, context) for context in contexts]

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        return [self.submit_as(_DRIVER, worker, call, payloads) for worker, call, payloads in calls]

    def submit_as(self, caller: int, worker: int, call: Call, payloads: Sequence[Ref]) -> list[Ref]:
        futures: list[Future] = [Future() for _ in range(call.num_results + 1)]
        for future in futures:
            future.add_done_callback(self._notify)
        with self._changed:
            self._lines[worker].setdefault(caller, deque()).append((call, payloads, futures))
            self._changed.notify_all()
        return [*futures]

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        try:
            return [ref.result(self._timeout_s) if isinstance(ref, Future) else ref for ref in refs]
        except TimeoutError:
            raise HangError(f"nobody answers for {waiting}") from None

    def clear(self) -> None:
        for host in self._hosts.values():
            host.clear()

    def close(self) -> None:
        self._over = True
        self._notify()
