"""Imitation: behaviour cloning of recorded actions, DAgger, and fine-tuning on demonstrations.

    Imitation      on batches of transitions: recorded ones (bc), or the policy's own with expert actions (DAgger)
    FineTuning     on demonstrations (sft, the warm start): epochs of the whole policy, then of all but its stem,
                   whose features are computed once

A minibatch of demonstrations is one slice of every block, as in RL, so that the weights are the same under every plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms import transitions
from rlinf_embodied.algorithms.algorithm import Algorithm, Training, adam
from rlinf_embodied.algorithms.demonstrations import Chunks, Demonstrations, announced
from rlinf_embodied.algorithms.transitions import Columns, ReplayConfig
from rlinf_embodied.config import AlgorithmConfig, Sharding, Source, TrainConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.config.learning import FineTuningPhases
from rlinf_embodied.config.machine import require_no_cores
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import ACTION_IS_PAD, Features, ImitationPolicy
from rlinf_embodied.learning.gradients import LossSums, Pass, loss_sums, microbatches
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.optimizer import one_cycle
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import Fitted, Shuffle, cut, minibatches
from rlinf_embodied.randomness import normal, permutation
from rlinf_embodied.runtime.host import StepContext

_OPTIMIZER, _WHOLE, _HEAD = "policy_optimizer", "whole_optimizer", "head_optimizer"  # in a checkpoint
_NOISE = "noise"  # noise of a flow policy's loss
_Loss = Callable[[ImitationPolicy], Tensor]


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) if len(parts) > 1 else parts[0][name] for name in parts[0]}


def sizes(reducer: Reducer, data: Mapping[int, Chunks | Tensor | Sequence]) -> dict[int, int]:
    """Returns the number of chunks in every block of all workers."""
    lengths = {block: torch.tensor([float(len(part))]) for block, part in data.items()}
    return {block: int(size[0]) for block, size in reducer.gather_blocks(lengths).items()}


def require_imitation(training: Training) -> None:
    """Checks that the policy has an imitation loss."""
    usable = isinstance(training.policy, ImitationPolicy)
    target, action = training.settings._target_, "use policy=soft_actor or policy=tiny_vla"
    require(usable, "policy._target_", target, "it has no imitation_loss", action)


def drawn_noise(training: Training, purpose: str, *ids: int | Sequence[int] | np.ndarray) -> dict[str, Tensor]:
    """Returns the keyed noise of a flow policy's imitation loss; {} for other policies."""
    noise = cast(ImitationPolicy, training.policy).imitation_noise
    return {} if noise is None else {_NOISE: noise.draw(training.seed, purpose, *ids).to(training.context.device)}


class _Imitating(Algorithm):
    """An algorithm that minimises the policy's imitation loss."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        require_imitation(training)
        self._policy, self._device = cast(ImitationPolicy, training.policy), training.context.device
        self._noise = partial(drawn_noise, training)


@dataclass(kw_only=True, slots=True)
class BehaviourCloningConfig(ReplayConfig):
    """Behaviour cloning of recorded transitions."""

    name = "bc"
    acts = False
    columns = ("state", "action")
    policy_method = "imitation_loss"
    sees_images = True

    def make(self, training: Training) -> Imitation:
        return Imitation(training)


@dataclass(kw_only=True, slots=True)
class DaggerConfig(BehaviourCloningConfig):
    """DAgger (arXiv:1011.0686): the policy acts, and imitates the scripted expert's actions in the same states."""

    name = "dagger"
    acts = True
    columns = ("state", "expert_action")

    def check(self, config: TrainConfig) -> None:
        rule = f"{self.name} learns from what it gathers"
        require(not config.files, "data", config.data, rule, "leave it out")
        rule = "DAgger begins with steps of the expert"
        require(self.expert_steps > 0, "algorithm.expert_steps", self.expert_steps, rule, "use 2000")
        ReplayConfig.check(self, config)


