"""Behaviour cloning of demonstrations that lie in data blocks: the whole policy first, then all but its stem.

    measure (statistics of inputs) --> begin(whole) --> fit (epochs) --> begin(head) --> cache features --> fit (epochs)

A minibatch is one slice of every block, as in RL, so that the weights are the same for every number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.config import Schedule
from rlinf_embodied.embodied.demonstrations import Demonstrations
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import Features, ImitationPolicy
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import AdamSettings, ReplicatedLearner
from rlinf_embodied.learning.optimizer import scheduled
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import Shuffle, minibatches
from rlinf_embodied.randomness import normal

_PROPRIO_JITTER = 0.005
_ROWS = 64  # of a call that computes without a gradient


@dataclass(frozen=True, slots=True)
class Phase:
    """How a part of the policy is cloned, as Phase(7, 32, 1e-3)."""

    epochs: int
    batch_size: int  # chunks per minibatch, over all blocks
    lr: float
    schedule: Schedule = Schedule.one_cycle
    warmup: float = 0.1  # share of the steps that go up


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How well a policy imitates chunks that it does not learn from; see `Cloning.held_out`."""

    loss: float  # per chunk
    action_error: float  # mean |greedy action - demonstrated action|, of actions in [-1, 1]
    num_chunks: int


class Cloning:
    """The learning of one worker, which holds some of the blocks; all workers make the same calls in the same order."""

    def __init__(self, policy: ImitationPolicy, seed: int, reducer: Reducer, device: str) -> None:
        """Takes the policy, which it changes, and the device that it is on; data goes there in parts."""
        self._policy, self._seed, self._reducer, self._device = policy, seed, reducer, device
        self._features: dict[int, Features] = {}

    def take(self, blocks: Mapping[int, Demonstrations], sizes: Mapping[int, int]) -> None:
        """Takes the demonstrations of the worker's own blocks, and the number of chunks in all blocks."""
        self._blocks, self._sizes = blocks, sizes

    # ----------------------------------------------------------------------------------------------------- statistics
    def measure(self) -> None:
        """Sets the mean and standard deviation with which the policy standardises proprioception and privileged state.

        Privileged state is left out where a block's demonstrations do not show it.
        """
        self._set_statistics("proprio", {b: d.observation.proprio for b, d in self._blocks.items()})
        privileged = {b: d.observation.privileged for b, d in self._blocks.items()}
        if all(value is not None for value in privileged.values()):
            self._set_statistics("privileged", cast(dict[int, Tensor], privileged))

    def _set_statistics(self, name: str, columns: Mapping[int, Tensor]) -> None:
        """Global mean and standard deviation of a column [M, D], summed over blocks in fixed order."""
        count = float(sum(self._sizes.values()))
        mean = self._reducer.sum_blocks({b: v.double().sum(0) for b, v in columns.items()}) / count
        square = self._reducer.sum_blocks({b: (v.double() - mean).square().sum(0) for b, v in columns.items()}) / count
        self._policy.set_statistics(name, mean.float(), square.sqrt().float())

    # --------------------------------------------------------------------------------------------------------- phases
    def begin(self, whole: bool, phase: Phase, measure: bool = True) -> int:
        """Starts cloning the whole policy, or all but its stem on cached features; returns minibatches per epoch.

        `measure`: whether what the stem sees is to be standardised by what it sees now.
        """
        self._whole, self._phase = whole, phase
        if not whole:
            self._cache_features(measure)
        self._parts = max(1, sum(self._sizes.values()) // phase.batch_size)
        settings = AdamSettings(phase.lr, (0.9, 0.999), max_grad_norm=1.0, weight_decay=1e-2)
        self.learner = ReplicatedLearner(self._policy.imitation_parameters(whole), settings, ("loss",), self._reducer)
        return self._parts

    @torch.no_grad()
    def _cache_features(self, measure: bool) -> None:
        self._features = {b: self._encode(d.observation) for b, d in self._blocks.items()}
        if measure:
            vision = {block: self._policy.pooled(features) for block, features in self._features.items()}
            self._set_statistics("vision", vision)

    def _encode(self, observation: Observation) -> Features:
        parts = [self._policy.encode_frozen(part.to(self._device)) for part in _parts(observation)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def fit(self, first: int, last: int) -> float:
        """Runs the epochs [first, last) of the phase and returns the mean loss per chunk."""
        sizes = {block: len(data) for block, data in self._blocks.items()}
        phase, part = self._phase, "whole" if self._whole else "head"
        total, count, steps = 0.0, 0.0, phase.epochs * self._parts
        for epoch in range(first, last):
            shuffle = Shuffle(self._seed, f"clone/{part}", epoch)
            for k, rows in enumerate(minibatches(shuffle, sizes, self._parts)):
                step = epoch * self._parts + k
                self.learner.lr = scheduled(phase.schedule, step, steps, phase.lr, phase.warmup)
                made = self.learner.step(rows, partial(self._passes, epoch))
                total, count = total + made.sums["loss"], count + made.weight
        return total / count

    def _passes(self, epoch: int, block: int, index: Tensor) -> list[Pass]:
        return [Pass(float(len(index)), partial(self._loss, epoch, block, index))]

    def _loss(self, epoch: int, block: int, index: Tensor) -> LossSums:
        data = self._blocks[block]
        positions = data.object_positions
        targets = {} if positions is None else {"object_position": positions[index].to(self._device)}
        shape = tuple(data.observation.proprio.shape[1:])
        drawn = normal(self._seed, "jitter", epoch, block, index.numpy(), shape=shape)
        jitter = torch.from_numpy(drawn).to(self._device) * _PROPRIO_JITTER
        if self._whole:
            observation = data.observation.rows(index.tolist()).to(self._device)
            features = self._policy.encode_trainable(observation.with_proprio(observation.proprio + jitter))
        else:
            features = {name: value[index] for name, value in self._features[block].items()}
            features |= {"proprio": features["proprio"] + jitter} if "proprio" in features else {}
        actions = data.actions[index].to(self._device)
        helped = (targets if self._whole else {}) | self._noise("flow", epoch, block, index.numpy())
        value = self._policy.imitation_loss(features, actions, helped)
        return LossSums(value, value.new_tensor(float(len(index))), value.detach().reshape(1))

    def _noise(self, purpose: str, *ids: int | Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        noise = self._policy.imitation_noise
        return {} if noise is None else {"noise": noise.draw(self._seed, purpose, *ids).to(self._device)}

    # ------------------------------------------------------------------------------------------------------- held out
    @torch.no_grad()
    def held_out(self, data: Mapping[int, Demonstrations | None]) -> HeldOut | None:
        """Returns how well the policy imitates other chunks, without jitter and helper targets; None without any.

        Args:
            data: of every block of this worker; None where it has none.
        """
        sums = self._reducer.sum_blocks({block: self._imitated(part) for block, part in data.items()})
        loss, error, entries, chunks = sums.tolist()
        return HeldOut(loss / chunks, error / entries, round(chunks)) if chunks else None

    def _imitated(self, data: Demonstrations | None) -> Tensor:
        """Sums over a block, float64 [4]: losses, absolute errors of actions, entries of actions, chunks."""
        sums = torch.zeros(4, dtype=torch.float64)
        if data is None:
            return sums
        for observation, shown in zip(_parts(data.observation), data.actions.split(_ROWS), strict=True):
            features, actions = self._policy.encode_frozen(observation.to(self._device)), shown.to(self._device)
            loss = self._policy.imitation_loss(features, actions, self._noise("held out", range(len(actions))))
            off = (self._policy.act(features, None, 1.0).actions - actions).abs()
            sums += torch.tensor([float(loss), float(off.double().sum()), off.numel(), len(actions)])
        return sums


def _parts(observation: Observation) -> Iterator[Observation]:
    """Yields the rows in calls of a bearable size."""
    for k in range(0, len(observation), _ROWS):
        yield observation.rows(range(k, min(k + _ROWS, len(observation))))
