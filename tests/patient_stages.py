"""Stages that wait for each other: they get on only where a learner need not wait for all blocks."""

from __future__ import annotations

import time
from pathlib import Path

from rlinf_embodied.reasoning.actor_stage import ActorStage
from rlinf_embodied.reasoning.generation_stage import GenerationStage

LAST_BLOCK = 3


class PatientGeneration(GenerationStage):
    """Decodes its last block only when the learner is done with the first one."""

    def run(self, step_context, inputs):
        if max(inputs) == LAST_BLOCK:
            patience = time.monotonic() + 40
            while not _marker(self._made.folder, step_context.iteration).exists():
                assert time.monotonic() < patience, "the learner waits for all blocks"
                time.sleep(0.01)
        return super().run(step_context, inputs)


class TellingActor(ActorStage):
    """Leaves a file when it is done with the first block."""

    def run(self, step_context, inputs):
        output = super().run(step_context, inputs)
        if 0 in inputs:
            _marker(self._made.folder, step_context.iteration).touch()
        return output


def _marker(folder: str, iteration: int) -> Path:
    return Path(folder) / f"first_block_of_iteration_{iteration}"
