"""The snapshot of an iteration's start: the state of every stage that has some, held by reference.

    take      every worker of a stage hands out its part   --> object store; a copy on the driver's node
    restore   every worker of a stage gets all of its parts --> version and checksum are verified; weights are sent on

The driver holds references: nothing of it passes through its heap.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.runtime.host import Call, Receipt, StepContext
from rlinf_embodied.runtime.session import Ref, Session, of_type


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an iteration is a function of, beside the run's progress."""

    iteration: int  # the one that is to come
    states: dict[str, tuple[Ref, ...]]  # by stage, in the order of its workers


def take(session: Session, executor: Executor, iteration: int, stages: Collection[str] | None = None) -> Snapshot:
    """Returns the state of all stages; `stages` names those that have some, once that is known.

    Raises:
        RlinfError: what a worker raised, or that it was lost.
    """
    names = [name for name in executor.workflow.order() if stages is None or name in stages]
    answers = {}
    for name in names:
        call = Call(name, "export_snapshot", StepContext(iteration), publishes=True)
        calls = [(worker, call, []) for worker in executor.workers(name)]
        answers[name] = session.submit(calls, executor.workflow.stages[name].collective)
    states: dict[str, tuple[Ref, ...]] = {}
    for name, answer in answers.items():
        receipts = of_type(session.fetch([refs[-1] for refs in answer], f"a snapshot of {name}"), Receipt)
        if any(receipt.report for receipt in receipts):
            states[name] = tuple(refs[0] for refs in answer)
    session.secure([ref for refs in states.values() for ref in refs])
    return Snapshot(iteration, states)


def restore(session: Session, executor: Executor, snapshot: Snapshot) -> None:
    """Brings new stages into the state of a snapshot, and sends the weights to all copies.

    Raises:
        ObjectiveError: a state arrived damaged.
        RlinfError: what a worker raised, or that it was lost.
    """
    for name, states in snapshot.states.items():
        call = Call(name, "import_snapshot", StepContext(snapshot.iteration))
        calls = [(worker, call, list(states)) for worker in executor.workers(name)]
        answers = session.submit(calls, executor.workflow.stages[name].collective)
        session.fetch([refs[-1] for refs in answers], f"the snapshot of {name}")
    for edge in executor.workflow.weight_edges:
        executor.sync_weights(edge.source, edge.target)
