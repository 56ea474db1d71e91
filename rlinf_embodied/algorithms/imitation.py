"""Behaviour cloning: the policy learns what was done, or what the expert would have done.

    Imitation      from batches of transitions: recorded ones (bc), or what the policy meets itself (DAgger)
    FineTuning     from demonstrations (sft, the warm start): epochs of the whole policy, then of all but its stem,
                   whose features are computed once

A minibatch of demonstrations is one slice of every block, as in RL, so that the weights are the same under every plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms import transitions
from rlinf_embodied.algorithms.algorithm import Algorithm, Training, adam
from rlinf_embodied.algorithms.transitions import Columns, ReplayConfig
from rlinf_embodied.config import AlgorithmConfig, Reduction, Source, TrainConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.config.learning import FineTuningPhases
from rlinf_embodied.config.machine import require_no_cores
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import Features, ImitationPolicy
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.optimizer import one_cycle
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import Fitted, minibatches
from rlinf_embodied.randomness import normal
from rlinf_embodied.runtime.host import StepContext

_OPTIMIZER, _WHOLE, _HEAD = "policy_optimizer", "whole_optimizer", "head_optimizer"  # in a checkpoint
_NOISE = "noise"  # what a flow policy's loss draws
_ROWS = 64  # of a call that computes without a gradient


@dataclass(slots=True)
class Demonstrations:
    """M chunks of one data block."""

    observation: Observation  # M rows
    actions: Tensor  # float32 [M, C, A]
    object_positions: Tensor | None  # float32 [M, 3]

    def __len__(self) -> int:
        return len(self.actions)


def join(parts: Sequence[Demonstrations]) -> Demonstrations:
    """Returns the chunks of several demonstrations, in order."""
    positions = [part.object_positions for part in parts]
    return Demonstrations(
        Observation.concatenate([part.observation for part in parts]),
        torch.cat([part.actions for part in parts]),
        None if positions[0] is None else torch.cat(cast(list[Tensor], positions)),
    )


def sizes(reducer: Reducer, data: Mapping[int, Demonstrations | Tensor | Sequence]) -> dict[int, int]:
    """Returns the number of chunks in every block of all workers."""
    own = {block: torch.tensor([float(len(part))]) for block, part in data.items()}
    return {block: int(size[0]) for block, size in reducer.gather_blocks(own).items()}


def require_imitation(training: Training) -> None:
    """Checks that the policy has an imitation loss."""
    usable = isinstance(training.policy, ImitationPolicy)
    target, action = training.settings._target_, "use policy=soft_actor or policy=tiny_vla"
    require(usable, "policy._target_", target, "it has no imitation_loss", action)


def drawn_noise(training: Training, purpose: str, *ids: int | Sequence[int] | np.ndarray) -> dict[str, Tensor]:
    """Returns what a flow policy's imitation loss draws, keyed; {} of other policies."""
    noise = cast(ImitationPolicy, training.policy).imitation_noise
    return {} if noise is None else {_NOISE: noise.draw(training.seed, purpose, *ids).to(training.context.device)}


class _Imitating(Algorithm):
    """An algorithm that minimises the policy's imitation loss."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        require_imitation(training)
        self._policy, self._device = cast(ImitationPolicy, training.policy), training.context.device
        self._noise = partial(drawn_noise, training)

    def _loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> LossSums:
        value = self._policy.imitation_loss(features, actions, targets)
        return LossSums(value, value.new_tensor(float(len(actions))), value.detach().reshape(1))


@dataclass(kw_only=True, slots=True)
class BehaviourCloningConfig(ReplayConfig):
    """The policy learns to do what was done in recorded transitions."""

    name = "bc"
    acts = False
    columns = ("state", "action")
    policy_method = "imitation_loss"
    sees_images = True

    def make(self, training: Training) -> Imitation:
        return Imitation(training)


@dataclass(kw_only=True, slots=True)
class DaggerConfig(BehaviourCloningConfig):
    """DAgger (arXiv:1011.0686): the policy acts and learns what the scripted expert would have done there."""

    name = "dagger"
    acts = True
    columns = ("state", "expert_action")

    def check(self, config: TrainConfig) -> None:
        rule = "DAgger learns from what it gathers"
        require(not config.files, "data", config.data, rule, "leave it out")
        rule = "DAgger begins with what the expert does"
        require(self.expert_steps > 0, "algorithm.expert_steps", self.expert_steps, rule, "use 2000")
        ReplayConfig.check(self, config)


class Imitation(_Imitating):
    """One optimizer of the whole policy; policies that see learn from images, too."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        settings, compile = adam(self.algorithm, self.algorithm.lr), self.algorithm.compile
        parameters = self._policy.imitation_parameters(whole=True)
        self.learners[_OPTIMIZER] = Learner(parameters, settings, ("loss",), training.reducer, compile=compile)

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        fitted = Fitted()
        for k, batch in enumerate(transitions.each_update(data)):
            rows = {b: range(transitions.length(part)) for b, part in batch.items()}
            keys = ("imitation", step_context.iteration, k)
            noisy = {b: part | self._noise(*keys, b, rows[b]) for b, part in batch.items()}
            fitted.add(transitions.step_on(self.learners[_OPTIMIZER], noisy, self._sums))
        return {"losses/imitation_loss": fitted.loss}

    def _sums(self, columns: Columns) -> LossSums:
        expert = transitions.EXPERT_ACTION
        actions = columns[expert if expert in columns else transitions.ACTION]
        targets = {_NOISE: columns[_NOISE]} if _NOISE in columns else {}
        features = self._policy.encode_trainable(transitions.observation_of(columns))
        return self._loss(features, actions[:, None], targets)


