"""A session of one process in which workers can be lost, and which behaves towards the driver as Ray does.

Errors of calls come when something is fetched; a call whose inputs are lost fails without being made; what a worker
kept goes with it, and nothing else does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.errors import LostWorkerError, PeerError, RlinfError, WorkerError
from rlinf_embodied.learning.groups import SoloGroup, ThreadGroup
from rlinf_embodied.runtime.host import Call, StageContext, WorkerHost
from rlinf_embodied.runtime.session import Ref, SerialSession, of_attempt
from rlinf_embodied.workflow.graph import StageSpec


@dataclass(eq=False)
class Value:
    value: object


@dataclass(eq=False)
class Failure:
    error: RlinfError


@dataclass
class Fault:
    """What happens to a worker at a call: "lost" before its work or after it, or it raises, "error"."""

    meets: Callable[[int, Call], bool]  # by number of the call in the session's life
    kind: str = "lost"
    after: bool = False
    others: tuple[int, ...] = ()  # workers that die at the same time
    worker: int | None = None  # whom it met


@dataclass
class Calls:
    """Which blocks each stage worked on to the end: by stage, iteration and attempt."""

    ended: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)

    def add(self, call: Call) -> None:
        """Takes note of the last call that a stage gets for some blocks."""
        if call.method in ("run", "loop", "close"):
            when = (call.step_context.iteration, call.step_context.attempt)
            for stage in call.makers:
                self.ended.setdefault((stage, *when), []).extend(call.blocks)

    def of(self, stage: str, iteration: int, attempt: int) -> list[int]:
        """Returns the blocks, each as often as it was worked on."""
        return sorted(self.ended.get((stage, iteration, attempt), []))


class DeferredSession(SerialSession):
    """See above."""

    relays = False  # every call is one whose worker may be lost

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        super().__init__(20.0)
        self.faults = list(faults)
        self.calls, self.number = Calls(), 0
        self._dead: set[int] = set()
        self._causes: list[RlinfError] = []

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        made = [(worker, of_attempt(call, self.attempt), payloads) for worker, call, payloads in calls]
        fates = [self._fate(worker, call) for worker, call, _ in made]
        failures = [self._before(*one, fate) for one, fate in zip(made, fates, strict=True)]
        gang = collective and len(made) > 1
        if gang and any(failures):  # the others wait in vain
            for group in self._groups[made[0][1].stage]:
                group.abort()
        answers: list[list[Ref]] = [[] for _ in made]

        def work(index: int) -> None:
            answers[index] = self._answer(*made[index], failures[index], fates[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(made))]
        for thread in threads:
            thread.start()
            if not gang:
                thread.join()
        for thread in threads:
            thread.join()
        return answers

    def _fate(self, worker: int, call: Call) -> Fault | None:
        self.number += 1
        fault = next((f for f in self.faults if f.worker is None and f.meets(self.number, call)), None)
        if fault is not None:
            fault.worker = worker
            self._dead.update(fault.others)
        return fault

    def _before(self, worker: int, call: Call, payloads: Sequence[Ref], fate: Fault | None) -> Failure | None:
        if worker in self._dead or (fate is not None and fate.kind == "lost" and not fate.after):
            self._dead.add(worker)
            return Failure(self._cause(LostWorkerError(f"worker {worker} died in {call}", (worker,))))
        if fate is not None and fate.kind == "error" and not fate.after:
            return Failure(self._cause(WorkerError(f"worker {worker} failed in {call}: {self.number}", (worker,))))
        return next((payload for payload in payloads if isinstance(payload, Failure)), None)

    def _cause(self, error: RlinfError) -> RlinfError:
        self._causes.append(error)
        return error

    def _answer(
        self, worker: int, call: Call, payloads: Sequence[Ref], failure: Failure | None, fate: Fault | None
    ) -> list[Ref]:
        count = call.num_results + 1
        if failure is not None:
            return [Failure(failure.error) for _ in range(count)]
        values = [payload.value for payload in payloads if isinstance(payload, Value)]
        assert len(values) == len(payloads)
        try:
            answers: list[Ref] = [Value(value) for value in self._hosts[worker].invoke(call, values)]
        except RlinfError as error:
            peer = PeerError(str(error)) if collective_broke(error) else self._cause(error)
            return [Failure(peer) for _ in range(count)]
        if fate is not None and fate.after:
            cause = self._cause(LostWorkerError(f"worker {worker} died after {call}", (worker,)))
            self._dead.add(worker)
            if fate.kind == "error":
                return [Failure(cause) for _ in range(count)]
        self.calls.add(call)
        return answers

    def fetch(self, refs: Sequence[Ref], waiting: str) -> list[object]:
        causes, self._causes = self._causes, []
        if causes:
            raise causes[0]
        for ref in refs:
            if isinstance(ref, Failure):
                raise ref.error
        return [ref.value for ref in refs if isinstance(ref, Value)]

    # --------------------------------------------------------------------------------------------------------- mending
    def can_renew(self, spec: StageSpec, workers: Sequence[int]) -> bool:
        return not any(self._hosts[worker].holds_group(spec.name) for worker in workers)

    def mend(self, workers: Sequence[int]) -> frozenset[int]:
        lost = frozenset((*workers, *self._dead))
        for host in self._hosts.values():
            host.abandon(self.attempt)
        self._renew_hosts(lost)
        self.attempt += 1
        return lost

    def _renew_hosts(self, lost: Collection[int]) -> None:
        self._dead.clear()
        self._causes.clear()
        for worker in lost:
            self._hosts[worker].leave()
            self._hosts[worker] = WorkerHost(self._hosts[worker].spec)

    def failed(self, receipts: Sequence[Ref]) -> list[bool]:
        return [isinstance(ref, Failure) for ref in receipts]

    def renew_stage(self, spec: StageSpec, contexts: Sequence[StageContext], anew: Collection[int]) -> None:
        collective = spec.collective and len(contexts) > 1
        self._groups[spec.name] = ThreadGroup.make(len(contexts), timeout_s=20.0) if collective else []
        for rank, context in enumerate(contexts):
            context.group = self._groups[spec.name][rank] if collective else SoloGroup()
            if context.worker in anew:
                self._hosts[context.worker].add_stage(spec, context)
            elif collective:
                self._hosts[context.worker].regroup(spec.name, context.group)

    def replace(self, workers: Sequence[int]) -> None:
        self._renew_hosts({*workers, *self._dead})
        super().replace(workers)


def collective_broke(error: RlinfError) -> bool:
    return "waited" in str(error) or "was closed" in str(error)
