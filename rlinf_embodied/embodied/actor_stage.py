"""The learner as a stage: advantages, critic epochs, policy epochs, and all the state that training has.

columns of every block -> advantages -> global mean and deviation -> critic epochs -> policy epochs -> new version
                                                                                        |
                                    before the first step the importance ratio must be 1 per token, or it stops
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.log_probs import mask_at_level, to_level, weights_at_level
from rlinf_embodied.algorithms.losses import (
    explained_variance,
    explained_variance_sums,
    masked_sum,
    policy_loss,
    require_unit_ratio,
    value_loss,
)
from rlinf_embodied.config import AlgorithmConfig, AlgorithmName, EnvConfig, Level, Sharding
from rlinf_embodied.config.checks import require
from rlinf_embodied.device import is_accelerator
from rlinf_embodied.embodied.advantages import grpo_block, normalize_blocks, ppo_block
from rlinf_embodied.embodied.batch import EnvColumns, PolicyColumns, TrainingBlock
from rlinf_embodied.embodied.carry_over import flatten_carry_over, unflatten_carry_over
from rlinf_embodied.embodied.learners import POLICY, VALUE, VALUE_LOSS, Learners, Scored
from rlinf_embodied.embodied.policy_folder import load_policy, save_policy
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig
from rlinf_embodied.errors import ConfigError, ObjectiveError
from rlinf_embodied.interfaces.envs import RunningEpisode
from rlinf_embodied.interfaces.policies import Evaluation, Features, HasRunningStatistics, Policy, Record
from rlinf_embodied.learning.checkpoint import load_tensors, save, weights_sha256
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.optimizer import linear_decay
from rlinf_embodied.learning.reduce import make_reducer
from rlinf_embodied.learning.shared_policy import SharedPolicy
from rlinf_embodied.learning.update import (
    Fitted,
    Shuffle,
    exceeds_kl,
    fit,
    minibatches,
    policy_metrics,
    value_metrics,
)
from rlinf_embodied.learning.weights import WeightsMessage, export_weights
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device

_RATIO_TOLERANCE = 1e-5  # of |log ratio| at unchanged weights, on a CPU


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """What the stage needs to know."""

    model: PolicyStageConfig
    algorithm: AlgorithmConfig
    env: EnvConfig
    num_iterations: int
    exact: bool


@dataclass(frozen=True, slots=True)
class ActorReport:
    """What the driver learns of an update."""

    metrics: dict[str, float]
    version: int


class ActorStage:
    """Updates the policy by PPO or GRPO; data-parallel over the workers that host it."""

    def __init__(self, config: ActorConfig) -> None:
        """Takes plain data; `setup` loads the policy."""
        self._config = config
        self._algorithm = config.algorithm
        self._any_row: tuple[Features, Record] | None = None  # of a sharded update

    def setup(self, context: StageContext) -> None:
        """Loads the policy (or takes its worker's copy) and makes the learners.

        Raises:
            ObjectiveError: the policy has nothing to train.
            ConfigError: PPO has no critic to train.
        """
        model, algorithm = self._config.model, self._algorithm
        shared = context.share("policy", lambda: load_policy(model.policy, model.folder, context.device))
        self._shared = cast(SharedPolicy[Policy], shared)
        self._shared.enter("actor")
        self._policy = self._shared.policy
        self._rank, self._device = context.group.rank, context.device
        self._reducer = make_reducer(algorithm.reduction, context.group, context.owners, context.device)
        whole, rule = algorithm.sharding is Sharding.none, "the policy's running statistics would miss the sliced copy"
        keeps = isinstance(self._policy, HasRunningStatistics)
        require(whole or not keeps, "algorithm.sharding", algorithm.sharding.value, rule, "use none")
        if whole:
            learners = Learners.replicated(self._policy, algorithm, self._reducer)
        else:
            copy = lambda: load_policy(model.policy, model.folder, "cpu").policy  # noqa: E731
            settings = (algorithm, self._reducer, context, self._config.exact)
            learners = Learners.sharded(self._policy, copy, self._zero_loss, *settings)
        self._learners, self._joint, self._score = learners.by_name, learners.joint, learners.evaluate

    def _zero_loss(self, scored: Scored) -> Tensor:
        """Returns 0 from a forward pass over a row of this rollout."""
        assert self._any_row is not None, "a pass is made within an update"
        features, record = self._any_row
        temperature = self._config.model.policy.temperature
        return scored(features, record, temperature, False).log_probs.sum() * 0.0

    # -------------------------------------------------------------------------------------------------------- update
    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes one iteration's update from (policy columns of all rounds, env columns of all rounds) per block.

        Raises:
            ObjectiveError: the ratio is not 1 at the start, or samples come from another version of the weights.
        """
        rollouts = {
            block: _pair([to_device(payload, self._device) for payload in payloads])
            for block, payloads in inputs.items()
        }
        self._require_version(rollouts)
        if self._algorithm.sharding is not Sharding.none:
            self._any_row = _first_row(next(iter(rollouts.values()))[0][0])
        metrics: dict[str, float] = {}
        if self._algorithm.name is AlgorithmName.ppo:
            critic = self._config.model.policy.critic
            raw = {block: ppo_block(self._policy, parts, self._algorithm, critic) for block, parts in rollouts.items()}
            blocks = normalize_blocks(raw, self._reducer)
            if VALUE in self._learners:
                metrics |= self._fit_value(step_context, blocks)
        else:
            kept = set(cast("tuple[tuple[int, int], ...]", step_context.message))
            blocks = {b: grpo_block(parts, self._algorithm, b, kept) for b, parts in rollouts.items()}
            metrics["rollout/useful_groups"] = float(len(kept))
        metrics |= self._fit_policy(step_context, blocks)
        for learner in self._learners.values():
            learner.publish()
        self._update_statistics(blocks)
        self._any_row = None
        self._shared.version = step_context.iteration + 1
        return Output(dict.fromkeys(inputs), ActorReport(metrics, self._shared.version))

    def _update_statistics(self, blocks: Mapping[int, TrainingBlock]) -> None:
        """Lets the policy's running statistics take in what this iteration's samples show."""
        policy = self._policy
        if isinstance(policy, HasRunningStatistics):
            with torch.no_grad():
                sums = {b: policy.statistics_sums(t.features, _valid_returns(t)) for b, t in blocks.items()}
            policy.update_statistics(self._reducer.sum_blocks(sums))

    def _require_version(self, rollouts: Mapping[int, list[tuple[PolicyColumns, EnvColumns]]]) -> None:
        versions = {columns.version for parts in rollouts.values() for columns, _ in parts}
        if versions != {self._shared.version}:
            raise ObjectiveError(
                f"samples come from weights of version {sorted(versions)}, but the actor has {self._shared.version}: "
                "the weights were not installed"
            )

    def _minibatches(
        self, step_context: StepContext, blocks: Mapping[int, TrainingBlock], purpose: str, epochs: int
    ) -> Iterator[dict[int, Tensor]]:
        sizes = {block: len(samples) for block, samples in blocks.items()}
        shuffle = Shuffle(self._config.model.seed, purpose, step_context.iteration)
        return minibatches(shuffle, sizes, self._algorithm.num_minibatches, epochs)

    def _fit_value(self, step_context: StepContext, blocks: Mapping[int, TrainingBlock]) -> dict[str, float]:
        """Runs the critic's epochs on fixed targets."""
        batches = self._minibatches(step_context, blocks, "value", self._algorithm.value_epochs)
        fitted = fit(self._learners[VALUE], batches, lambda block, index: self._value_pass(blocks[block].rows(index)))
        return value_metrics(fitted, self._reducer.sum_blocks({b: _explained_sums(t) for b, t in blocks.items()}))

    def _value_pass(self, rows: TrainingBlock) -> list[Pass]:
        return [Pass(float(rows.valid.sum()), partial(self._value_sums, rows))]

    def _value_sums(self, rows: TrainingBlock) -> LossSums:
        assert rows.returns is not None
        values = self._policy.value(rows.features, rows.privileged)
        terms = value_loss(values, rows.returns, rows.valid, rows.values, self._algorithm.value_clip)
        return LossSums(terms.loss, terms.count.to(torch.float32), terms.loss.detach().reshape(1))

    def _fit_policy(self, step_context: StepContext, blocks: Mapping[int, TrainingBlock]) -> dict[str, float]:
        """Runs the policy's epochs until they are over or a minibatch exceeds the target KL."""
        algorithm, learner = self._algorithm, self._learners[POLICY]
        self._check_ratio_of_first(step_context, blocks)
        warming_up = algorithm.name is AlgorithmName.ppo and step_context.iteration < algorithm.critic_warmup_iterations
        if warming_up and not self._joint:
            return {"losses/initial_log_ratio": self._initial_log_ratio}
        learner.lr = linear_decay(
            step_context.iteration, self._config.num_iterations, algorithm.lr, algorithm.lr_end_fraction
        )
        batches = self._minibatches(step_context, blocks, "policy", algorithm.epochs)
        passes = lambda block, index: self._policy_pass(blocks[block].rows(index), warming_up)  # noqa: E731
        fitted = fit(learner, batches, passes, exceeds_kl(algorithm.target_kl))
        return self._policy_metrics(fitted) | (self._joint_metrics(fitted, blocks) if self._joint else {})

    def _joint_metrics(self, fitted: Fitted, blocks: Mapping[int, TrainingBlock]) -> dict[str, float]:
        explained = self._reducer.sum_blocks({b: _explained_sums(t) for b, t in blocks.items()})
        loss = fitted.sums[VALUE_LOSS] / max(fitted.weight, 1e-8)
        return {"losses/value_loss": loss, "losses/explained_variance": explained_variance(explained)}

    def _policy_pass(self, rows: TrainingBlock, critic_only: bool) -> list[Pass]:
        size = self._algorithm.rows_per_microbatch or len(rows)
        parts = [rows.rows(index) for index in torch.arange(len(rows)).split(size)] if size < len(rows) else [rows]
        return [Pass(float(part.weights.sum()), partial(self._policy_sums, part, critic_only)) for part in parts]

    def _policy_sums(self, rows: TrainingBlock, critic_only: bool) -> LossSums:
        algorithm, level = self._algorithm, self._algorithm.ratio_level
        temperature = self._config.model.policy.temperature
        found = self._score(rows.features, rows.record, temperature, algorithm.entropy_coef != 0)
        choices = found.log_probs.shape[-1]
        counted = rows.weights > 0
        terms = policy_loss(
            to_level(found.log_probs, rows.valid, level, rows.mask),
            to_level(rows.old_log_probs, rows.valid, level, rows.mask),
            rows.advantages[:, 0] if level is Level.chunk else rows.advantages,
            mask_at_level(counted, level, choices, rows.mask),
            algorithm.clip_low,
            algorithm.clip_high,
            weights_at_level(rows.weights, level, choices, rows.mask),
            dual_clip=algorithm.dual_clip,
            max_log_ratio=algorithm.max_log_ratio,
        )
        per_action = torch.zeros_like(rows.weights) if found.entropy is None else found.entropy.sum(-1)
        loss = terms.loss
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * (rows.weights * per_action).sum()
        kl, count = terms.approx_kl
        outside, _ = terms.clipfrac
        statistics = [terms.loss, kl, outside, count, masked_sum(per_action, counted) / choices, counted.sum()]
        if self._joint:
            value = self._joint_value_loss(rows, found)
            loss = algorithm.value_coef * value + (0.0 if critic_only else loss)
            statistics.append(value)
        return LossSums(loss, terms.weight, torch.stack([s.detach().to(torch.float32) for s in statistics]))

    def _joint_value_loss(self, rows: TrainingBlock, found: Evaluation) -> Tensor:
        """Returns the critic's summed loss, from the forward pass of the policy where that gives values."""
        assert rows.returns is not None
        values = found.values if found.values is not None else self._policy.value(rows.features, rows.privileged)
        return value_loss(values, rows.returns, rows.valid, rows.values, self._algorithm.value_clip).loss

    def _scored_as_sampled(self, rows: TrainingBlock) -> Evaluation:
        """Returns what the copy of other stages says of choices, which are of the same weights."""
        found = self._policy.evaluate(rows.features, rows.record, self._config.model.policy.temperature)
        if found.entropy is None and self._algorithm.entropy_coef:
            raise ConfigError(
                f"algorithm.entropy_coef is {self._algorithm.entropy_coef:g}, but {type(self._policy).__name__} has no "
                "entropy in closed form: use 0"
            )
        return found

    @torch.no_grad()
    def _check_ratio_of_first(self, step_context: StepContext, blocks: Mapping[int, TrainingBlock]) -> None:
        """Measures max |log ratio| per token on each block's first minibatch with samples, before any step."""
        size = self._config.model.block_size
        batches = list(self._minibatches(step_context, blocks, "policy", 1))
        largest = {}
        for block in blocks:
            index = next((rows[block] for rows in batches if len(rows[block])), batches[0][block])
            difference = torch.zeros(1)
            for part in index.split(size) if len(index) else ():
                # in calls of the rollout's size: a row's last bits depend on the size of its batch
                rows = blocks[block].rows(torch.cat([part, part[:1].expand(size - len(part))]))
                made = rows.valid[..., None] if rows.mask is None else rows.valid[..., None] & rows.mask
                now = self._scored_as_sampled(rows).log_probs
                now, old = (torch.where(made, x, 0.0) for x in (now, rows.old_log_probs))
                difference = torch.maximum(difference, (now - old).abs().max().reshape(1).cpu())
            largest[block] = difference
        self._initial_log_ratio = max(float(v[0]) for v in self._reducer.gather_blocks(largest).values())
        tolerance = self._algorithm.ratio_tolerance
        if tolerance is not None or not is_accelerator(self._device):
            require_unit_ratio(self._initial_log_ratio, _RATIO_TOLERANCE if tolerance is None else tolerance)

    def _policy_metrics(self, fitted: Fitted) -> dict[str, float]:
        return policy_metrics(fitted) | {
            "losses/policy_steps": float(len(fitted.norms)),
            "losses/stopped_by_kl": float(fitted.stopped),
            "losses/initial_log_ratio": self._initial_log_ratio,
            "charts/learning_rate": self._learners[POLICY].lr,
        }

    # ------------------------------------------------------------------------------------------------ context switch
    def offload(self, step_context: StepContext) -> None:
        """Leaves the device's memory with the learners' state; the weights stay if the rollout uses them."""
        self._shared.leave("actor")
        self._move_learners("cpu")

    def onload(self, step_context: StepContext) -> None:
        """Comes back."""
        self._shared.enter("actor")
        self._move_learners(self._device)

    def _move_learners(self, device: str) -> None:
        for learner in self._learners.values():
            learner.move_state(device)

    # --------------------------------------------------------------------------------------------- weights and state
    def export_weights(self, step_context: StepContext) -> WeightsMessage:
        """Returns the weights that training may change with their version and checksum."""
        return export_weights(self._policy.module, self._shared.version, whole=False)

    def weights_digest(self, step_context: StepContext) -> str:
        """Returns the SHA-256 of all weights."""
        return weights_sha256(self._policy.module.state_dict())

    def save(
        self, step_context: StepContext, argument: tuple[str, int, int, dict[str, object], dict[int, list]]
    ) -> None:
        """Writes a checkpoint (the first worker does): (root, step, keep, JSON state, what the env carries over)."""
        tensors = {name: learner.export_state() for name, learner in self._learners.items()}  # all take part
        if self._rank != 0:
            return
        root, step, keep, state, carry_over = argument
        if carry_over:
            tensors["carry_over"] = flatten_carry_over(carry_over)
        state = state | {"version": self._shared.version, "blocks": sorted(carry_over)}
        policy, config = self._policy, self._config

        def write_policy(folder: Path) -> None:
            save_policy(policy, folder, config.env, config.model.policy, self._device)

        save(Path(root), step, policy_writer=write_policy, tensors=tensors, state=state, keep=keep)

    def load(self, step_context: StepContext, folder: str) -> None:
        """Restores learners and version; the weights were loaded with the policy."""
        for name, learner in self._learners.items():
            learner.import_state(load_tensors(Path(folder), name))
        self._shared.version = step_context.iteration

    def load_carry_over(self, step_context: StepContext, folder: str) -> dict[int, list[RunningEpisode | None]]:
        """Returns what the env carried over, {} if nothing."""
        return unflatten_carry_over(load_tensors(Path(folder), "carry_over"), self._config.env.block_size)


def _explained_sums(block: TrainingBlock) -> Tensor:
    assert block.values is not None
    assert block.returns is not None
    return explained_variance_sums(block.values, block.returns, block.valid)


def _valid_returns(block: TrainingBlock) -> Tensor | None:
    return None if block.returns is None else block.returns[block.valid]


def _first_row(columns: PolicyColumns) -> tuple[Features, Record]:
    """Returns the first row's features and record, a batch of one."""
    return tuple({name: value[0, :1] for name, value in part.items()} for part in (columns.features, columns.record))  # pyright: ignore[reportReturnType]


def _pair(payloads: list[object]) -> list[tuple[PolicyColumns, EnvColumns]]:
    """Splits [policy columns of each round, env columns of each round] into pairs."""
    half = len(payloads) // 2
    return [
        (cast(PolicyColumns, p), cast(EnvColumns, e)) for p, e in zip(payloads[:half], payloads[half:], strict=True)
    ]
