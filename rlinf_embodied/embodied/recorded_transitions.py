"""Recorded transitions: what earlier runs of learning from transitions hold in their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from rlinf_embodied.algorithms.transitions import Columns
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.policy_folder import trained_under
from rlinf_embodied.errors import CheckpointError, DataError
from rlinf_embodied.learning.checkpoint import load_tensors, verify

REPLAY = "replay"  # in a checkpoint; and what the policy did, within it
_SAME = ("_target_", "task", "states", "options")


def require_recorded(folders: Sequence[str], env: EnvConfig) -> None:
    """Checks that folders hold transitions of an env.

    Raises:
        CheckpointError: a folder is no checkpoint, is damaged, or holds no transitions.
        DataError: they are of another env.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise CheckpointError(
                f"data is {folder!r}, but there is no such folder: give checkpoints of experiments/train_vla.py, "
                "for example data=<run.dir>/checkpoints/latest"
            )
        verify(Path(folder))
        if not load_tensors(Path(folder), REPLAY):
            raise CheckpointError(
                f"data is {folder!r}, but that checkpoint holds no transitions: give one of a run that acted, of "
                "experiments/train_vla.py with algorithm=sac or rlpd"
            )
        theirs = trained_under(folder).env
        for name in _SAME:
            if getattr(theirs, name) != getattr(env, name):
                raise DataError(
                    f"data is {folder!r}, recorded with env.{name}={getattr(theirs, name)!r}, but env.{name} is "
                    f"{getattr(env, name)!r}: use the same for both"
                )


def digests(folders: Sequence[str]) -> list[str]:
    """Returns the SHA-256 of the transitions in checkpoints that `require_recorded` has verified."""
    name = f"training_state/{REPLAY}.safetensors"
    return [
        json.loads((Path(f) / "manifest.json").read_text(encoding="utf-8"))["files"][name]["sha256"] for f in folders
    ]


def recorded_block(folders: Sequence[str], columns: Sequence[str], block: int, num_blocks: int) -> Columns:
    """Returns a block's part of all transitions in some checkpoints, which are dealt out to blocks one by one.

    Raises:
        DataError: the transitions lack a column, or are fewer than the blocks.
    """
    parts: list[Columns] = []
    for folder in folders:
        tensors = load_tensors(Path(folder), REPLAY)
        for start in sorted({name.rpartition(".")[0] for name in tensors}):
            if missing := [name for name in columns if f"{start}.{name}" not in tensors]:
                raise DataError(
                    f"data is {folder!r}, whose transitions have no {', '.join(missing)}: record them with "
                    "algorithm=sac or rlpd, whose transitions have all columns"
                )
            parts.append({name: tensors[f"{start}.{name}"] for name in columns})
    whole = {name: torch.cat([part[name] for part in parts])[block::num_blocks] for name in columns}
    if not len(next(iter(whole.values()))):
        raise DataError(
            f"data is {', '.join(folders)}, which hold fewer transitions than the {num_blocks} blocks: record more, or "
            "use a larger env.block_size"
        )
    return whole