@dataclass(kw_only=True, slots=True)
class SFTConfig(FineTuningPhases, AlgorithmConfig):
    """Supervised fine-tuning on demonstrations: those of `data`, or those of a warm start.

    An iteration is an epoch.
    """

    name = "sft"
    learns_from = Source.demonstrations
    acts = False
    policy_method = "imitation_loss"

    warmup: float = 0.1  # share of a phase's steps in which the learning rate rises
    held_out: float = 0.1  # share of the episodes that nothing is learned from; their loss is reported
    reduction: Reduction = Reduction.exact  # on accelerators as well: a cached policy is the same for all of them

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        self.require_phases("algorithm")
        require_numbers(self, "algorithm", "warmup", high=1)
        require_numbers(self, "algorithm", "held_out", high=0.5)
        require(not self.compile, "algorithm.compile", True, "passes of fine-tuning are not compiled", "use false")

    @property
    def num_epochs(self) -> int:
        """Epochs of both phases."""
        return self.epochs + self.head_epochs

    def check(self, config: TrainConfig) -> None:
        require_no_cores(config.cluster)
        target, rule = config.run.until_success, "fine-tuning continues for its epochs"
        require(target is None, "run.until_success", target, rule, "leave it out")
        number, epochs = config.run.num_iterations, self.num_epochs
        rule = f"an iteration is an epoch, and algorithm.epochs + algorithm.head_epochs = {epochs}"
        require(number == epochs, "run.num_iterations", number, rule, "leave it out, and set algorithm.epochs")

    def make(self, training: Training) -> FineTuning:
        return FineTuning(training)


