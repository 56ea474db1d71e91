"""Submits the calls of iterations, and files what comes back."""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_embodied.execution.iteration import Iteration
from rlinf_embodied.runtime.host import Call, Receipt
from rlinf_embodied.runtime.session import Ref, Session, of_type


class Submitter:
    """An executor's way to its workers, for what belongs to an iteration."""

    def __init__(self, session: Session, workflow: str) -> None:
        """Takes the workers, and the workflow's name, for errors."""
        self._session, self._workflow = session, workflow

    @property
    def relays(self) -> bool:
        """Whether the session's workers can call each other."""
        return self._session.relays

    def submit(
        self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], state: Iteration, collective: bool = False
    ) -> list[list[Ref]]:
        """Submits calls of an iteration, see Session."""
        return self._session.submit(calls, collective)

    def note(self, stage: str, calls: Sequence[tuple], answers: list[list[Ref]], state: Iteration) -> None:
        """Files block results as the stage's outputs and the receipts for later."""
        outputs = state.outputs.setdefault(stage, {})
        for (_, call, _), refs in zip(calls, answers, strict=True):
            for block, ref in zip(call.blocks, refs, strict=False):
                outputs.setdefault(block, []).append(ref)
        state.receipts.append((stage, [refs[-1] for refs in answers]))

    def collect(self, state: Iteration) -> None:
        """Waits for everything submitted so far and files reports and spans.

        Raises:
            RlinfError: what a worker raised, or that it was lost.
        """
        where = f"iteration {state.step_context.iteration} of {self._workflow}"
        by_stage: dict[str, list[object]] = {}
        spans = []
        for stage, refs in state.receipts:
            receipts = of_type(self._session.fetch(refs, f"{stage} in {where}"), Receipt)
            by_stage.setdefault(stage, []).extend(receipt.report for receipt in receipts)
            spans += [span for receipt in receipts for span in receipt.spans]
        for receipt in of_type(self._session.fetch(state.timings, where), Receipt):
            spans += receipt.spans
        for stage, reports in by_stage.items():
            state.result.reports.setdefault(stage, []).append(reports)
        state.result.spans.extend(spans)
        state.receipts, state.timings = [], []
