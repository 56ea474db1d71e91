"""Snapshots between two iterations: the state of every stage that has one, held by reference.

    take      every worker of a stage exports its part      --> object store; a copy on another node
    restore   every worker of a stage gets all of its parts --> version and checksum are verified; weights are sent on

The driver holds references only; no state passes through its memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlinf_embodied.execution.ahead import Weights
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Ref, Session


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The inputs of an iteration other than the run's progress."""

    iteration: int  # the next one
    states: dict[str, tuple[Ref, ...]]  # by stage, in the order of its workers
    earlier: tuple[Weights, ...] = ()  # weights of fronts that run ahead, see ahead.py
    num_bytes: float = 0.0  # of the states


@dataclass(slots=True)
class Pace:
    """Decides when a snapshot is due, so that snapshots take at most a fraction of the training time."""

    share: float = 0.05
    cost_s: float = 0.0  # of the newest snapshot
    trained_s: float = 0.0  # since then

    def is_due(self, iteration_s: float) -> bool:
        """Returns whether a snapshot is due after another iteration, given the cost of the newest one."""
        self.trained_s += iteration_s
        return self.cost_s <= self.share * self.trained_s

    def taken(self, seconds: float) -> None:
        self.cost_s, self.trained_s = seconds, 0.0


def take(
    session: Session, executor: Executor, number: int, stages: Collection[str] | None = None, most: float | None = None
) -> Snapshot:
    """Returns the state of all stages before iteration `number`; `stages` names those that have one, if that is known.

    A snapshot of more than `most` bytes is incomplete.
    """
    names = [name for name in executor.workflow.order() if stages is None or name in stages]
    states, sizes = states_of(executor, names, number, most)
    num_bytes = sum(sum(parts) for parts in sizes.values())
    if most is not None and num_bytes <= most < max((len(s) * max(s) for s in sizes.values()), default=0):
        states, _ = states_of(executor, names, number)  # a part was left out, but all of them fit
    earlier = () if executor.ahead is None else executor.ahead.earlier()
    if most is None or num_bytes <= most:
        parts = [ref for refs in states.values() for ref in refs]
        session.secure([*parts, *(ref for weights in earlier for ref in weights.messages.values())])
    return Snapshot(number, states, earlier, num_bytes)


def states_of(
    executor: Executor, stages: Collection[str], iteration: int, most: float | None = None
) -> tuple[dict[str, tuple[Ref, ...]], dict[str, list[int]]]:
    """Returns the states of stages before an iteration to come, and the bytes of parts; see Executor.export_states."""
    before, left = None if executor.ahead is None else executor.ahead.states_before(), set(stages)
    if before is not None:  # fronts that run ahead have changed their stages since
        left &= executor.workflow.back()
    at = StepContext(iteration)
    states, sizes = executor.states_of({s: executor.export_states(s, at, most) for s in stages if s in left})
    refs_before, sizes_before = before or ({}, {})
    for stage in refs_before.keys() & set(stages):
        states[stage], sizes[stage] = refs_before[stage], sizes_before[stage]
    return states, sizes


def restore(executor: Executor, snapshot: Snapshot) -> None:
    """Restores the state of a snapshot in newly built stages, and sends the weights to all copies.

    Raises:
        ObjectiveError: a state arrived damaged.
    """
    executor.import_states(snapshot.states, StepContext(snapshot.iteration))
    executor.sync_weights()
    if executor.ahead is not None:
        executor.ahead.begin_again_with(snapshot.earlier)
