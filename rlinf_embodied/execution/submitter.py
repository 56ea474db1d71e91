"""Submits the calls of iterations, and files what comes back; what is lost meanwhile is done again (mending.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlinf_embodied.errors import HangError, WorkerError
from rlinf_embodied.execution.iteration import Iteration, Mends
from rlinf_embodied.runtime.host import Call, Receipt
from rlinf_embodied.runtime.session import Ref, Session, of_type


class Submitter:
    """An executor's way to its workers, for what belongs to an iteration."""

    def __init__(self, session: Session, workflow: str) -> None:
        self.mender: Mends | None = None  # None: an iteration that loses workers is done again as a whole
        self._session, self._workflow = session, workflow

    @property
    def relays(self) -> bool:
        """Whether the session's workers can call each other, at this moment."""
        return self._session.relays

    def submit(
        self,
        calls: Sequence[tuple[int, Call, Sequence[Ref]]],
        state: Iteration,
        collective: bool = False,
        passing: bool = False,
    ) -> list[list[Ref]]:
        """Submits calls of an iteration, see `CallLog.submit`.

        Raises:
            RlinfError: what a worker raised, or that it was lost.
        """
        if self.mender is None:
            return self._session.submit(calls, collective)
        return state.calls.submit(self._session, calls, collective, passing)

    def note(self, stage: str, calls: Sequence[tuple], answers: list[list[Ref]], state: Iteration) -> None:
        """Files block results as the stage's outputs and the receipts for later."""
        outputs = state.outputs.setdefault(stage, {})
        for (_, call, _), refs in zip(calls, answers, strict=True):
            for block, ref in zip(call.blocks, refs, strict=False):
                outputs.setdefault(block, []).append(ref)
        state.receipts.append((stage, [refs[-1] for refs in answers]))

    def collect(self, state: Iteration, before: Callable[[], None] = lambda: None) -> None:
        """Waits for everything submitted so far and files reports and spans; what is lost meanwhile is done again.

        Args:
            state: of the iteration.
            before: what comes first; it is done again, too.

        Raises:
            RlinfError: what a worker raised, or that it was lost, unless it was mended.
        """
        while True:
            try:
                before()
                self._file(state)
                return
            except (WorkerError, HangError) as error:
                if self.mender is None:
                    raise
                self.mender.mend(state, error)

    def _file(self, state: Iteration) -> None:
        where = f"iteration {state.step_context.iteration} of {self._workflow}"
        by_stage: dict[str, list[object]] = {}
        spans = []
        for stage, refs in state.receipts:
            receipts = self._receipts(refs, f"{stage} in {where}", state)
            by_stage.setdefault(stage, []).extend(receipt.report for receipt in receipts)
            spans += [span for receipt in receipts for span in receipt.spans]
        spans += [span for receipt in self._receipts(state.timings, where, state) for span in receipt.spans]
        for stage, reports in by_stage.items():
            state.result.reports.setdefault(stage, []).append(reports)
        state.result.spans.extend(spans)
        state.receipts, state.timings = [], []

    def _receipts(self, refs: Sequence[Ref], waiting: str, state: Iteration) -> list[Receipt]:
        refs = refs if self.mender is None else [state.calls.current(ref) for ref in refs]
        return of_type(self._session.fetch(refs, waiting), Receipt)
