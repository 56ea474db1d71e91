"""The learner as a stage: advantages, critic epochs, policy epochs, and all the state that training has.

columns of every block -> advantages -> global mean and deviation -> critic epochs -> policy epochs -> new version
                                                                                        |
                                    before the first step the importance ratio must be 1 per token, or it stops

With algorithm.tis_cap the ratio's denominator is training's own: all that was sampled is scored once more at first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.losses import (
    explained_variance,
    explained_variance_sums,
    require_unit_ratio,
)
from rlinf_embodied.algorithms.off_policy import Mismatch
from rlinf_embodied.config import AlgorithmConfig, AlgorithmName, EnvConfig, Precision, Sharding
from rlinf_embodied.config.checks import require
from rlinf_embodied.device import is_accelerator, require_autocast
from rlinf_embodied.embodied.advantages import Rollouts, grpo_block, normalize_blocks, ppo_block
from rlinf_embodied.embodied.batch import EnvColumns, PolicyColumns, TrainingBlock, TwoLevelColumns
from rlinf_embodied.embodied.carry_over import CARRY_OVER, unflatten_carry_over
from rlinf_embodied.embodied.hierarchy import HIGH_FOLDER, LowLevelFiles, read_files
from rlinf_embodied.embodied.learners import POLICY, VALUE, VALUE_GROUP, VALUE_LOSS, Learners, Scored
from rlinf_embodied.embodied.objective import Objective
from rlinf_embodied.embodied.old_log_probs import (
    capped,
    mismatch_of_rollouts,
    mismatch_of_samples,
    with_old_log_probs,
)
from rlinf_embodied.embodied.policy_folder import load_policy, save_conditions, save_policy
from rlinf_embodied.embodied.precision import computed_in
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import RunningEpisode
from rlinf_embodied.interfaces.policies import Features, HasRunningStatistics, Policy, Record
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.learner_stage import LearnerStage, StagePart
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
from rlinf_embodied.learning.weights import require_version
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device

_RATIO_TOLERANCE = 1e-5  # of |log ratio| at unchanged weights, on a CPU

View = Callable[[TwoLevelColumns, EnvColumns], tuple[PolicyColumns, EnvColumns]]


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """What the stage needs to know."""

    model: PolicyStageConfig
    algorithm: AlgorithmConfig
    env: EnvConfig
    num_iterations: int
    exact: bool
    view: View | None = None  # of two levels of policies: which columns are this one's
    low: LowLevelFiles | None = None  # of the high level: the other policy of its checkpoints


@dataclass(frozen=True, slots=True)
class ActorReport:
    """What the driver learns of an update."""

    metrics: dict[str, float]
    version: int


class ActorStage(LearnerStage):
    """Updates the policy by PPO or GRPO; data-parallel over the workers that host it."""

    user = "actor"

    def __init__(self, config: ActorConfig) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._any_row: tuple[Features, Record] | None = None  # of a sharded update

    def setup(self, context: StageContext) -> None:
        """Loads the policy (or takes its worker's copy) and makes the learners.

        Raises:
            ObjectiveError: the policy has nothing to train.
            ConfigError: PPO has no critic to train, or the device does not compute in algorithm.precision.
        """
        model, algorithm = self._config.model, self._algorithm
        if algorithm.precision is Precision.bfloat16:
            require_autocast(context.device)
        found = context.share(model.name, lambda: load_policy(model.policy, model.folder, context.device))
        shared = cast(SharedPolicy[Policy], found)
        shared.enter(self.user)
        self.device = context.device
        self._policy = computed_in(algorithm.precision, shared.policy, model.policy, context.device)
        self._reducer = make_reducer(algorithm.reduction, context.group, context.owners, context.device)
        whole, rule = algorithm.sharding is Sharding.none, "the policy's running statistics would miss the sliced copy"
        keeps = isinstance(self._policy, HasRunningStatistics)
        require(whole or not keeps, "algorithm.sharding", algorithm.sharding.value, rule, "use none")
        if whole:
            learners = Learners.replicated(self._policy, algorithm, self._reducer)
        else:
            settings = (algorithm, self._reducer, context, self._config.exact)
            learners = Learners.sharded(self._policy, self._copy, self._zero_loss, *settings)
        self._learners, self._joint = learners.by_name, learners.joint
        prefix = "" if self._config.low is None else "high_"  # one checkpoint holds both levels' optimizers
        named = {prefix + name: learner for name, learner in self._learners.items()}
        self.hold(shared, context.group.rank, context.device, named, policy=model.name)
        temperature = model.policy.temperature
        self._objective = Objective(algorithm, temperature, learners.evaluate, self._policy.value, learners.joint)

    def _copy(self) -> Policy:
        model = self._config.model
        policy = load_policy(model.policy, model.folder, "cpu").policy
        return computed_in(self._algorithm.precision, policy, model.policy, self.device)

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
        rollouts: dict[int, Rollouts] = {
            block: _pair([to_device(payload, self.device) for payload in payloads])
            for block, payloads in inputs.items()
        }
        if (view := self._config.view) is not None:
            rollouts = {b: [view(cast(TwoLevelColumns, p), env) for p, env in parts] for b, parts in rollouts.items()}
        self._require_version(step_context, rollouts)
        if self._algorithm.sharding is not Sharding.none:
            self._any_row = _first_row(next(iter(rollouts.values()))[0][0])
        if self._algorithm.tis_cap is not None:
            rollouts = {b: with_old_log_probs(self._score_as_sampled, parts) for b, parts in rollouts.items()}
        metrics: dict[str, float] = {}
        if self._algorithm.name is AlgorithmName.ppo:
            critic = self._config.model.policy.critic
            raw = {block: ppo_block(self._policy, parts, self._algorithm, critic) for block, parts in rollouts.items()}
            blocks = normalize_blocks(raw, self._reducer)
        else:
            kept = set(cast("tuple[tuple[int, int], ...]", step_context.message))
            blocks = {b: grpo_block(parts, self._algorithm, b, kept) for b, parts in rollouts.items()}
            metrics["rollout/useful_groups"] = float(len(kept))
        padded = self._padded(blocks, rollouts)
        if VALUE in self._learners:
            metrics |= self._fit_value(step_context, blocks, padded)
        metrics |= self._compare(step_context, rollouts, blocks)
        metrics |= self._fit_policy(step_context, blocks, padded)
        for learner in self._learners.values():
            learner.publish()
        self._update_statistics(blocks)
        self._any_row = None
        self.shared.version = step_context.iteration + 1
        return Output(dict.fromkeys(inputs), ActorReport(metrics, self.shared.version))

    def _update_statistics(self, blocks: Mapping[int, TrainingBlock]) -> None:
        """Lets the policy's running statistics take in what this iteration's samples show."""
        policy = self._policy
        if isinstance(policy, HasRunningStatistics):
            with torch.no_grad():
                sums = {b: policy.statistics_sums(t.features, _valid_returns(t)) for b, t in blocks.items()}
            policy.update_statistics(self._reducer.sum_blocks(sums))

    def _require_version(self, step_context: StepContext, rollouts: Mapping[int, Rollouts]) -> None:
        versions = {columns.version for parts in rollouts.values() for columns, _ in parts}
        require_version(versions, self.shared.version, step_context.staleness)

    def _minibatches(
        self, step_context: StepContext, blocks: Mapping[int, TrainingBlock], purpose: str, epochs: int
    ) -> Iterator[dict[int, Tensor]]:
        sizes = {block: len(samples) for block, samples in blocks.items()}
        shuffle = Shuffle(self._config.model.seed, purpose, step_context.iteration)
        return minibatches(shuffle, sizes, self._algorithm.num_minibatches, epochs)

    def _padded(
        self, blocks: Mapping[int, TrainingBlock], rollouts: Mapping[int, Rollouts]
    ) -> Mapping[int, TrainingBlock]:
        """Returns what passes read: compiled ones blocks of one size, with a row of padding or more."""
        if not self._algorithm.compile:
            return blocks
        sizes = {b: sum(policy.log_probs.shape[:2].numel() for policy, _ in parts) for b, parts in rollouts.items()}
        return {b: block.padded(sizes[b] + 1) if len(block) else block for b, block in blocks.items()}

    def _fit_value(
        self,
        step_context: StepContext,
        blocks: Mapping[int, TrainingBlock],
        padded: Mapping[int, TrainingBlock],
    ) -> dict[str, float]:
        """Runs the critic's epochs on fixed targets."""
        batches = self._minibatches(step_context, blocks, "value", self._algorithm.value_epochs)
        passes = lambda block, index: self._objective.value_passes(padded[block], index)  # noqa: E731
        fitted = fit(self._learners[VALUE], batches, passes)
        return value_metrics(fitted, self._reducer.sum_blocks({b: _explained_sums(t) for b, t in blocks.items()}))

    def _fit_policy(
        self,
        step_context: StepContext,
        blocks: Mapping[int, TrainingBlock],
        padded: Mapping[int, TrainingBlock],
    ) -> dict[str, float]:
        """Runs the policy's epochs until they are over or a minibatch exceeds the target KL.

        Where one optimizer trains the critic as well, warm-up and the critic's further epochs step its own parameters.
        """
        algorithm, learner = self._algorithm, self._learners[POLICY]
        warming_up = algorithm.name is AlgorithmName.ppo and step_context.iteration < algorithm.critic_warmup_iterations
        if warming_up and not (self._joint and VALUE_GROUP in learner.rates):
            return {}
        learner.lr = linear_decay(
            step_context.iteration, self._config.num_iterations, algorithm.lr, algorithm.lr_end_fraction
        )
        if self._joint and algorithm.one_optimizer and VALUE_GROUP in learner.rates:
            learner.rates[VALUE_GROUP] = learner.lr
        fitted = self._steps(learner, blocks, padded, step_context, algorithm.epochs, critic_only=warming_up)
        further = 0 if not self._joint or algorithm.one_optimizer else algorithm.value_epochs - algorithm.epochs
        if further > 0 and VALUE_GROUP in learner.rates:
            self._steps(learner, blocks, padded, step_context, further, critic_only=True)
        return self._policy_metrics(fitted) | (self._joint_metrics(fitted, blocks) if self._joint else {})

    def _steps(
        self,
        learner: Learner,
        blocks: Mapping[int, TrainingBlock],
        padded: Mapping[int, TrainingBlock],
        step_context: StepContext,
        epochs: int,
        *,
        critic_only: bool,
    ) -> Fitted:
        """Steps the policy, and a critic that shares its optimizer; or that critic's own parameters alone."""
        purpose = "value" if critic_only else "policy"
        batches = self._minibatches(step_context, blocks, purpose, epochs)
        passes = lambda block, index: self._objective.policy_passes(padded[block], index, critic_only)  # noqa: E731
        stop = exceeds_kl(None if critic_only else self._algorithm.target_kl)
        return fit(learner, batches, passes, stop, (VALUE_GROUP,) if critic_only else None)

    def _joint_metrics(self, fitted: Fitted, blocks: Mapping[int, TrainingBlock]) -> dict[str, float]:
        explained = self._reducer.sum_blocks({b: _explained_sums(t) for b, t in blocks.items()})
        loss = fitted.sums[VALUE_LOSS] / max(fitted.weight, 1e-8)
        return {"losses/value_loss": loss, "losses/explained_variance": explained_variance(explained)}

    @torch.no_grad()
    def _score_as_sampled(self, features: Features, record: Record) -> Tensor:
        """Returns what the copy of other stages says of choices, which are of the same weights."""
        found = self._policy.evaluate(features, record, self._config.model.policy.temperature)
        if found.entropy is None and self._algorithm.entropy_coef:
            raise ConfigError(
                f"algorithm.entropy_coef is {self._algorithm.entropy_coef:g}, but "
                f"{type(self.shared.policy).__name__} has no entropy in closed form: use 0"
            )
        return found.log_probs

    def _compare(
        self, step_context: StepContext, rollouts: Mapping[int, Rollouts], blocks: Mapping[int, TrainingBlock]
    ) -> dict[str, float]:
        """Measures how far training's log-probs are from those recorded, before any step of the policy.

        With a cap over all valid actions; without one, on each block's first minibatch with samples.

        Raises:
            ObjectiveError: a token's are further apart than rounding explains.
        """
        cap, score, size = self._algorithm.tis_cap, self._score_as_sampled, self._config.model.block_size
        if cap is None:
            first = self._first_rows(step_context, blocks)
            found = {b: mismatch_of_samples(score, blocks[b], index, size) for b, index in first.items()}
        else:
            found = {b: mismatch_of_rollouts(parts) for b, parts in rollouts.items()}
        stacked = self._reducer.gather_blocks({b: apart.stacked() for b, apart in found.items()})
        apart = reduce(add, (Mismatch.of(part) for part in stacked.values()))
        largest, tolerance = float(apart.abs_max), self._algorithm.ratio_tolerance
        exact = self._algorithm.precision is Precision.float32 and not is_accelerator(self.device)
        if step_context.staleness == 0 and (tolerance is not None or exact):
            require_unit_ratio(largest, _RATIO_TOLERANCE if tolerance is None else tolerance)
        metrics = {"losses/initial_log_ratio": largest}
        if cap is not None:
            metrics |= {f"losses/{name}": value for name, value in apart.metrics().items()}
            counts = {b: capped(parts, self._algorithm.ratio_level, cap) for b, parts in rollouts.items()}
            above, every = torch.stack(list(self._reducer.gather_blocks(counts).values())).sum(0).tolist()
            metrics["losses/importance_capped"] = above / max(every, 1)
        return metrics

    def _first_rows(self, step_context: StepContext, blocks: Mapping[int, TrainingBlock]) -> dict[int, Tensor]:
        batches = list(self._minibatches(step_context, blocks, "policy", 1))
        return {b: next((rows[b] for rows in batches if len(rows[b])), batches[0][b]) for b in blocks}

    def _policy_metrics(self, fitted: Fitted) -> dict[str, float]:
        return policy_metrics(fitted) | {
            "losses/policy_steps": float(len(fitted.norms)),
            "losses/stopped_by_kl": float(fitted.stopped),
            "charts/learning_rate": self._learners[POLICY].lr,
        }

    # ---------------------------------------------------------------------------------------------------- checkpoints
    def write_policy(self, folder: Path) -> None:
        model, env, low = self._config.model, self._config.env, self._config.low
        own = folder if low is None else folder / HIGH_FOLDER
        save_policy(self.shared.policy, own, env, model.policy, self.device)
        if low is not None:
            low.write(folder)
            save_conditions(folder, env, low.policy, self.device)

    def state_part(self, step_context: StepContext) -> StagePart | None:
        """Returns the low level's part of a checkpoint that the high level writes, with the policy's files."""
        part = super().state_part(step_context)
        if part is None:
            return None
        with tempfile.TemporaryDirectory(prefix="rlinf_embodied-") as folder:
            self.write_policy(Path(folder))
            return replace(part, files=read_files(Path(folder)))

    def load_carry_over(self, step_context: StepContext, folder: str) -> dict[int, list[RunningEpisode | None]]:
        """Returns what the env carried over, {} if nothing."""
        return unflatten_carry_over(load_tensors(Path(folder), CARRY_OVER), self._config.env.block_size)


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
