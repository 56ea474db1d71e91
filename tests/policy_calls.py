"""How many rows the calls of a policy have."""

from __future__ import annotations

import torch
from runs import clone

from rlinf_embodied.config import EnvConfig, TrainConfig
from rlinf_embodied.embodied.rollout_stage import RolloutStage
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.runtime.host import StepContext, solo_context
from tests.observations import observed


def acted(config: TrainConfig, device: str = "cpu", frozen: int | None = None) -> tuple[list[int], dict, dict]:
    """Returns the rows of each call in two chunk-steps, the last actions, and the columns by block."""
    stage = RolloutStage(training_workflow(config, str(clone(config))).stages["policy"].config)  # pyright: ignore
    blocks = tuple(range(config.env.num_blocks))
    stage.setup(solo_context(blocks, device))
    calls, act = [], stage._policy.act

    def counted(features, noise, temperature):
        calls.append(len(next(iter(features.values()))))
        return act(features, noise, temperature)

    stage._policy.act = counted  # pyright: ignore
    draw = torch.Generator().manual_seed(0)
    for step in range(2):
        of_blocks = {block: None if block == frozen else shown(config.env, draw) for block in blocks}
        actions = stage.step(StepContext(0, chunk_step=step), of_blocks)
    columns = stage.close(StepContext(0), {block: None for block in blocks if block != frozen}).blocks
    return calls, actions, dict(columns)


def shown(env: EnvConfig, draw: torch.Generator | None = None) -> Observation:
    """Returns a random observation of a block."""
    size = env.block_size
    images = torch.randint(0, 256, (size, 1, 16, 16, 3), generator=draw, dtype=torch.uint8)
    return observed(torch.rand(size, 4, generator=draw), ("reach the target",) * size, images)


def rows_of_calls(config: TrainConfig, device: str = "cpu") -> list[int]:
    """Returns the rows of each call."""
    return acted(config, device)[0]
