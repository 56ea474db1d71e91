"""A process of the benchmark, pinned or not; imports nothing that computes before it is."""

from __future__ import annotations

import time

from experiments.bench.harness import Spread, seconds_of
from rlinf_embodied import portable


class Arm:
    """One process, pinned or not."""

    def __init__(self, arm: str) -> None:
        """Pins this process where it is the portable arm's; nothing that computes is imported before."""
        if arm == "portable":
            portable.pin()
        import torch

        torch.set_num_threads(1)

    def seconds(self, part: str, repeats: int) -> float:
        """Returns the median CPU seconds of a part."""
        from experiments.bench.portable import parts

        with getattr(parts, part)() as run:
            return Spread.of([seconds_of(run, clock=time.process_time) for _ in range(repeats + 1)][1:]).median