class FineTuning(_Imitating):
    """An iteration is an epoch; each of the two phases has an optimizer.

    `fresh`: whether the policy is new, so that its inputs are standardised by the demonstrations.
    """

    algorithm: SFTConfig
    fresh = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        algorithm = self.algorithm
        self._features: dict[int, Features] = {}
        given = algorithm.proprio_jitter
        self._jitter = self._policy.proprio_jitter if given is None else given
        phases = ((_WHOLE, algorithm.epochs, algorithm.lr), (_HEAD, algorithm.head_epochs, algorithm.head_lr))
        for name, epochs, lr in phases:
            if epochs:
                parameters, settings = (
                    self._policy.imitation_parameters(name == _WHOLE),
                    adam(algorithm, lr, algorithm.max_grad_norm),
                )
                self.learners[name] = Learner(parameters, settings, ("loss",), training.reducer)

    def measure(self, data: Mapping[int, Demonstrations]) -> None:
        """Sets the mean and standard deviation with which the policy standardises proprioception and privileged state.

        Privileged state is left out where a block's demonstrations do not show it.
        """
        self._set_statistics("proprio", {b: d.observation.proprio for b, d in data.items()})
        privileged = {b: d.observation.privileged for b, d in data.items()}
        if all(value is not None for value in privileged.values()):
            self._set_statistics("privileged", cast(dict[int, Tensor], privileged))

    def _set_statistics(self, name: str, columns: Mapping[int, Tensor]) -> None:
        """Takes the mean and standard deviation of a column [M, D], summed over blocks in fixed order."""
        sum_blocks, count = self.training.reducer.sum_blocks, float(sum(sizes(self.training.reducer, columns).values()))
        mean = sum_blocks({b: v.double().sum(0) for b, v in columns.items()}) / count
        square = sum_blocks({b: (v.double() - mean).square().sum(0) for b, v in columns.items()}) / count
        self._policy.set_statistics(name, mean.float(), square.sqrt().float())

    def update(self, step_context: StepContext, data: Mapping[int, Demonstrations]) -> dict[str, float]:
        """Makes one epoch over the demonstrations of this worker's blocks."""
        algorithm, epoch = self.algorithm, step_context.iteration
        whole = epoch < algorithm.epochs
        if whole:
            self._features = {}
            name, epochs, size, peak = _WHOLE, algorithm.epochs, algorithm.batch_size, algorithm.lr
        else:
            epoch -= algorithm.epochs
            name, epochs, size, peak = _HEAD, algorithm.head_epochs, algorithm.head_batch_size, algorithm.head_lr
            if not self._features:
                self._cache_features(data, measure=epoch == 0 and self.fresh)  # later on pooling has learned its scale
        number = max(1, sum(sizes(self.training.reducer, data).values()) // size)
        shuffle = (self.training.seed, "clone/whole" if whole else "clone/head", epoch)
        fitted, learner = Fitted(), self.learners[name]
        sums = partial(self._sums, whole, epoch)
        passes = lambda b, index: [Pass(float(len(index)), partial(sums, data[b], b, index))]  # noqa: E731
        for k, rows in enumerate(minibatches(shuffle, {block: len(part) for block, part in data.items()}, number)):
            learner.lr = one_cycle(epoch * number + k, epochs * number, peak, algorithm.warmup)
            fitted.add(learner.step(rows, passes))
        rate = {"losses/updates": float(number), "charts/learning_rate": learner.lr}
        return {"losses/imitation_loss": fitted.loss} | rate

    @torch.no_grad()
    def _cache_features(self, data: Mapping[int, Demonstrations], measure: bool) -> None:
        for block, shown in data.items():
            parts = [self._policy.encode_frozen(part.to(self._device)) for part in _parts(shown.observation)]
            self._features[block] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if measure:
            self._set_statistics("vision", {b: self._policy.pooled(features) for b, features in self._features.items()})

    def _sums(self, whole: bool, epoch: int, data: Demonstrations, block: int, index: Tensor) -> LossSums:
        targets = self._noise("flow", epoch, block, index.numpy())
        shape, positions = tuple(data.observation.proprio.shape[1:]), data.object_positions
        drawn = normal(self.training.seed, "jitter", epoch, block, index.numpy(), shape=shape)
        jitter = torch.from_numpy(drawn).to(self._device) * self._jitter
        if whole:
            observation = data.observation.rows(index.tolist()).to(self._device)
            features = self._policy.encode_trainable(observation.with_proprio(observation.proprio + jitter))
            if positions is not None:
                targets["object_position"] = positions[index].to(self._device)
        else:
            features = {name: value[index] for name, value in self._features[block].items()}
            if "proprio" in features:
                features["proprio"] = features["proprio"] + jitter
        return self._loss(features, data.actions[index].to(self._device), targets)

    @torch.no_grad()
    def held_out(self, data: Mapping[int, Demonstrations | None]) -> dict[str, float]:
        """Returns how well the policy imitates other chunks, without jitter and helper targets; {} without any.

        The loss is per chunk, the action error mean |greedy action - demonstrated action|, in [-1, 1].  A block without
        such chunks has None.
        """
        sums = {}
        for block, part in data.items():
            sums[block] = torch.zeros(4, dtype=torch.float64)  # losses, errors and entries of actions, chunks
            shown = () if part is None else zip(_parts(part.observation), part.actions.split(_ROWS), strict=True)
            for observation, taken in shown:
                features, actions = self._policy.encode_frozen(observation.to(self._device)), taken.to(self._device)
                loss = self._policy.imitation_loss(features, actions, self._noise("held out", range(len(actions))))
                off = (self._policy.act(features, None, 1.0).actions - actions).abs()
                sums[block] += torch.tensor([float(loss), float(off.double().sum()), off.numel(), len(actions)])
        loss, error, entries, chunks = self.training.reducer.sum_blocks(sums).tolist()
        if not chunks:
            return {}
        return {"losses/held_out_loss": loss / chunks, "losses/held_out_action_error": error / entries}


def _parts(observation: Observation) -> Iterator[Observation]:
    """Yields the rows in calls of a bearable size."""
    for k in range(0, len(observation), _ROWS):
        yield observation.rows(range(k, min(k + _ROWS, len(observation))))
