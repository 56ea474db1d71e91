"""Fake stages: integers instead of tensors, so that what a plan computes can be checked against plain arithmetic."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


class Counter:
    """Opens the loop: shows block * 1000, then adds the answers; fails or sleeps on demand (config)."""

    def __init__(self, config: dict | None) -> None:
        self.config = config or {}

    def setup(self, context: StageContext) -> tuple[int, tuple[int, ...]]:
        self.values: dict[int, int] = {}
        self.history: dict[int, list[int]] = {}
        return os.getpid(), context.blocks

    def open(self, step_context: StepContext, blocks: tuple[int, ...]) -> dict[int, torch.Tensor]:
        for block in blocks:
            self.values[block] = 1000 * block + 100 * step_context.iteration + 10 * step_context.round
            self.history[block] = []
        return {block: torch.tensor([self.values[block]]) for block in blocks}

    def step(self, step_context: StepContext, answers: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self.config.get("fail_at") == step_context.chunk_step:
            raise ValueError("the fake failed")
        if self.config.get("hang_at") == step_context.chunk_step:
            time.sleep(60)
        for block, answer in answers.items():
            self.values[block] += int(answer)
            self.history[block].append(self.values[block])
        return {block: torch.tensor([self.values[block]]) for block in answers}

    def close(self, step_context: StepContext, blocks: dict[int, object]) -> Output:
        columns = {b: {"history": torch.tensor(self.history[b])} for b in blocks}
        return Output(columns, sum(len(self.history[b]) for b in blocks))


class Doubler:
    """Answers twice what it is shown modulo 97, plus its weight."""

    def __init__(self, config: object) -> None:
        self.weight = 0

    def setup(self, context: StageContext) -> int:
        self.shared = context.share("weight", lambda: {"value": 0, "version": 0})
        self.seen: dict[int, int] = {}
        return os.getpid()

    def step(self, step_context: StepContext, shown: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        self.seen |= {block: self.seen.get(block, 0) + int(value) for block, value in shown.items()}
        return {block: (value * 2) % 97 + self.shared["value"] for block, value in shown.items()}

    def close(self, step_context: StepContext, last: dict[int, torch.Tensor]) -> Output:
        return Output({block: self.seen.pop(block, 0) + int(value) for block, value in last.items()})

    def install_weights(self, step_context: StepContext, message: dict) -> None:
        self.shared |= message


class Summer:
    """The actor: sums everything over all blocks, in one collective call, and makes that its weight."""

    def __init__(self, config: object) -> None:
        pass

    def setup(self, context: StageContext) -> int:
        self.shared = context.share("weight", lambda: {"value": 0, "version": 0})
        self.reducer = Reducer(context.group, context.owners)
        return os.getpid()

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        local = {}
        for block, payloads in inputs.items():
            half = len(payloads) // 2
            seen, histories = payloads[:half], payloads[half:]
            local[block] = torch.tensor([float(sum(seen) + sum(int(h["history"].sum()) for h in histories))])
        total = float(self.reducer.sum_blocks(local)[0])
        self.shared |= {"value": int(total) % 89, "version": step_context.iteration + 1}
        return Output(dict.fromkeys(inputs), {"total": total, "message": step_context.message})

    def export_weights(self, step_context: StepContext) -> dict:
        return dict(self.shared)


class Maker:
    """Makes a list per block, and shows its worker which."""

    def __init__(self, config: object) -> None:
        pass

    def setup(self, context: StageContext) -> None:
        self.made = context.share("made", dict)

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        made = {block: [block, step_context.iteration] for block in inputs}
        self.made.update(made)
        return Output(made)


class Taker:
    """Reports for each block whether it got the very object that was made in its worker, and what was in it."""

    def __init__(self, config: object) -> None:
        pass

    def setup(self, context: StageContext) -> None:
        self.made = context.share("made", dict)

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        report = {block: (parts[0] is self.made.get(block), parts[0]) for block, parts in inputs.items()}
        return Output(dict.fromkeys(inputs), report)


class Arrays:
    """Makes a numpy array and a tensor; given them, it tries to write to both and reports what came of it."""

    def __init__(self, config: object) -> None:
        pass

    def setup(self, context: StageContext) -> None:
        pass

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
