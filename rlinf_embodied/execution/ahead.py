"""Iterations that overlap: with a staleness of k, an iteration's front runs up to k iterations ahead of its back.

    run(i)     front(i + k) ---------------------------+     rollouts, rewards: with the weights of version i
               back(i), of what front(i) made --> i + 1 +--> installed behind front(i + k): a worker does its calls in
                                                             the order of submission

Version i is what back(i - 1) made, so that front(j) works with version j - k: which weights make which data is a matter
of k alone, and neither of the plan's placement nor of time.  At the start of a run the first k + 1 fronts work with the
first weights.  An iteration that is run again, or resumed from a checkpoint, needs what its fronts need: the earlier
weights, and the state of their stages before the first of them.
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
    messages: Mapping[str, Ref]  # by the stage that made them


@dataclass(frozen=True, slots=True)
class Follow:
    """How a run continues: the context of the next iteration, from one and its front's report; and where it ends."""

    next: Callable[[StepContext, IterationResult], StepContext] = lambda context, _: replace(
        context, iteration=context.iteration + 1
    )
    end: int | None = None  # no iteration of this number or a later one is begun


@dataclass(frozen=True, slots=True)
class _Front:
    context: StepContext  # as it was begun with
    state: Iteration
    weights: Weights  # that it works with
    before: dict[str, list[list[Ref]]]  # by stage and worker: its state before, and a receipt


class Ahead:
    """The fronts under way, and what they would be made again from."""

    def __init__(self, executor: Executor) -> None:
        order, learns = executor.workflow.order(), executor.workflow.back()
        self.back = tuple(name for name in order if name in learns)
        self.front = tuple(name for name in order if name not in learns)
        self._executor, self._most = executor, executor.plan.staleness
        self._begun: deque[_Front] = deque()
        self._last: _Front | None = None  # the newest of them, or the one whose back runs
        self._versions: list[Weights] = []  # the newest ones, in their order; the last is installed
        self._pending: tuple[Weights, ...] = ()  # that fronts are to be made again with

    # ---------------------------------------------------------------------------------------------------- iteration
    def run(self, step_context: StepContext, follow: Follow) -> IterationResult:
        """Runs an iteration's back, and the fronts that may run ahead of it; see Executor.run."""
        executor, number = self._executor, step_context.iteration
        hosts = [{worker for stage in part for worker in executor.workers(stage)} for part in (self.front, self.back)]
        apart = not hosts[0] & hosts[1]
        if self._pending:
            self._begin_again(step_context, follow)
        if not self._versions or self._versions[-1].version != number:
            self._versions.append(self._published(step_context, number))
        if not self._begun:
            self._begin(step_context, self._versions[-1], number)
        self._begin_more(self._most if apart else self._most + 1, follow, number)
        front = self._begun.popleft()
        state, behind = front.state, number - front.weights.version
        state.result.staleness = behind
        decided = state.step_context.message
        state.step_context = replace(step_context, staleness=behind, oldest=number, message=decided)
        executor.run_stages(self.back, state)
        if apart:
            self._begin_more(self._most, follow, number)
        made = self._published(state.step_context, number + 1, state)
        executor.sync_weights(state, made.messages)
        self._versions = [*self._versions, made][-1 - self._most :]
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
        """Begins further fronts up to this number, or until the run is at its end."""
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
        """Returns the weights that the fronts of the iterations to come work with, or would if the run went on."""
        if self._pending or not self._versions:
            return self._pending
        begun, newest = tuple(front.weights for front in self._begun), self._versions[-1].version
        wanted = range(newest + len(begun) - self._most, newest)
        return begun + tuple(next(w for w in self._versions if w.version >= version) for version in wanted)

    def begin_again_with(self, earlier: Sequence[Weights]) -> None:
        """Has the next iteration begin its fronts with these weights: what `earlier` returned."""
        self._begun.clear()
        self._versions.clear()
        most = self._most
        self._pending = ((earlier[0],) * (most - len(earlier)) + tuple(earlier[-most:])) if earlier else ()

    def states_before(self) -> dict[str, tuple[Ref, ...]] | None:
        """Returns the states of stages before the fronts under way, of those that have one; None: no front is."""
        return self._executor.states_of(self._begun[0].before) if self._begun else None

    def messages(self, stage: str) -> list[Ref]:
        """Returns the weights that a stage made for the fronts under way, see `earlier`."""
        return [weights.messages[stage] for weights in self.earlier()]

    def begin_again_from(
        self, stage: str, checkpoint: Path, versions: Sequence[int], step_context: StepContext
    ) -> None:
        """Has the next iteration begin its fronts with weights of a checkpoint, which `stage` reads."""
        found = []
        for number, version in enumerate(versions):
            asked = (str(checkpoint), number, version)
            message = self._executor.publish(stage, "earlier_weights", step_context, asked)[0]
            found.append(Weights(version, {stage: message}))
        self.begin_again_with(found)

    def _begin_again(self, step_context: StepContext, follow: Follow) -> None:
        """Makes fronts again with the weights that they had; the learners' state is as it was thereafter."""
        executor, pending, self._pending = self._executor, self._pending, ()
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
        executor.import_states(executor.states_of(learners), step_context)
        executor.sync_weights()
