"""A session with a thread per worker and futures as references: Ray's order and waiting, without its processes.

A worker takes its calls in the order of submission, and one whose arguments are late holds up those behind it.  Workers
pause for a random moment before each call, so that what only the order of submission holds together falls apart.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from rlinf_embodied.errors import HangError
from rlinf_embodied.flow.graph import StageSpec
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.runtime.host import Call, StageContext, WorkerHost, WorkerSpec
from rlinf_embodied.runtime.session import Ref

Item = tuple[Call, Sequence[Ref], list[Future]]


class ThreadSession:
    """See Session for the protocol; a deadlock is a HangError after `timeout_s`."""

    def __init__(self, seed: int, pause_s: float = 0.001, timeout_s: float = 10.0) -> None:
        self._draw, self._pause_s, self._timeout_s = random.Random(seed), pause_s, timeout_s
        self._hosts: dict[int, WorkerHost] = {}
        self._queues: dict[int, queue.Queue[Item | None]] = {}
        self._groups: dict[str, list[ThreadGroup]] = {}

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        for spec in workers:
            if spec.worker not in self._hosts:
                self._hosts[spec.worker], self._queues[spec.worker] = WorkerHost(spec), queue.Queue()
                threading.Thread(target=self._serve, args=(spec.worker,), daemon=True).start()

    def _serve(self, worker: int) -> None:
        while (item := self._queues[worker].get()) is not None:
            call, payloads, futures = item
            try:
                values = [p.result(self._timeout_s) if isinstance(p, Future) else p for p in payloads]
                time.sleep(self._draw.random() * self._pause_s)
                for future, result in zip(futures, self._hosts[worker].invoke(call, values), strict=True):
                    future.set_result(result)
            except BaseException as error:  # noqa: BLE001 - raised again where the driver fetches
                for future in futures:
                    future.set_exception(error)
                for group in self._groups.get(call.stage, ()):
                    group.abort()

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        collective = spec.collective and len(contexts) > 1
        self._groups[spec.name] = ThreadGroup.make(len(contexts), self._timeout_s) if collective else []
        for rank, context in enumerate(contexts):
            context.group = self._groups[spec.name][rank] if collective else SoloGroup()
        return [self._hosts[context.worker].add_stage(spec, context) for context in contexts]

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        answers: list[list[Ref]] = []
        for worker, call, payloads in calls:
            futures: list[Future] = [Future() for _ in range(call.num_results + 1)]
            self._queues[worker].put((call, payloads, futures))
            answers.append([*futures])
        return answers

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        try:
            return [ref.result(self._timeout_s) if isinstance(ref, Future) else ref for ref in refs]
        except TimeoutError:
            raise HangError(f"nobody answers for {waiting}") from None

    def clear(self) -> None:
        for host in self._hosts.values():
            host.clear()

    def close(self) -> None:
        for waiting in self._queues.values():
            waiting.put(None)
