"""Fake stages that bring no torch: one says what its process has loaded, others send weights."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np

from rlinf_embodied.runtime.host import Output, StageContext, StepContext


class Fake:
    """Is made with any config, and needs no place."""

    def __init__(self, config: object) -> None: ...

    def setup(self, context: StageContext) -> object: ...


class Looker(Fake):
    """Answers with the modules of its process and its resident memory."""

    def run(self, step_context: StepContext, inputs: dict[int, list[object]]) -> Output:
        lines = Path("/proc/self/status").read_text().splitlines()
        (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
        return Output({block: {"seen": parts} for block, parts in inputs.items()}, (set(sys.modules), int(kilobytes)))


class Learner(Fake):
    """Has as many weights as its config says; its version is the number of iterations that it has run."""

    def __init__(self, config: int) -> None:
        self.num_weights, self.version = config, 0

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        self.version += 1
        return Output(dict.fromkeys(inputs))

    def export_weights(self, step_context: StepContext) -> dict[str, object]:
        weights = np.full(self.num_weights, self.version, np.float32)
        return {"version": self.version, "weights": weights, "checksum": zlib.crc32(weights.data)}


class Reader(Fake):
    """Reports the version of the weights that it has, which came whole."""

    def __init__(self, config: object) -> None:
        self.version = 0

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        return Output(dict.fromkeys(inputs), self.version)

    def install_weights(self, step_context: StepContext, message: dict) -> int:
        assert zlib.crc32(message["weights"].data) == message["checksum"]
        assert (message["weights"] == message["version"]).all()
        self.version = message["version"]
        return self.version


class Stateful(Fake):
    """Has a state of as many bytes as its config gives its worker."""

    def __init__(self, config: tuple[int, ...]) -> None:
        self.config = config

    def setup(self, context: StageContext) -> None:
        self.num_bytes = self.config[context.worker]

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        return Output(dict.fromkeys(inputs))

    def export_snapshot(self, step_context: StepContext) -> np.ndarray:
        return np.zeros(self.num_bytes, np.uint8)


class Where(Fake):
    """Says at its set-up on which of Ray's nodes it is."""

    def setup(self, context: StageContext) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def run(self, step_context: StepContext, inputs: dict[int, list]) -> Output:
        return Output(dict.fromkeys(inputs))
