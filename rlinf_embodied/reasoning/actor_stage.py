"""The learner's stage: policy epochs over the completions of all blocks, and the state of training.

With one optimizer step per iteration a block's gradient depends on the block only.  If blocks arrive in chunks, it is
computed as soon as the block arrives, while others are still being generated; the call for the last chunk sums all
gradients and makes the step.  With more steps, or a sharded model, the update starts with the last chunk.  If nothing
was computed earlier, workers exchange blocks until all have about as many tokens (learning/balance.py).

The stage trains the worker's copy of the policy, which generation uses as well.  A sharded learner trains a separate
policy, from which the worker's copy is filled at the end of an update (learning/sharded.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.losses import LARGEST_LOG_RATIO, require_unit_ratio
from rlinf_embodied.config import Precision, ReasoningAlgorithmConfig, ReasoningName, Sharding
from rlinf_embodied.device import computing, peak_flop_per_s, require_precision
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.learning.balance import balanced_owners, moved
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.gradients import Pass
from rlinf_embodied.learning.learner import AdamSettings, Learner, Step
from rlinf_embodied.learning.learner_stage import LearnerStage, Moment, StagePart
from rlinf_embodied.learning.optimizer import linear_decay
from rlinf_embodied.learning.reduce import Reducer, make_reducer
from rlinf_embodied.learning.update import Fitted, fit, minibatches, policy_metrics
from rlinf_embodied.learning.weights import Groups, WeightsMessage, WeightsSender, require_version, state_bytes
from rlinf_embodied.reasoning.batch import all_log_probs
from rlinf_embodied.reasoning.objective import STATISTICS, Objective, Round, TrainingRows, training_rows, zero_loss
from rlinf_embodied.reasoning.policy_folder import StageConfig, load_policy, save_policy, shared_model
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device
from rlinf_embodied.telemetry.boards import BINS, Histogram

_OPTIMIZER, _MODULE = "policy_optimizer", "policy_module"  # in a checkpoint
# largest differences of log-probs at the same weights, in float32 on a CPU
_LARGEST_MISMATCH = 1e-3  # between generation and training, which use different kernels
_LARGEST_RATIO = 1e-4  # between two training passes over the same completions in different batches


class LanguageLearner(LearnerStage):
    """A stage that trains the language model with one optimizer; data-parallel over the workers that host it."""

    user = "actor"
    sends_frozen = True  # until the first update: other copies may have been loaded from a folder with merged adapters
    statistics = ("loss",)  # sums that its passes return

    def __init__(self, stage_config: StageConfig) -> None:
        self._stage_config, self._config = stage_config, stage_config.config
        self._sender = WeightsSender(torch.bfloat16)

    def setup(self, context: StageContext) -> int:
        """Takes the worker's copy of the policy, loaded on first use, and creates the learner; returns weights' bytes.

        Raises:
            ConfigError: the device does not support algorithm.precision.
        """
        algorithm = self._config.algorithm
        require_precision(algorithm.precision, context.device)
        shared = shared_model(context, self._stage_config)
        self._is_sharded = algorithm.sharding is not Sharding.none
        self._reducer = make_reducer(algorithm.reduction, context.group, context.owners, context.device)
        self._owners = list(context.owners)
        betas = (0.9, algorithm.beta2)
        adam = AdamSettings(algorithm.lr, betas, algorithm.max_grad_norm, weight_decay=algorithm.weight_decay)
        shared.enter(self.user)
        self._policy = shared.policy
        if self._is_sharded:
            self._learner = self._sharded_learner(context, adam)
        else:
            self._learner = Learner(self._policy.parameters(), adam, self.statistics, self._reducer)
        self.hold(shared, context.group, context.device, {_OPTIMIZER: self._learner})
        if self._is_sharded:
            shared.leave(self.user)  # the worker's copy is on the device only while another stage uses it
        return state_bytes(shared.policy.module)

    def _sharded_learner(self, context: StageContext, adam: AdamSettings) -> Learner:
        """Creates a policy whose weights are spread over the stage's workers; other stages use the worker's copy."""
        from rlinf_embodied.learning.sharded import ShardedLearner  # imports FSDP2, which is slow

        config, view, precision = self._config, self._policy.module, self._config.algorithm.precision
        self._policy = policy = load_policy(config.policy, self._stage_config.folder, config.run.seed, "cpu").policy
        return ShardedLearner(
            *(policy.module, policy.parameters, view, adam, self.statistics),
            zero_loss=lambda: zero_loss(policy, context.device, precision),
            group=context.group,
            device=context.device,
            precision=precision,
            exact=config.run.exact.holds,
        )

    def offload(self, step_context: Moment) -> None:
        """Frees the device's memory of the optimizer's state; the weights stay if generation uses them."""
        self.move_training("cpu") if self._is_sharded else super().offload(step_context)

    def onload(self, step_context: Moment) -> None:
        self.move_training(self.device) if self._is_sharded else super().onload(step_context)

    def export_weights(self, step_context: Moment, follows: bool | None = None) -> WeightsMessage:
        """Returns a part of the weights, or for generation in bfloat16 their changed entries; see Executor.export."""
        if follows is None:
            return super().export_weights(step_context)
        part = step_context.chunk, step_context.num_chunks
        return self._sender.export(self.shared.policy.module, self.shared.version, follows, part)

    def write_policy(self, folder: Path) -> None:
        save_policy(self.shared.policy, folder, self._config)

    def export_training(self) -> Groups:
        """Returns the optimizer's state, and separate adapters, which are merged in the policy's folder."""
        has_adapters = self._config.policy.lora.rank > 0
        adapters = {_MODULE: dict(self.shared.policy.module.state_dict())} if has_adapters else {}
        return super().export_training() | adapters

    def load(self, step_context: Moment, folder: str) -> None:
        """Restores optimizer, adapters and version; the weights were loaded with the policy."""
        super().load(step_context, folder)
        if module := load_tensors(Path(folder), _MODULE):
            self.shared.policy.module.load_state_dict(module)
            self._learner.adopt()
        self.sends_frozen = True

    def import_snapshot(self, step_context: Moment, parts: Sequence[StagePart]) -> None:
        super().import_snapshot(step_context, parts)
        self.sends_frozen = True


class ActorStage(LanguageLearner):
    """Updates the language model by reinforcement learning."""

    statistics = STATISTICS

    def __init__(self, stage_config: StageConfig) -> None:
        super().__init__(stage_config)
        self._algorithm = stage_config.config.rl
        self._rows: dict[int, TrainingRows] = {}

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Takes the blocks of a chunk; with the last chunk it makes the iteration's update and reports its metrics.

        Raises:
            ObjectiveError: completions are from other weights, or their log-probs differ too much from training's.
        """
        if step_context.chunk == 0:
            self._begin(step_context)
        for block in sorted(inputs):
            self._rows[block] = self._rows_of(step_context, block, inputs[block])
            if self._algorithm.num_steps == 1 and step_context.num_chunks > 1 and not self._critic_only:
                self._learner.add(block, torch.arange(len(self._rows[block])), self._passes)
        is_last = step_context.chunk == step_context.num_chunks - 1
        return Output(dict.fromkeys(inputs), self._finish(step_context) if is_last else {})

    def _begin(self, step_context: StepContext) -> None:
        algorithm, generation = self._algorithm, self._config.generation
        self._critic_only = (
            algorithm.name is ReasoningName.ppo and step_context.iteration < algorithm.critic_warmup_iterations
        )
        # counts of a histogram of log ratios; with one step every ratio is 1
        has_histogram = self._config.run.has_boards and algorithm.num_steps > 1
        counts = torch.zeros(BINS, device=self.device) if has_histogram else None
        settings = generation.temperature, generation.max_new_tokens
        self._objective = Objective(self._policy, algorithm, *settings, {}, counts)
        self._differences: tuple[float, float] | None = None
        self._stale = step_context.staleness > 0
        self._has_stale_tokens = self._stale or self._config.carried_per_block > 0
        self._rows = {}
        self._start_sums(self._owners)

    def _finish(self, step_context: StepContext) -> dict[str, float]:
        """Makes the iteration's update; returns its metrics."""
        if step_context.num_chunks == 1 and not self._critic_only:
            self._balance()
        metrics = {} if self._critic_only else self._update(step_context)
        flops = lambda rows: 0.0 if self._critic_only else self._flops(rows)  # noqa: E731
        counts = {block: torch.tensor([rows.num_groups, flops(rows)]) for block, rows in self._rows.items()}
        useful, total = torch.stack(list(self._reducer.gather_blocks(counts).values())).sum(0).tolist()
        metrics |= {"rollout/useful_groups": useful, "charts/update_tflop": total / 1e12}
        if (peak := peak_flop_per_s(self.device)) is not None:
            metrics["charts/update_at_peak_s"] = total / peak
        self._rows = {}
        self.shared.version = step_context.iteration + 1
        return metrics

    def _rows_of(self, step_context: StepContext, block: int, payloads: list[object]) -> TrainingRows:
        inputs = actor_inputs(self._algorithm)  # payloads are ordered by edge, then by round
        count, parts = len(payloads) // len(inputs), [to_device(payload, self.device) for payload in payloads]
        rounds = [Round(**dict(zip(inputs, parts[k::count], strict=True))) for k in range(count)]  # pyright: ignore[reportArgumentType]
        versions = {part.version for r in rounds for part in (r.generation, r.old_log_probs) if part is not None}
        require_version(versions, self.shared.version, step_context.staleness)
        kept = None
        if self._algorithm.dynamic_sampling:
            groups = cast("tuple[tuple[int, int, int], ...]", step_context.message)
            kept = [(number, group) for number, block_of_group, group in groups if block_of_group == block]
        rows = training_rows(rounds, self._algorithm, kept)
        if not self._stale or self._algorithm.num_steps == 1:
            return rows
        # the ratio is clipped around the weights before the update, not those that sampled, for which importance
        # weights correct (decoupled PPO: Hilton et al. 2022, arXiv 2110.00641)
        settings = (self._config.generation.temperature, self._algorithm.tokens_per_microbatch)
        with computing(self._algorithm.precision, self.device):
            return replace(rows, old_log_probs=all_log_probs(self._policy, rows.sequences, *settings))

    def _start_sums(self, owners: Sequence[int]) -> None:
        """Starts sums over blocks; `owners` are the ranks of their workers."""
        self._reducer = self._learner.reducer = Reducer(self.group, owners, self._reducer.exact)
        self._learner.start()

    def _balance(self) -> None:
        """Exchanges whole blocks between workers for this update, so that all have about as many tokens."""
        if self.group.size == 1:
            return
        tokens = {b: rows.sequences.lengths[: rows.num_trained].sum() for b, rows in self._rows.items()}
        all_tokens = self._reducer.gather_blocks({block: torch.tensor([float(n)]) for block, n in tokens.items()})
        owners = balanced_owners([float(all_tokens[block]) for block in sorted(all_tokens)], self._owners)
        if owners != self._owners:
            sent = cast("dict[int, TrainingRows]", to_device(self._rows, "cpu"))
            received = moved(self.group, self._owners, owners, {block: asdict(rows) for block, rows in sent.items()})
            batches = {block: TokenBatch(**fields.pop("sequences")) for block, fields in received.items()}
            rows = {block: TrainingRows(batches[block], **fields) for block, fields in received.items()}
            self._rows = cast("dict[int, TrainingRows]", to_device(rows, self.device))
            self._start_sums(owners)

    def _flops(self, rows: TrainingRows) -> float:
        """Returns the FLOPs of the passes over the rows that are trained on."""
        lengths, predicted = rows.sequences.lengths[: rows.num_trained], rows.sequences.mask[: rows.num_trained].sum()
        return self._algorithm.epochs * self.shared.policy.update_flops(lengths.tolist(), int(predicted))

    def _passes(self, rows: Mapping[int, Tensor]) -> list[Pass]:
        objective = self._objective
        return [p for b, index in rows.items() for p in objective.passes(b, self._rows[b], index, self.device)]

    def _update(self, step_context: StepContext) -> dict[str, float]:
        algorithm = self._algorithm
        warmup = algorithm.critic_warmup_iterations if algorithm.name is ReasoningName.ppo else 0
        self._learner.lr = linear_decay(
            *(max(0, step_context.iteration - warmup), self._config.run.num_iterations - warmup),
            *(algorithm.lr, algorithm.lr_end_fraction, algorithm.lr_warmup_iterations),
        )
        self.sends_frozen = False
        fitted = fit(self._learner, self._minibatches(step_context), self._passes, self._compare)
        self._learner.publish()
        self._compare()  # in case no step was made
        return self._metrics(fitted)

    def _minibatches(self, step_context: StepContext) -> Iterable[Mapping[int, Tensor]]:
        """Returns the rows of each step: slices of the trained rows, and of the rows for metrics only."""
        algorithm, blocks = self._algorithm, self._rows
        if algorithm.num_steps == 1:
            return [{block: torch.arange(len(rows)) for block, rows in blocks.items()}]

        def shuffled(purpose: str, sizes: Mapping[int, int]) -> Iterable[Mapping[int, Tensor]]:
            shuffle = (self._config.run.seed, purpose, step_context.iteration)
            return minibatches(shuffle, sizes, algorithm.num_minibatches, algorithm.epochs)

        trained = shuffled("policy", {block: rows.num_trained for block, rows in blocks.items()})
        observed = shuffled("watched", {block: len(rows) - rows.num_trained for block, rows in blocks.items()})
        return (
            {block: torch.cat([rows, blocks[block].num_trained + second[block]]) for block, rows in first.items()}
            for first, second in zip(trained, observed, strict=True)
        )

    def _compare(self, step: Step | None = None) -> bool:
        """Measures before the first step how log-probs at the same weights differ; never stops an update early.

        Raises:
            ObjectiveError: on a CPU in float32, they differ by more than rounding.
        """
        if self._differences is not None:
            return False
        by_block = {block: self._objective.largest.get(block, torch.zeros(2)) for block in self._rows}
        largest = torch.stack(list(self._reducer.gather_blocks(by_block).values())).amax(0)
        self._differences = (float(largest[0]), float(largest[1]))
        precisions = {self._config.policy.precision, self._config.generation.precision, self._algorithm.precision}
        if not self._has_stale_tokens and self.device == "cpu" and precisions == {Precision.float32}:
            require_unit_ratio(self._differences[0], _LARGEST_MISMATCH)
            require_unit_ratio(self._differences[1], _LARGEST_RATIO)
        return False

    def _metrics(self, fitted: Fitted) -> dict[str, float]:
        assert self._differences is not None
        mean = lambda name: fitted.mean(name, "actions")  # noqa: E731
        metrics = policy_metrics(fitted) | {
            "losses/mismatch_mean": mean("mismatch"),
            "losses/mismatch_max": self._differences[0],
            "losses/initial_log_ratio": self._differences[1],
            "losses/mismatch_kl": mean("mismatch_kl"),
            "losses/mismatch_ratio": mean("ratio"),
            "losses/importance_capped": mean("capped"),
            "charts/learning_rate": self._learner.lr,
            "charts/optimizer_steps": float(len(fitted.norms)),
        }
        if (counts := self._objective.ratio_counts) is not None:
            total = self.group.all_reduce(counts)  # integers: their sum does not depend on the order
            metrics["losses/log_ratio"] = Histogram(total.tolist(), LARGEST_LOG_RATIO)
        return metrics | ({"losses/reference_kl": mean("kl")} if self._algorithm.needs_reference else {})


def actor_inputs(algorithm: ReasoningAlgorithmConfig) -> list[str]:
    """Returns the stages from which an actor receives data, in the order of the edges."""
    needed = {
        "old_log_probs": algorithm.num_steps > 1,
        "reference": algorithm.needs_reference,
        "critic": algorithm.name is ReasoningName.ppo,
    }
    return ["generation", "reward", *(stage for stage, is_needed in needed.items() if is_needed)]
