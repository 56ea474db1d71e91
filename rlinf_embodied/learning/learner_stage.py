"""Base of stages that train weights, for all workflows: everything except their losses.

    setup          a subclass loads its model and calls `hold` with the optimizers and networks that it trains
    run            implemented by the subclass: losses, and steps of the learners
    save           writes a checkpoint of this stage's state and the parts of other stages (`StagePart`)
    load           restores it in a stage whose model was loaded from that checkpoint
    *_snapshot     the same, kept in memory from the start of an iteration
    export_weights, sent_bytes, weights_digest, offload, onload, earlier_weights

All workers of a group make the same calls; the first one writes files and returns results.  A subclass's `run` ends
with self.shared.version = step_context.iteration + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlinf_embodied.learning import checkpoint, weights
from rlinf_embodied.learning.checkpoint import load_tensors, weights_sha256
from rlinf_embodied.learning.groups import Group
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.weights import WHOLE_STAGE, Groups, SharedPolicy, WeightsMessage


class Moment(Protocol):
    """The part of a StepContext that is used here."""

    @property
    def iteration(self) -> int: ...

    @property
    def chunk(self) -> int: ...

    @property
    def num_chunks(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StagePart:
    """A worker's part of its stage's state between two iterations, for a snapshot or a checkpoint that another writes.

    It has groups of tensors by name, plain values, and files in addition to the policy's.
    """

    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    state: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    weights: WeightsMessage | None = None  # of a learner's snapshot; a checkpoint has them in the policy's files


class LearnerStage:
    """Holds a model, its optimizers and the networks that only training uses; see the module."""

    user = "learner"  # of the worker's copy of the model
    sends_frozen = False  # whether messages and snapshots include weights that are frozen now, but trained later

    def hold(
        self,
        shared: SharedPolicy[Any],
        group: Group,
        device: str,
        learners: Mapping[str, Learner],
        modules: Mapping[str, nn.Module] | None = None,
        policy: str = WHOLE_STAGE,
    ) -> None:
        """Sets the worker's copy of the model, and optimizers and other networks by their names in a checkpoint.

        `policy` names the policy if receivers of the weights hold several.
        """
        self.shared, self.group, self.device, self.policy_name = shared, group, device, policy
        self.learners, self.modules = learners, modules or {}
        shared.enter(self.user)

    def write_policy(self, folder: Path) -> None:
        """Writes the model's files."""
        raise NotImplementedError

    def save_policy(self, step_context: Moment, folder: str) -> None:
        """Writes the model's files in the first worker, without the state of training."""
        if self.group.rank == 0:
            self.write_policy(Path(folder))

    def offload(self, step_context: Moment) -> None:
        """Moves to the CPU's memory; the weights stay if another stage of the worker uses them."""
        self.shared.leave(self.user)
        self.move_training("cpu")

    def onload(self, step_context: Moment) -> None:
        self.shared.enter(self.user)
        self.move_training(self.device)

    def move_training(self, device: str) -> None:
        """Moves everything except the model to a device."""
        for module in self.modules.values():
            weights.move(module, device)
        for learner in self.learners.values():
            learner.move_state(device)

    def export_weights(self, step_context: Moment) -> WeightsMessage:
        """Returns a part of the trainable weights, or of all, with their version and checksum."""
        shared, part = self.shared, (step_context.chunk, step_context.num_chunks)
        return weights.export_weights(shared.policy.module, shared.version, self.sends_frozen, self.policy_name, part)

    def sent_bytes(self, step_context: Moment) -> int:
        """Returns the bytes of the weights that `export_weights` sends, in the precision of this copy."""
        return weights.state_bytes(self.shared.policy.module, self.sends_frozen)

    def weights_digest(self, step_context: Moment) -> str:
        """Returns the SHA-256 of all weights, of the model and of networks that only training uses."""
        networks = {f"{n}/{key}": t for n, module in self.modules.items() for key, t in module.state_dict().items()}
        return weights_sha256({**self.shared.policy.module.state_dict(), **networks})

    def earlier_weights(self, step_context: Moment, request: tuple[str, int, int]) -> WeightsMessage | None:
        """Returns earlier weights in a checkpoint; the request is (folder, index, version)."""
        folder, number, version = request
        if self.group.rank != 0:
            return None
        tensors = load_tensors(Path(folder), f"{weights.EARLIER}_{number}")
        return WeightsMessage(version, tensors, weights.checksum(tensors))

    def export_training(self) -> Groups:
        """Returns networks and moments by name; learners' are {} in workers but the first, and all take part."""
        networks = {name: dict(module.state_dict()) for name, module in self.modules.items()}
        return networks | {name: learner.export_state() for name, learner in self.learners.items()}

    def save(
        self, step_context: Moment, argument: tuple[str, int, int, StagePart], *parts: StagePart | WeightsMessage | None
    ) -> None:
        """Writes a checkpoint of the state before the next iteration, in the first worker.

        The argument is (root, step, number of checkpoints to keep, the driver's part); `parts` are those of other
        stages, and the weights with which unfinished rollouts began.
        """
        tensors = self.export_training()  # all take part
        if self.group.rank != 0:
            return
        root, step, keep, first = argument
        earlier = [part for part in parts if isinstance(part, WeightsMessage)]
        tensors |= {f"{weights.EARLIER}_{number}": message.tensors for number, message in enumerate(earlier)}
        added = [first, *(part for part in parts if isinstance(part, StagePart))]
        state: dict[str, object] = {weights.VERSIONS: [message.version for message in earlier]} if earlier else {}
        for part in added:
            state |= part.state
            for name, group in part.tensors.items():
                tensors[name] = {**tensors.get(name, {}), **group}

        def write(folder: Path) -> None:
            self.write_policy(folder)
            for part in added:
                for name, content in part.files.items():
                    (folder / name).write_bytes(content)

        state["version"] = self.shared.version
        checkpoint.save(Path(root), step, policy_writer=write, tensors=tensors, state=state, keep=keep)

    def state_part(self, step_context: Moment) -> StagePart | None:
        """Returns this stage's state, in the first worker, for a checkpoint that another learner writes."""
        groups = self.export_training()  # all take part
        return StagePart(groups) if self.group.rank == 0 else None

    def load(self, step_context: Moment, folder: str) -> None:
        """Restores learners, networks and version; the model's weights were loaded already.

        Raises:
            CheckpointError: a group is missing, or that of other networks.
        """
        for name, module in self.modules.items():
            module.load_state_dict(load_tensors(Path(folder), name))
        for name, learner in self.learners.items():
            learner.import_state(load_tensors(Path(folder), name))
        self.shared.version = step_context.iteration

    def export_snapshot(self, step_context: Moment) -> StagePart:
        """Returns this worker's share of weights and moments; the first one adds the other networks.

        Nothing is exchanged.
        """
        groups: Groups = {name: learner.export_part() for name, learner in self.learners.items()}
        if self.group.rank == 0:
            for name, module in self.modules.items():
                groups[name] = {key: tensor.cpu() for key, tensor in module.state_dict().items()}
        module, whole, part = self.shared.policy.module, self.sends_frozen, (self.group.rank, self.group.size)
        return StagePart(groups, weights=weights.export_weights(module, self.shared.version, whole, part=part))

    def import_snapshot(self, step_context: Moment, parts: Sequence[StagePart]) -> None:
        """Restores the parts that `export_snapshot` returned in all workers.

        Raises:
            ObjectiveError: the weights belong to another module.
        """
        messages = [part.weights for part in parts if part.weights is not None]
        tensors = {name: tensor for part in messages for name, tensor in part.tensors.items()}
        message = WeightsMessage(0, tensors, weights.checksum(tensors))
        weights.install_weights(self.shared.policy.module, message)
        for learner in self.learners.values():
            learner.adopt()
        with torch.no_grad():
            for name, module in self.modules.items():
                module.load_state_dict(parts[0].tensors[name])
            for name, learner in self.learners.items():
                learner.import_state(learner.joined([part.tensors[name] for part in parts]))
        self.shared.version = messages[0].version
