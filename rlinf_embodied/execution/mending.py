"""Mends an iteration that lost workers: only what is lost is done again, in the midst of it.

    fetch raises --> admit    may it be recovered from?  no: it is raised, as is whatever does not fit here
                     mend     the workers at fault are ended; every other call comes to its end; they start anew
                     renew    their stages are built, of training and of whatever shares the workers; new groups
                     restore  the snapshot, in whatever has state and is called again; weights, where copies need them
                     repeat   the calls that are lost, on what the others have made (call_log.py)
    fetch again

What a healthy worker has made is a function of the snapshot and stays valid.  Whoever cannot do it this way raises the
error on: then the whole iteration is done again (training/recovery.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.errors import HangError, LostNodeError, WorkerError
from rlinf_embodied.execution.call_log import Made, calls_to_repeat
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.iteration import Iteration
from rlinf_embodied.execution.recovery import Snapshot
from rlinf_embodied.runtime.host import Call
from rlinf_embodied.runtime.session import MendingSession

Workers = frozenset[int]


@dataclass(frozen=True, slots=True)
class Repeated:
    """What was done again, as Repeated((1,), {"env": 2, "policy": 2, "actor": 4}, 4)."""

    workers: tuple[int, ...]  # that were replaced
    blocks: dict[str, int]  # by stage, how many different ones
    num_blocks: int  # that there are


@dataclass(slots=True)
class Mender:
    """Mends the iterations of one executor."""

    session: MendingSession
    executor: Executor
    around: Callable[[WorkerError | HangError, Callable[[], Repeated]], None]  # admits a fault, and keeps account
    beside: Sequence[Executor] = ()  # whose stages live in the same workers
    allows: Callable[[Workers], bool] = lambda lost: True  # whether these may be replaced at this moment
    refresh: Callable[[], None] = lambda: None  # sends weights to copies beside training, the learner's being restored
    snapshot: Snapshot | None = None  # of the iteration's start
    _renewable: bool = field(init=False)
    _replaced: set[int] = field(default_factory=set)  # since the iteration was under way

    def __post_init__(self) -> None:
        self._renewable = all(one.can_renew(self.session) for one in (self.executor, *self.beside))

    def mend(self, state: Iteration, error: WorkerError | HangError) -> None:
        """Brings an iteration to where all that was submitted is on its way again.

        Raises:
            RlinfError: the error itself, where this is no way to recover from it; or another one that came meanwhile
                and cannot be recovered from either.
        """
        snapshot = self.snapshot
        if snapshot is None or snapshot.iteration != state.step_context.iteration or not self._renewable:
            raise error
        self._replaced.clear()
        while error.workers:
            try:
                return self.around(error, lambda error=error: self._mended(state, snapshot, error))
            except (WorkerError, HangError) as another:
                if another is error:
                    raise
                error = another
        raise error

    def _mended(self, state: Iteration, snapshot: Snapshot, error: WorkerError | HangError) -> Repeated:
        try:
            self._replaced |= self.session.mend(error.workers)
        except LostNodeError:
            raise error from None
        lost = frozenset(self._replaced)  # also for errors that this one overtook
        if not self.allows(lost):
            raise error
        for one in (self.executor, *self.beside):
            one.renew(self.session, lost)
        log, workflow = state.calls, self.executor.workflow
        numbers = calls_to_repeat(log.made, lost, log.failed(self.session), workflow, snapshot.states)
        repeated = [made for made in log.made if made.number in numbers]
        restored = self._restore(state, snapshot, lost, repeated)
        self._send_weights(state, lost, restored)
        log.repeat(self.session, numbers)
        self._await_again(state, repeated)
        blocks: dict[str, set[int]] = {}
        for made in repeated:
            for stage in made.stages if made.call.blocks else ():
                blocks.setdefault(stage, set()).update(made.call.blocks)
        counts = {stage: len(found) for stage, found in blocks.items()}
        return Repeated(tuple(sorted(lost)), counts, workflow.num_blocks)

    def _restore(
        self, state: Iteration, snapshot: Snapshot, lost: Workers, repeated: Sequence[Made]
    ) -> Collection[str]:
        """Brings stages into the state of the snapshot: in replaced workers, and where calls are made again.

        Members of a collective may have got to different points, so all of them go back.  Returns the stages.
        """
        restored = []
        for name, parts in snapshot.states.items():
            hosts, spec = self.executor.workers(name), self.executor.workflow.stages[name]
            ours = lost.union(made.worker for made in repeated if name in made.stages)
            chosen = hosts if spec.collective and not ours.isdisjoint(hosts) else [w for w in hosts if w in ours]
            call = Call(name, "import_snapshot", state.step_context)
            collective = spec.collective and len(chosen) > 1
            answers = self.session.submit([(worker, call, list(parts)) for worker in chosen], collective)
            self.session.fetch([refs[-1] for refs in answers], f"the snapshot of {name}")
            restored += [name] * bool(chosen)
        return restored

    def _send_weights(self, state: Iteration, lost: Workers, restored: Collection[str]) -> None:
        """Sends the weights of learners that are where the iteration began to all copies.

        Those of one that has made its update go out at the iteration's end.
        """
        executor, begun = self.executor, {made.call.stage for made in state.calls.made}
        for source in dict.fromkeys(edge.source for edge in executor.workflow.weight_edges):
            executor.call(source, "send_whole", state.step_context)
        for edge in executor.workflow.weight_edges:
            is_copy_lost = not lost.isdisjoint(executor.workers(edge.target))
            if edge.source in restored or (is_copy_lost and edge.source not in begun):
                executor.sync_weights(edge.source, edge.target, state)
        self.refresh()

    def _await_again(self, state: Iteration, repeated: Sequence[Made]) -> None:
        """Has the end of calls awaited whose first receipts were collected already."""
        awaited = {id(ref) for _, refs in state.receipts for ref in refs} | {id(ref) for ref in state.timings}
        state.timings += [made.first[-1] for made in repeated if id(made.first[-1]) not in awaited]
