"""Fake stages that report what became of the objects and calls that they were given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from light_fakes import Fake

from rlinf_embodied.runtime.host import Output, StageContext, StepContext


class Maker(Fake):
    """Makes a list per block, and shows its worker which."""

    def setup(self, context: StageContext) -> None:
        self.made = context.share("made", dict)

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        made = {block: [block, step_context.iteration] for block in inputs}
        self.made.update(made)
        return Output(made)


class Taker(Fake):
    """Reports for each block whether it got the very object that was made in its worker, and what was in it."""

    def setup(self, context: StageContext) -> None:
        self.made = context.share("made", dict)

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        report = {block: (parts[0] is self.made.get(block), parts[0]) for block, parts in inputs.items()}
        return Output(dict.fromkeys(inputs), report)


class Arrays(Fake):
    """Makes a numpy array and a tensor; given them, it tries to write to both and reports what came of it."""

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        if not any(inputs.values()):
            return Output({b: {"array": np.zeros(1 << 20), "tensor": torch.zeros(1 << 20)} for b in inputs})
        ((payload,),) = inputs.values()
        report = {name: self.written(value) for name, value in payload.items()}
        return Output(dict.fromkeys(inputs), report | {"array_owns_its_memory": payload["array"].flags.owndata})

    @staticmethod
    def written(value: np.ndarray | torch.Tensor) -> str:
        try:
            value[0] = 1.0
        except ValueError as error:
            return type(error).__name__
        return "written"


class Sparing:
    """Either side of a loop; shows nothing any more after the chunk-step of its config, and reports how many it did."""

    def __init__(self, config: int) -> None:
        self.last = config

    def setup(self, context: object) -> None:
        self.steps = 0

    def open(self, step_context: StepContext, blocks: Sequence[int]) -> dict[int, int]:
        return dict.fromkeys(blocks, 1)

    def step(self, step_context: StepContext, answers: dict[int, int]) -> dict[int, int | None]:
        self.steps += 1
        return dict.fromkeys(answers, 1 if step_context.chunk_step < self.last else None)

    def close(self, step_context: StepContext, blocks: dict[int, object]) -> Output:
        return Output(dict.fromkeys(blocks, 0), self.steps)
