"""What an iteration has asked its workers for, so that single calls can be made again.

    call 0 prompts.run  worker 0, blocks 0-1  -->  call 2 generation.run  worker 0  -->  call 5 reward.run  worker 1
    call 1 prompts.run  worker 2, blocks 2-3  -->  call 3 ...

Which results a call took is known by the number of the call that made them.  The executor holds references as it got
them at first; `current` is what stands for one after calls were made again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rlinf_embodied.runtime.host import Call
from rlinf_embodied.runtime.session import MendingSession, Ref, Session
from rlinf_embodied.workflow.graph import Workflow

_IN_A_LOOP = ("open", "step", "close")


@dataclass(frozen=True, slots=True)
class Place:
    """A result of a call: the call's number, and which of its results; the last one is its receipt."""

    number: int
    index: int


@dataclass(slots=True)
class Made:
    """A call that was submitted, for example Made(3, 1, 0, Call("env", "step", ...), (Place(2, 0),), False)."""

    number: int  # in the order of submission
    gang: int  # of calls that were submitted in one go
    worker: int
    call: Call
    inputs: tuple[Place, ...]
    collective: bool
    first: list[Ref | None] = field(default_factory=list)  # as the executor holds them; None: it does not, any more
    refs: list[Ref | None] = field(default_factory=list)  # those of now

    @property
    def stages(self) -> tuple[str, ...]:
        """All sides of a loop that is one call, or the stage."""
        return self.call.stages

    def maker(self, index: int) -> str:
        """Returns the stage that a result is of."""
        return self.call.stages[index // len(self.call.blocks)]

    def stays(self, index: int) -> bool:
        """Returns whether a result never left the worker."""
        blocks = self.call.blocks
        return blocks[index % len(blocks)] in self.call.keep


@dataclass(slots=True)
class CallLog:
    """The calls of one iteration, in the order of submission."""

    made: list[Made] = field(default_factory=list)
    _places: dict[int, Place] = field(default_factory=dict)  # by identity, of references that are alive
    _gangs: int = 0

    def submit(
        self,
        session: Session,
        calls: Sequence[tuple[int, Call, Sequence[Ref]]],
        collective: bool = False,
        passing: bool = False,
    ) -> list[list[Ref]]:
        """Submits calls as Session does, and takes note of them.

        Args:
            session: whose workers they are for.
            calls: worker, call, and results of earlier ones.
            collective: as Session has it.
            passing: the results go to the next calls only and are not kept, like what a loop shows at each step.
        """
        inputs = [tuple(self._places[id(ref)] for ref in payloads) for _, _, payloads in calls]
        sent = [(worker, call, [self.current(ref) for ref in payloads]) for worker, call, payloads in calls]
        answers = session.submit(sent, collective)
        for (worker, call, _), places, refs in zip(calls, inputs, answers, strict=True):
            number = len(self.made)
            held = [None if passing else ref for ref in refs[:-1]]
            made = Made(number, self._gangs, worker, call, places, collective, [*held, refs[-1]], [*held, refs[-1]])
            self.made.append(made)
            self._places |= {id(ref): Place(number, index) for index, ref in enumerate(refs)}
        self._gangs += 1
        return answers

    def current(self, ref: Ref) -> Ref:
        """Returns what stands for a reference now."""
        place = self._places.get(id(ref))
        found = None if place is None else self.made[place.number].refs[place.index]
        return ref if found is None else found

    def failed(self, session: MendingSession) -> set[int]:
        """Returns the numbers of the calls that ended in an error; all have ended."""
        wrong = session.failed([made.refs[-1] for made in self.made])
        return {made.number for made, is_wrong in zip(self.made, wrong, strict=True) if is_wrong}

    def repeat(self, session: Session, numbers: Collection[int]) -> None:
        """Submits these calls again, in their order, on what stands for their inputs now.

        Whatever they take that is not kept is made again by one of them.
        """
        chosen = [made for made in self.made if made.number in numbers]
        for _, gang in groupby(chosen, key=lambda made: made.gang):
            calls = list(gang)
            sent = [(m.worker, m.call, [self.made[p.number].refs[p.index] for p in m.inputs]) for m in calls]
            for made, refs in zip(calls, session.submit(sent, calls[0].collective), strict=True):
                made.refs = list(refs)
        for made in chosen:
            kept = zip(made.first, made.refs, strict=True)
            made.refs = [None if first is None else ref for first, ref in kept]


def calls_to_repeat(
    made: Sequence[Made], lost: Collection[int], failed: Collection[int], workflow: Workflow, stateful: Collection[str]
) -> set[int]:
    """Returns the numbers of the calls that have to be made again after workers were replaced.

    Begins with the calls that failed, those of the lost workers' stages that have state, and those whose results went
    with their worker before all that need them had got them.  With a call go: the makers of what it takes and nobody
    has any more; whoever took what it made; all calls of a stage with state in that worker, which begins again from the
    snapshot; all members of a collective; the blocks of a batch; a loop's other steps for the same blocks; and, where
    it was made under weights that were replaced since, the learner that will make them again.

    Args:
        made: an iteration's calls, by number.
        lost: workers that were replaced: they have nothing of what they held.
        failed: numbers of the calls that ended in an error.
        workflow: whose stages are called.
        stateful: stages of which the snapshot holds something.
    """
    takers: dict[Place, list[Made]] = {}
    for call in made:
        for place in call.inputs:
            takers.setdefault(place, []).append(call)
    bound: dict[tuple[object, ...], list[int]] = {}
    for call in made:
        for bond in _bonds(call, workflow, stateful):
            bound.setdefault(bond, []).append(call.number)

    def is_gone(place: Place) -> bool:
        maker = made[place.number]
        passed_on = maker.first[place.index] is None
        return maker.number in failed or passed_on or (maker.worker in lost and maker.stays(place.index))

    found = set(failed)
    found |= {call.number for call in made if call.worker in lost and not set(call.stages).isdisjoint(stateful)}
    targets = {name: {edge.target for edge in workflow.edges if edge.source == name} for name in workflow.stages}
    for call in made:
        for index, place in enumerate(_results(call)):
            given = {taker.call.stage for taker in takers.get(place, ())}
            if (
                call.first[index] is not None
                and is_gone(place)
                and targets[call.maker(index)] - given - set(call.stages)
            ):
                found.add(call.number)
    waiting = sorted(found)
    while waiting:
        call = made[waiting.pop()]
        near = [place.number for place in call.inputs if is_gone(place)]
        near += [taker.number for place in _results(call) for taker in takers.get(place, ())]
        near += [number for bond in _bonds(call, workflow, stateful) for number in bound[bond]]
        near += _sources(call, made, workflow)
        waiting += [number for number in sorted(set(near)) if number not in found]
        found |= set(near)
    return found


def _results(call: Made) -> list[Place]:
    return [Place(call.number, index) for index in range(len(call.first) - 1)]


def _bonds(call: Made, workflow: Workflow, stateful: Collection[str]) -> list[tuple[object, ...]]:
    """Returns what binds a call to others: those with a common bond are made again together."""
    stage, blocks, number = call.call.stage, call.call.blocks, call.call.step_context.round
    if call.call.method == "enter":
        return []
    found: list[tuple[object, ...]] = [("state", name, call.worker) for name in call.stages if name in stateful]
    if workflow.stages[stage].collective:
        found.append(("collective", stage))
    if call.call.method in _IN_A_LOOP:
        found.append(("turns", stage, call.worker, number, blocks))
    size = workflow.stages[stage].blocks_per_batch
    if size > 1:
        found += [("batch", stage, call.worker, number, batch) for batch in sorted({block // size for block in blocks})]
    return found


def _sources(call: Made, made: Sequence[Made], workflow: Workflow) -> list[int]:
    """Returns the calls of those whose weights a call was made under."""
    if call.call.method == "enter":
        return []
    sources = {edge.source for edge in workflow.weight_edges if edge.target in call.stages}
    return [other.number for other in made if sources.intersection(other.stages) and other.call.method != "enter"]
