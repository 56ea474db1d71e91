"""Stages that wait for each other: they get on only where a learner need not wait for all blocks."""

from __future__ import annotations

import time
from pathlib import Path

from rlinf_embodied.reasoning.actor_stage import ActorStage
from rlinf_embodied.reasoning.generation_stage import GenerationStage

LAST_BLOCK = 3


class PatientGeneration(GenerationStage):
    """Decodes its last block only when the learner has the gradient of the first one."""

    def run(self, tick, inputs):
        if max(inputs) == LAST_BLOCK:
            patience = time.monotonic() + 40
            while not _marker(self._held.folder, tick.iteration).exists():
                assert time.monotonic() < patience, "the learner waits for all blocks"
                time.sleep(0.01)
        return super().run(tick, inputs)


class TellingActor(ActorStage):
    """Leaves a file when it has the gradient of the first block."""

    def _begin(self, block):
        super()._begin(block)
        if block == 0:
            assert self._shared.version < 3
            _marker(self._held.folder, self._shared.version).touch()


def _marker(folder: str, iteration: int) -> Path:
    return Path(folder) / f"gradient_of_iteration_{iteration}"
