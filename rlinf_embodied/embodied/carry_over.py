"""What an env carries over from one iteration to the next, as named tensors for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlinf_embodied.interfaces.envs import RunningEpisode
from rlinf_embodied.learning.learner_stage import StagePart

CARRY_OVER = "carry_over"  # in a checkpoint


def flatten_carry_over(state: Mapping[int, list[RunningEpisode | None]]) -> dict[str, Tensor]:
    """Returns seeds and actions of running episodes as named tensors."""
    tensors = {}
    for block, episodes in state.items():
        for row, episode in enumerate(episodes):
            if episode is not None:
                tensors[f"{block}.{row}.seed"] = torch.tensor([episode.seed])
                tensors[f"{block}.{row}.actions"] = episode.actions.cpu().contiguous()
    return tensors


def driver_part(state: Mapping[str, object], parts: Sequence[Mapping[int, list[RunningEpisode | None]]]) -> StagePart:
    """Returns what the driver adds to a checkpoint: its JSON state, and running episodes as the env's workers gave."""
    carried = {block: episodes for part in parts for block, episodes in part.items()}
    tensors = {CARRY_OVER: flatten_carry_over(carried)} if carried else {}
    return StagePart(tensors, {**state, "blocks": sorted(carried)})


def unflatten_carry_over(tensors: Mapping[str, Tensor], block_size: int) -> dict[int, list[RunningEpisode | None]]:
    """Returns what `flatten_carry_over` was given, {} for no tensors."""
    blocks = sorted({int(name.split(".")[0]) for name in tensors})
    state: dict[int, list[RunningEpisode | None]] = {block: [None] * block_size for block in blocks}
    for name in tensors:
        block, row, kind = name.split(".")
        if kind == "seed":
            actions = tensors[f"{block}.{row}.actions"]
            state[int(block)][int(row)] = RunningEpisode(int(tensors[name][0]), actions)
    return state
