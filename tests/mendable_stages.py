"""Fakes with state that is carried from iteration to iteration, as an env's episodes and a learner's weights are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from any_plan import Fake, mixed

from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.workflow.graph import Workflow


class Forgetful(Fake):
    """A fake that may be called again after a call that failed."""

    def run(self, step_context: StepContext, inputs: Mapping[int, Sequence[int]]) -> Output:
        if step_context.chunk == 0:
            self.waiting = {}
        return super().run(step_context, inputs)

    def step(self, step_context: StepContext, messages: Mapping[int, int]) -> dict[int, int]:
        if step_context.chunk_step == 0 and self.name in ("policy", "high"):
            self.seen = {block: value for block, value in self.seen.items() if block not in messages}
        return super().step(step_context, messages)


class Carrying(Forgetful):
    """A fake whose results depend on all that it did before."""

    def setup(self, context: StageContext) -> None:
        super().setup(context)
        self.carried = dict.fromkeys(context.blocks, 0)

    def _value(self, step_context: StepContext, block: int, *parts: int) -> int:
        self.carried[block] = super()._value(step_context, block, self.carried[block], *parts)
        return self.carried[block]

    def export_snapshot(self, step_context: StepContext) -> dict[str, object]:
        return {"carried": dict(self.carried), "weights": self.weights[0]}

    def import_snapshot(self, step_context: StepContext, parts: Sequence[Mapping[str, dict[int, int]]]) -> None:
        carried = {block: value for part in parts for block, value in part["carried"].items()}
        self.carried = {block: carried[block] for block in self.context.blocks}
        self.weights[0] = int(str(parts[0]["weights"]))
        self.seen, self.waiting = {}, {}


def with_state(workflow: Workflow, seed: int) -> Workflow:
    """Returns a random workflow in which learners have state, and some of the others."""
    learners = {edge.source for edge in workflow.weight_edges}
    stages = {}
    for name, spec in workflow.stages.items():
        carries = name in learners or mixed(seed, len(name), ord(name[-1])) % 3 == 0
        kind = "Carrying" if carries else "Forgetful"
        stages[name] = replace(spec, target=f"mendable_stages.{kind}")
    return replace(workflow, stages=stages)
