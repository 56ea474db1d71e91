"""Iterations that overlap: with a staleness of k, an iteration's front runs up to k iterations ahead of its back.

    run(i)     front(i + k) ---------------------------+     rollouts, rewards: with the weights of version i
               back(i), of front(i)'s data ----> i + 1 -+--> installed after front(i + k): a worker executes its calls
                                                             in the order of submission

Version i is the result of back(i - 1), so front(j) uses version j - k: which weights produce which data depends on k
alone, not on the plan's placement or on time.  At the start of a run the first k + 1 fronts use the first weights.  An
iteration that is repeated, or resumed from a checkpoint, needs the inputs of its fronts: the earlier weights, and the
state of their stages before the first of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_embodied.execution.iteration import Iteration, IterationResult
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Ref

if TYPE_CHECKING:
    from rlinf_embodied.execution.executor import Executor


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of the weights, held by reference."""

    version: int  # the number of the iteration that trains them
    messages: Mapping[str, Ref]  # by the stage that exported them


@dataclass(frozen=True, slots=True)
class Follow:
    """How a run continues: `next` returns the next iteration's context from one's context and its front's reports."""

    next: Callable[[StepContext, IterationResult], StepContext] = lambda context, _: replace(
        context, iteration=context.iteration + 1
    )
    end: int | None = None  # no iteration of this number or a later one is begun


@dataclass(frozen=True, slots=True)
class _Front:
    context: StepContext  # with which it was submitted
    state: Iteration
    weights: Weights  # with which it runs
    before: dict[str, list[list[Ref]]]  # by stage and worker: the state before it, and a receipt


class Ahead:
    """The submitted fronts, and the weights and states from which they can be repeated."""

    def __init__(self, executor: Executor) -> None:
        order, learns = executor.workflow.order(), executor.workflow.back()
        self.back = tuple(name for name in order if name in learns)
        self.front = tuple(name for name in order if name not in learns)
        self._executor, self._most = executor, executor.plan.staleness
        self._begun: deque[_Front] = deque()
        self._last: _Front | None = None  # the newest of them, or the one whose back runs
        self._versions: list[Weights] = []  # the newest ones, in their order; the last is installed
        self._pending: tuple[Weights, ...] = ()  # with which fronts are to be repeated

    # ---------------------------------------------------------------------------------------------------- iteration
    def run(self, step_context: StepContext, follow: Follow) -> IterationResult:
        """Runs an iteration's back, and the fronts that may run ahead of it; see Executor.run."""
        executor, number = self._executor, step_context.iteration
        hosts = [executor.devices_of(part) for part in (self.front, self.back)]
        disjoint = not hosts[0] & hosts[1]
        if self._pending:
            self._begin_again(step_context, follow)
        if not self._versions or self._versions[-1].version != number:
            self._versions.append(self._published(step_context, number))
        if not self._begun:
            self._begin(step_context, self._versions[-1], number)
        self._begin_more(self._most if disjoint else self._most + 1, follow, number)
        front = self._begun.popleft()
        state, behind = front.state, number - front.weights.version
        state.result.staleness = behind
        message = state.step_context.message
        state.step_context = replace(step_context, staleness=behind, oldest=number, message=message)
        executor.run_stages(self.back, state)
        if disjoint:
            self._begin_more(self._most, follow, number)
        new = self._published(state.step_context, number + 1, state)
        executor.sync_weights(state, new.messages)
        self._versions = [*self._versions, new][-1 - self._most :]
        executor.collect_receipts(state)
        return state.result

    def _published(self, step_context: StepContext, version: int, state: Iteration | None = None) -> Weights:
        messages = {}
        for source in sorted({edge.source for edge in self._executor.workflow.weight_edges}):
            messages[source], receipt = self._executor.export(source, step_context)
            if state is not None:
                state.timings.append(receipt)
        return Weights(version, messages)

    def _begin_more(self, number: int, follow: Follow, oldest: int) -> None:
        """Submits further fronts up to this number, or until the end of the run."""
        while len(self._begun) < number and (context := self._next(follow)) is not None:
            self._begin(context, self._versions[-1], oldest)

    def _next(self, follow: Follow) -> StepContext | None:
        assert self._last is not None
        context = follow.next(self._last.context, self._last.state.result)
        return context if follow.end is None or context.iteration < follow.end else None

    def _begin(self, context: StepContext, weights: Weights, oldest: int) -> None:
        executor, state = self._executor, Iteration(replace(context, oldest=oldest))
        before = {stage: executor.export_states(stage, state.step_context) for stage in self.front}
        executor.run_stages(self.front, state)
        self._last = _Front(context, state, weights, before)
        self._begun.append(self._last)

    # ------------------------------------------------------------------------------------------------- begun again
    def earlier(self) -> tuple[Weights, ...]:
        """Returns the weights of the fronts of the next iterations, as if the run did not end."""
        if self._pending or not self._versions:
            return self._pending
        begun, newest = tuple(front.weights for front in self._begun), self._versions[-1].version
        wanted = range(newest + len(begun) - self._most, newest)
        return begun + tuple(next(w for w in self._versions if w.version >= version) for version in wanted)

    def begin_again_with(self, earlier: Sequence[Weights]) -> None:
        """Makes the next iteration start its fronts with these weights, which `earlier` returned."""
        self._begun.clear()
        self._versions.clear()
        most = self._most
        self._pending = ((earlier[0],) * (most - len(earlier)) + tuple(earlier[-most:])) if earlier else ()

    def states_before(self) -> tuple[dict[str, tuple[Ref, ...]], dict[str, list[int]]] | None:
        """Returns the states of stages before the submitted fronts, and their bytes; None if no front is submitted."""
        return self._executor.states_of(self._begun[0].before) if self._begun else None

    def messages(self, stage: str) -> list[Ref]:
        """Returns the weights that a stage exported for the fronts of `earlier`."""
        return [weights.messages[stage] for weights in self.earlier()]

    def begin_again_from(
        self, stage: str, checkpoint: Path, versions: Sequence[int], step_context: StepContext
    ) -> None:
        """Makes the next iteration start its fronts with weights of a checkpoint, which `stage` reads."""
        earlier = []
        for number, version in enumerate(versions):
            argument = (str(checkpoint), number, version)
            message = self._executor.publish(stage, "earlier_weights", step_context, argument)[0]
            earlier.append(Weights(version, {stage: message}))
        self.begin_again_with(earlier)

    def _begin_again(self, step_context: StepContext, follow: Follow) -> None:
        """Submits fronts again with the weights that they had, and restores the learners' state afterwards."""
        executor, pending, self._pending = self._executor, self._pending, ()
        self._versions = list({weights.version: weights for weights in pending}.values())  # a next checkpoint has them
        learners = {stage: executor.export_states(stage, step_context) for stage in self.back}
        context: StepContext | None = step_context
        for weights in pending:
            for edge in executor.workflow.weight_edges:  # also in workers that share them with their source
                executor.install(
                    weights.messages[edge.source], edge.target, executor.workers(edge.target), StepContext(0)
                )
            if context is not None:
                self._begin(context, weights, step_context.iteration)
                context = self._next(follow)
        executor.import_states(executor.states_of(learners)[0], step_context)
        executor.sync_weights()
