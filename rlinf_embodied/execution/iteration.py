"""An iteration: what the executor holds of it while it is under way, and what remains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from rlinf_embodied.runtime.host import Call, StepContext
from rlinf_embodied.runtime.session import Ref, of_type
from rlinf_embodied.telemetry.trace import Span

_Report = TypeVar("_Report")


@runtime_checkable
class Finishes(Protocol):
    """What a stage with long tails (StageSpec.at_once) reports of a call."""

    finish_s: Mapping[int, float]  # seconds after the call's start at which each block was finished


@dataclass(slots=True)
class IterationResult:
    """What the driver sees of an iteration: reports by stage (a list per round, in order of workers), and spans."""

    reports: dict[str, list[list[object]]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    staleness: int = 0  # versions by which the weights that made its data were behind those that it trained

    def all_of(self, stage: str, kind: type[_Report]) -> list[_Report]:
        """Returns a stage's reports of all rounds, which are of this type."""
        return of_type((report for round_ in self.reports[stage] for report in round_), kind)


@dataclass(slots=True)
class Iteration:
    """What is under way: references by stage and block, receipts still to be fetched, and what is known already."""

    step_context: StepContext
    outputs: dict[str, dict[int, list[Ref]]] = field(default_factory=dict)
    receipts: list[tuple[str, list[Ref]]] = field(default_factory=list)
    timings: list[Ref] = field(default_factory=list)  # receipts without a report
    result: IterationResult = field(default_factory=IterationResult)

    def note(self, stage: str, calls: Sequence[tuple[int, Call, object]], answers: Sequence[Sequence[Ref]]) -> None:
        """Files block results of calls as the outputs of their makers, and the receipts for later."""
        for (_, call, _), (*refs, _) in zip(calls, answers, strict=True):
            made = iter(refs)
            for maker in call.makers:
                outputs = self.outputs.setdefault(maker, {})
                for block in call.blocks:
                    outputs.setdefault(block, []).append(next(made))
        self.receipts.append((stage, [refs[-1] for refs in answers]))
