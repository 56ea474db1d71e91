"""A stage that does nothing, and brings no torch into its worker."""

from __future__ import annotations

from rlinf_embodied.runtime.host import Output, StageContext, StepContext


class Nothing:
    """Answers every call at once; its data are references to nothing."""

    def __init__(self, config: object) -> None: ...

    def setup(self, context: StageContext) -> None: ...

    def open(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        return Output(dict.fromkeys(inputs, 0))

    close = run = open

    def step(self, step_context: StepContext, inputs: dict[int, object]) -> dict[int, object]:
        """Shows or answers hardly anything: a loop in which nothing is shown is over."""
        return dict.fromkeys(inputs, 0)