@dataclass(kw_only=True, slots=True)
class HgDaggerConfig(DaggerConfig):
    """HG-DAgger (arXiv:1810.02890): a human takes over while the policy errs, and the policy imitates these actions.

    The human is simulated: the scripted expert acts in each step in which the policy's action is too far from its own.
    """

    name = "hg_dagger"
    columns = ("state", "action", "is_intervention")

    tolerance: float = 0.5  # largest distance of an entry of the policy's action from the human's, of [-1, 1]

    def __post_init__(self) -> None:
        DaggerConfig.__post_init__(self)
        require_numbers(self, "algorithm", "tolerance")


class Imitation(_Imitating):
    """Trains the whole policy with one optimizer; vision policies are trained on images."""

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
        features = self._policy.encode_trainable(self._observation(columns))
        return loss_sums(self._policy.imitation_loss(features, actions[:, None], targets), len(actions))

    def _observation(self, columns: Columns) -> Observation:
        """Returns the observations of transitions."""
        return transitions.observation_of(columns).prompted(self.training.settings.prompt_suffix)


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
    held_out: float = 0.1  # share of the episodes that are not trained on; their loss is reported
    rows_per_microbatch: int | None = None  # chunks of a pass; None: of a block, on accelerators of a minibatch
    sharding: Sharding = Sharding.none  # of the policy while it trains

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        self.require_phases("algorithm")
        require_numbers(self, "algorithm", "warmup", high=1)
        require_numbers(self, "algorithm", "held_out", high=0.5)
        require(not self.compile, "algorithm.compile", True, "passes of fine-tuning are not compiled", "use false")
        require_numbers(self, "algorithm", "rows_per_microbatch", low=1)
        rule = "a sharded policy is trained as a whole, not its head on cached features"
        whole = self.sharding is Sharding.none or not self.head_epochs
        require(whole, "algorithm.head_epochs", self.head_epochs, rule, "use 0, or algorithm.sharding=none")

    @property
    def num_epochs(self) -> int:
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

    `fresh`: whether the policy is new, so that the demonstrations determine the statistics of its inputs.
    `weights`: proportions in which an epoch draws the chunks of the sources; (): every chunk once.
    `max_feature_bytes`: size up to which a worker caches frozen features; larger ones are computed in every epoch.
    """

    algorithm: SFTConfig
    fresh = True
    max_feature_bytes = math.inf
    weights: Sequence[float] = ()

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        algorithm = self.algorithm
        self._features: dict[int, Features] = {}
        jitter, self._suffix = algorithm.proprio_jitter, training.settings.prompt_suffix
        self._jitter = self._policy.proprio_jitter if jitter is None else jitter
        self._copies = [self._policy]
        self._scored: Callable[[_Loss], Tensor] = lambda loss: loss(self._policy)
        if algorithm.sharding is not Sharding.none:
            settings = adam(algorithm, algorithm.lr, algorithm.max_grad_norm)
            parameters = lambda policy: policy.imitation_parameters(whole=True)  # noqa: E731
            self._scored, self.learners[_WHOLE] = behind, _ = self.sharded(parameters, settings, ("loss",))
            self._copies.append(behind.policy)
            return
        phases = ((_WHOLE, algorithm.epochs, algorithm.lr), (_HEAD, algorithm.head_epochs, algorithm.head_lr))
        for name, epochs, lr in phases:
            if epochs:
                parameters, settings = (
                    self._policy.imitation_parameters(name == _WHOLE),
                    adam(algorithm, lr, algorithm.max_grad_norm),
                )
                self.learners[name] = Learner(parameters, settings, ("loss",), training.reducer)

    def zero_loss(self) -> Tensor:
        return self._sums(True, 0, self._data, {next(iter(self._data)): torch.tensor([0])}).loss * 0.0

    def measure(self, data: Mapping[int, Chunks]) -> None:
        """Sets the policy's mean and standard deviation of proprioception and privileged state from demonstrations.

        Privileged state is skipped unless all blocks' demonstrations have it.
        """
        self._set_statistics("proprio", {b: d.proprio for b, d in data.items()})
        privileged = {b: d.privileged for b, d in data.items()}
        if all(value is not None for value in privileged.values()):
            self._set_statistics("privileged", cast(dict[int, Tensor], privileged))

    def _set_statistics(self, name: str, columns: Mapping[int, Tensor]) -> None:
        """Sets the mean and standard deviation of a column [M, D], summed over blocks in a fixed order."""
        sum_blocks, count = self.training.reducer.sum_blocks, float(sum(sizes(self.training.reducer, columns).values()))
        mean = sum_blocks({b: v.double().sum(0) for b, v in columns.items()}) / count
        square = sum_blocks({b: (v.double() - mean).square().sum(0) for b, v in columns.items()}) / count
        for policy in self._copies:
            policy.set_statistics(name, mean.float(), square.sqrt().float())

    def update(self, step_context: StepContext, data: Mapping[int, Chunks]) -> dict[str, float]:
        """Trains one epoch on the demonstrations of this worker's blocks."""
        algorithm, epoch = self.algorithm, step_context.iteration
        whole = epoch < algorithm.epochs
        if whole:
            self._features = {}
            name, epochs, size, peak = _WHOLE, algorithm.epochs, algorithm.batch_size, algorithm.lr
        else:
            epoch -= algorithm.epochs
            name, epochs, size, peak = _HEAD, algorithm.head_epochs, algorithm.head_batch_size, algorithm.head_lr
            if not self._features:
                self._cache_features(data)
                if epoch == 0 and self.fresh:  # later, pooling has adapted to its scale
                    self._set_statistics("vision", self._pooled(data))
        number = max(1, sum(sizes(self.training.reducer, data).values()) // size)
        shuffle = (self.training.seed, "clone/whole" if whole else "clone/head", epoch)
        fitted, learner = Fitted(), self.learners[name]
        sums = partial(self._sums, whole, epoch)
        self._data, most = data, algorithm.rows_per_microbatch
        passes = lambda rows: [  # noqa: E731
            Pass(float(sum(map(len, part.values()))), partial(sums, data, part)) for part in microbatches(rows, most)
        ]
        if self.weights:
            pieces = {block: cut(order, number) for block, order in self._mixture(shuffle, data).items()}
            batches = ({block: piece[k] for block, piece in pieces.items()} for k in range(number))
        else:
            batches = minibatches(shuffle, {block: len(part) for block, part in data.items()}, number)
        for k, rows in enumerate(batches if self._features else announced(batches, data)):
            learner.lr = one_cycle(epoch * number + k, epochs * number, peak, algorithm.warmup)
            fitted.add(learner.step(rows, passes))
        learner.publish()
        rate = {"losses/updates": float(number), "charts/learning_rate": learner.lr}
        return {"losses/imitation_loss": fitted.loss} | rate

    def _mixture(self, shuffle: Shuffle, data: Mapping[int, Chunks]) -> dict[int, np.ndarray]:
        """Returns the order of an epoch's chunks, by block: as many as the data has, with sources drawn by weight.

        A block's share of a source is proportional to its number of the source's chunks, which it draws in successive
        random permutations.
        """
        seed, purpose, epoch = shuffle
        sources, weights = range(len(self.weights)), np.asarray(self.weights)
        own = {b: torch.tensor([float(part.lengths.get(s, 0)) for s in sources]) for b, part in data.items()}
        totals = np.sum([counts.numpy() for counts in self.training.reducer.gather_blocks(own).values()], 0)
        shares = np.where(totals > 0, weights, 0.0)
        number_of = totals.sum() * shares / shares.sum() / np.maximum(totals, 1.0)  # draws per chunk of a source
        orders = {}
        for block, part in data.items():
            drawn, first = [], 0
            for source, size in part.lengths.items():
                number = round(number_of[source] * size)
                key = (seed, f"{purpose}/mixture", epoch, block, source)
                rounds = [permutation(*key, k, size=size) for k in range(-(-number // size))]
                drawn.append(first + np.concatenate([*rounds, np.zeros(0, np.int64)])[:number])
                first += size
            order = np.concatenate(drawn).astype(np.int64)
            orders[block] = order[permutation(seed, purpose, epoch, block, size=len(order))]
        return orders

    @torch.no_grad()
    def _cache_features(self, data: Mapping[int, Chunks]) -> None:
        """Caches the frozen part's features of all chunks, unless they exceed `max_feature_bytes`."""
        if self.algorithm.augment:  # images differ in every epoch
            return
        sample = next(iter(data.values()))
        size = sum(value[0].nbytes for value in self._encoded(sample.rows([0]).observation).values())
        if size * sum(map(len, data.values())) > self.max_feature_bytes:
            return
        for block, chunks in data.items():
            parts = [self._encoded(part.observation) for part in chunks.in_parts()]
            self._features[block] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _encoded(self, observation: Observation) -> Features:
        return self._policy.encode_frozen(observation.prompted(self._suffix).to(self._device))

    @torch.no_grad()
    def _pooled(self, data: Mapping[int, Chunks]) -> dict[int, Tensor]:
        """Returns the pooled vision features, [M, D] of each block."""
        if self._features:
            return {b: self._policy.pooled(features) for b, features in self._features.items()}
        pooled = lambda part: self._policy.pooled(self._encoded(part.observation))  # noqa: E731
        return {b: torch.cat([pooled(part) for part in chunks.in_parts()]) for b, chunks in data.items()}

    def _sums(self, whole: bool, epoch: int, data: Mapping[int, Chunks], rows: Mapping[int, Tensor]) -> LossSums:
        cached = None if whole or not self._features else {b: self._features[b] for b in rows}
        parts, noises, jitters = [], [], []
        for block, index in rows.items():
            part, keys = data[block].rows(index, images=cached is None), (epoch, block, index.numpy())
            parts.append(replace(part, observation=self._augmented(part.observation, whole, *keys)))
            noises.append(self._noise("flow", *keys))
            drawn = normal(self.training.seed, "jitter", *keys, shape=tuple(part.proprio.shape[1:]))
            jitters.append(torch.from_numpy(drawn).to(self._device) * self._jitter)
        part, jitter, targets = Demonstrations.concatenate(parts), torch.cat(jitters), _joined(noises)
        targets |= part.targets(self._device, helpers=whole)
        observation, actions = part.observation.prompted(self._suffix).to(self._device), part.actions.to(self._device)

        def loss(policy: ImitationPolicy) -> Tensor:
            if whole:
                features = policy.encode_trainable(observation)
                if self._jitter and "proprio" not in features:
                    features = policy.encode_trainable(observation.with_proprio(observation.proprio + jitter))
            elif cached is not None:
                features = _joined(
                    [{name: value[rows[b]] for name, value in part.items()} for b, part in cached.items()]
                )
            else:
                features = policy.encode_frozen(observation)
            if "proprio" in features:
                features["proprio"] = features["proprio"] + jitter
            return policy.imitation_loss(features, actions, targets)

        return loss_sums(self._scored(loss), len(actions))

    def _augmented(self, observation: Observation, whole: bool, *ids: int | np.ndarray) -> Observation:
        names, number = self.algorithm.augment, self.algorithm.max_augmentations
        if not names or not observation.images:
            return observation
        from rlinf_embodied.data.augmentation import augmented  # torchvision is slow to import, and few runs need it

        augment = lambda name, images: augmented(images, names, number, self.training.seed, name, whole, *ids)  # noqa: E731
        return replace(observation, images={name: augment(name, images) for name, images in observation.images.items()})

    @torch.no_grad()
    def held_out(self, data: Mapping[int, Chunks | None]) -> dict[str, float]:
        """Returns the loss and action error on held-out chunks, without jitter and helper targets; {} without chunks.

        The loss is per chunk; the action error is the mean |greedy action - demonstrated action|, in units of [-1, 1].
        A block without held-out chunks has None.
        """
        sums = {}
        for block, held in data.items():
            sums[block] = torch.zeros(4, dtype=torch.float64)  # losses, errors and entries of actions, chunks
            for part in () if held is None else held.in_parts():
                features, actions = self._encoded(part.observation), part.actions.to(self._device)
                targets = self._noise("held out", range(len(actions))) | part.targets(self._device)
                loss = self._policy.imitation_loss(features, actions, targets)
                off = (self._policy.act(features, None, 1.0).actions - actions).abs()
                off = off if part.is_pad is None else off[~targets[ACTION_IS_PAD]]
                sums[block] += torch.tensor([float(loss), float(off.double().sum()), off.numel(), len(actions)])
        loss, error, entries, chunks = self.training.reducer.sum_blocks(sums).tolist()
        if not chunks:
            return {}
        return {"losses/held_out_loss": loss / chunks, "losses/held_out_action_error": error / entries}
