"""The state of an iteration while it runs, and its result."""

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
    """A report of a stage with long tails (StageSpec.at_once)."""

    finish_s: Mapping[int, float]  # seconds after the call's start at which each block was finished


@dataclass(slots=True)
class IterationResult:
    """The result of an iteration: reports by stage (a list per round, in order of workers), and spans."""

    reports: dict[str, list[list[object]]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    staleness: int = 0  # versions by which the weights of its rollouts were older than those that it trained

    def all_of(self, stage: str, kind: type[_Report]) -> list[_Report]:
        """Returns a stage's reports of all rounds, which are of this type."""
        return of_type((report for round_ in self.reports[stage] for report in round_), kind)


@dataclass(slots=True)
class Iteration:
    """A running iteration: references by stage and block, receipts still to be fetched, and the result so far."""

    step_context: StepContext
    outputs: dict[str, dict[int, list[Ref]]] = field(default_factory=dict)
    receipts: list[tuple[str, list[Ref]]] = field(default_factory=list)
    timings: list[Ref] = field(default_factory=list)  # receipts without a report
    result: IterationResult = field(default_factory=IterationResult)

    def note(self, stage: str, calls: Sequence[tuple[int, Call, object]], answers: Sequence[Sequence[Ref]]) -> None:
        """Records the block results of calls as outputs of their stages, and the receipts, to be fetched later."""
        for (_, call, _), (*refs, _) in zip(calls, answers, strict=True):
            results = iter(refs)
            for stage_name in call.makers:
                outputs = self.outputs.setdefault(stage_name, {})
                for block in call.blocks:
                    outputs.setdefault(block, []).append(next(results))
        self.receipts.append((stage, [refs[-1] for refs in answers]))
