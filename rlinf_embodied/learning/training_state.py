"""All that training resumes from: a policy's weights with their version, and what belongs to them by name.

    export -> write    a checkpoint: groups of tensors by name, and the policy's own files
    load               the same, in a stage whose policy was loaded from that checkpoint
    snapshot           weights and groups, kept in memory from the start of an iteration on
    go_on_from         what a snapshot kept, also in a rebuilt stage

All workers of a group make the same calls; the first one speaks for them, except in snapshots of sharded learners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.checkpoint_writer import CheckpointWriter
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.shared_policy import SharedPolicy, move
from rlinf_embodied.learning.snapshot import StageState, install_parts

Groups = dict[str, dict[str, Tensor]]
_NO_MODULES: Mapping[str, nn.Module] = MappingProxyType({})


class TrainingState:
    """The learners of a policy, and the networks that only they use, by their names in a checkpoint."""

    def __init__(
        self,
        shared: SharedPolicy[Any],
        rank: int,
        learners: Mapping[str, Learner],
        modules: Mapping[str, nn.Module] = _NO_MODULES,
    ) -> None:
        """Takes what there is.

        Args:
            shared: the worker's copy of the policy, whose version counts.
            rank: the worker's number in its group.
            learners: optimizers.
            modules: networks other than the policy.
        """
        self._shared, self._rank, self._learners, self._modules = shared, rank, learners, modules
        self._writer = CheckpointWriter()

    def move(self, device: str) -> None:
        """Moves everything except the policy to a device."""
        for module in self._modules.values():
            move(module, device)
        for learner in self._learners.values():
            learner.move_state(device)

    def export(self) -> Groups:
        """Returns networks and moments by name; learners' are {} in workers but the first, and all take part."""
        networks = {name: dict(module.state_dict()) for name, module in self._modules.items()}
        return networks | {name: learner.export_state() for name, learner in self._learners.items()}

    # ---------------------------------------------------------------------------------------------------- checkpoints
    def write(
        self,
        place: tuple[str, int, int],
        write_policy: Callable[[Path], None],
        groups: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, object],
    ) -> None:
        """Begins a checkpoint; the first worker calls it with what `export` returned, and what else belongs to it.

        Args:
            place: the folder of all checkpoints, the step, and how many are kept.
            write_policy: writes the policy's own files into a folder.
            groups: tensors.
            state: of JSON; the version of the weights is added.

        Raises:
            CheckpointWriteError: the checkpoint before could not be written, or this one cannot.
        """
        root, step, keep = place
        told = {**state, "version": self._shared.version}
        self._writer.save(Path(root), step, policy_writer=write_policy, tensors=groups, state=told, keep=keep)

    def wait(self) -> None:
        """Returns when the checkpoint that was begun last is on the disk.

        Raises:
            CheckpointWriteError: it could not be written.
        """
        self._writer.wait()

    def leave(self) -> None:
        """Returns when nothing is being written."""
        self._writer.leave()

    def load(self, folder: str, version: int) -> None:
        """Restores networks and learners; the policy's weights, of this version, were loaded with the policy.

        Raises:
            CheckpointError: a group is missing, or that of other networks.
        """
        for name, module in self._modules.items():
            module.load_state_dict(load_tensors(Path(folder), name))
        for name, learner in self._learners.items():
            learner.import_state(load_tensors(Path(folder), name))
        self._shared.version = version

    # ------------------------------------------------------------------------------------------------------ snapshots
    def snapshot(self) -> StageState | None:
        """Returns a copy of weights, networks and moments; None in workers but the first.

        Where workers hold slices, each returns its slices, and as many of the weights: nothing is exchanged.
        """
        shares = max((learner.shares for learner in self._learners.values()), default=1)
        if self._rank >= shares:
            return None
        groups: Groups = {name: learner.export_part() for name, learner in self._learners.items()}
        if self._rank == 0:
            groups |= {name: dict(module.state_dict()) for name, module in self._modules.items()}
        module, version = self._shared.policy.module, self._shared.version
        return StageState.of(module, version, groups, share=(self._rank, shares))

    def go_on_from(self, parts: Iterable[StageState | None]) -> None:
        """Restores what `snapshot` returned in all workers."""
        found = [part for part in parts if part is not None]
        groups = install_parts(found, self._shared.policy.module)
        for learner in self._learners.values():
            learner.adopt()
        with torch.no_grad():
            for name, module in self._modules.items():
                module.load_state_dict(groups[0][name])
            for name, learner in self._learners.items():
                learner.import_state(learner.joined([group[name] for group in groups if group[name]]))
        self._shared.version = found[0].weights.version
