"""The learner as a stage: policy epochs over the completions of all blocks, and all the state that training has.

With one optimizer step per iteration a block's gradient depends on nothing but the block: where blocks come in chunks,
it is computed as soon as the block arrives, while others are still being generated, and the last chunk's call adds all
up and makes the step.  With more steps, or a sharded model, everything waits for the last chunk.  Where nothing was
computed before it, workers hand blocks on until all have about as many tokens (learning/balance.py).

What is trained is the worker's copy of the policy, which generation uses too; or, where it is sharded, a policy of its
own, from which the worker's copy is filled at the end of an update (learning/sharded.py).
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
from rlinf_embodied.learning.balance import balanced_owners, moved
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.gradients import Pass
from rlinf_embodied.learning.learner import AdamSettings, Learner, Step
from rlinf_embodied.learning.learner_stage import LearnerStage, Moment, StagePart
from rlinf_embodied.learning.optimizer import linear_decay
from rlinf_embodied.learning.reduce import Reducer, make_reducer
from rlinf_embodied.learning.update import Fitted, fit, minibatches, policy_metrics
from rlinf_embodied.learning.weights import Groups, WeightsMessage, WeightsSender, require_version
from rlinf_embodied.reasoning.batch import all_log_probs
from rlinf_embodied.reasoning.generation_stage import shared_model
from rlinf_embodied.reasoning.objective import STATISTICS, Objective, Round, TrainingRows, training_rows, zero_loss
from rlinf_embodied.reasoning.policy_folder import StageConfig, load_policy, save_policy
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device
from rlinf_embodied.telemetry.boards import BINS, Histogram

_OPTIMIZER, _MODULE = "policy_optimizer", "policy_module"  # in a checkpoint
# differences of log-probs at the same weights, in float32 on a CPU
_LARGEST_MISMATCH = 1e-3  # of generation and training: other kernels
_LARGEST_RATIO = 1e-4  # of two passes of training over the same completions in other batches


class LanguageLearner(LearnerStage):
    """A stage that trains the language model by one optimizer; data-parallel over the workers that host it."""

    user = "actor"
    sends_frozen = True  # until the first update: copies elsewhere may have started from a folder with merged adapters
    statistics = ("loss",)  # that its passes add up

    def __init__(self, made: StageConfig) -> None:
        self._made, self._config = made, made.config
        self._sender = WeightsSender(torch.bfloat16)

    def setup(self, context: StageContext) -> None:
        """Loads the policy (or takes its worker's copy) and makes the learner.

        Raises:
            ConfigError: the device does not compute in algorithm.precision.
        """
        algorithm = self._config.algorithm
        require_precision(algorithm.precision, context.device)
        shared = shared_model(context, self._made)
        self._is_sharded = algorithm.sharding is not Sharding.none
        self._reducer = make_reducer(algorithm.reduction, context.group, context.owners, context.device)
        self._owners = list(context.owners)
        betas = (0.9, algorithm.beta2)
        adam = AdamSettings(algorithm.lr, betas, algorithm.max_grad_norm, weight_decay=algorithm.weight_decay)
        shared.enter(self.user)
        self._policy = shared.policy
        if self._is_sharded:
            self._learner = self._sharded(context, adam)
        else:
            self._learner = Learner(self._policy.parameters(), adam, self.statistics, self._reducer)
        self.hold(shared, context.group, context.device, {_OPTIMIZER: self._learner})
        if self._is_sharded:
            shared.leave(self.user)  # its copy is on the device while another stage works with it

    def _sharded(self, context: StageContext, adam: AdamSettings) -> Learner:
        """Makes a policy whose weights are spread over the stage's workers; the worker's copy is for other stages."""
        from rlinf_embodied.learning.sharded import ShardedLearner  # slow to import, and few need FSDP2

        config, view, precision = self._config, self._policy.module, self._config.algorithm.precision
        self._policy = policy = load_policy(config.policy, self._made.folder, config.run.seed, "cpu").policy
        return ShardedLearner(
            *(policy.module, policy.parameters, view, adam, self.statistics),
            zero_loss=lambda: zero_loss(policy, context.device, precision),
            group=context.group,
            device=context.device,
            precision=precision,
            exact=config.run.exact.holds,
        )

    def offload(self, step_context: Moment) -> None:
        """Leaves the device's memory with the optimizer's state; the weights stay if generation uses them."""
        self.move_training("cpu") if self._is_sharded else super().offload(step_context)

    def onload(self, step_context: Moment) -> None:
        self.move_training(self.device) if self._is_sharded else super().onload(step_context)

    def export_weights(self, step_context: Moment, follows: bool | None = None) -> WeightsMessage:
        """Returns the weights, for generation in bfloat16 what changed of them; see Executor.export."""
        if follows is None:
            return super().export_weights(step_context)
        return self._sender.export(self.shared.policy.module, self.shared.version, follows)

    def write_policy(self, folder: Path) -> None:
        save_policy(self.shared.policy, folder, self._config)

    def export_training(self) -> Groups:
        """Returns the optimizer's state, and adapters as such: the policy's folder has them merged."""
        adapted = self._config.policy.lora.rank > 0
        adapters = {_MODULE: dict(self.shared.policy.module.state_dict())} if adapted else {}
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

    def __init__(self, made: StageConfig) -> None:
        super().__init__(made)
        self._algorithm = made.config.rl
        self._rows: dict[int, TrainingRows] = {}

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Takes the blocks of a chunk, and with the last one makes the iteration's update; reports its metrics.

        Raises:
            ObjectiveError: completions come from other weights, or their log-probs differ too much from training's.
        """
        if step_context.chunk == 0:
            generation, self._rows = self._config.generation, {}
            settings = generation.temperature, generation.max_new_tokens
            # with one step every ratio is 1
            shown = self._config.run.has_boards and self._algorithm.num_steps > 1
            counts = torch.zeros(BINS, device=self.device) if shown else None
            self._objective = Objective(self._policy, self._algorithm, *settings, {}, counts)
            self._differences: tuple[float, float] | None = None
            self._stale = step_context.staleness > 0
            self._mixed = self._stale or self._config.carried_per_block > 0  # tokens of older weights
            self._own(self._owners)
        ppo = self._algorithm.name is ReasoningName.ppo
        warming = ppo and step_context.iteration < self._algorithm.critic_warmup_iterations
        for block in sorted(inputs):
            self._rows[block] = self._rows_of(step_context, block, inputs[block])
            if self._algorithm.num_steps == 1 and step_context.num_chunks > 1 and not warming:
                self._learner.add(block, torch.arange(len(self._rows[block])), self._passes)
        made = dict.fromkeys(inputs)
        if step_context.chunk < step_context.num_chunks - 1:
            return Output(made, {})
        if step_context.num_chunks == 1 and not warming:
            self._balance()
        metrics = {} if warming else self._update(step_context)
        flops = lambda rows: 0.0 if warming else self._flops(rows)  # noqa: E731
        counts = {block: torch.tensor([rows.num_groups, flops(rows)]) for block, rows in self._rows.items()}
        useful, total = torch.stack(list(self._reducer.gather_blocks(counts).values())).sum(0).tolist()
        metrics |= {"rollout/useful_groups": useful, "charts/update_tflop": total / 1e12}
        if (peak := peak_flop_per_s(self.device)) is not None:
            metrics["charts/update_at_peak_s"] = total / peak
        self._rows = {}
        self.shared.version = step_context.iteration + 1
        return Output(made, metrics)

    def _rows_of(self, step_context: StepContext, block: int, payloads: list[object]) -> TrainingRows:
        inputs = actor_inputs(self._algorithm)  # payloads come edge by edge, rounds within an edge
        count, parts = len(payloads) // len(inputs), [to_device(payload, self.device) for payload in payloads]
        rounds = [Round(**dict(zip(inputs, parts[k::count], strict=True))) for k in range(count)]  # pyright: ignore[reportArgumentType]
        versions = {part.version for r in rounds for part in (r.generation, r.old_log_probs) if part is not None}
        require_version(versions, self.shared.version, step_context.staleness)
        kept = None
        if self._algorithm.dynamic_sampling:
            chosen = cast("tuple[tuple[int, int, int], ...]", step_context.message)
            kept = [(number, group) for number, of_block, group in chosen if of_block == block]
        rows = training_rows(rounds, self._algorithm, kept)
        if not self._stale or self._algorithm.num_steps == 1:
            return rows
        # the ratio's clip is around the weights that are to be trained, not those that sampled: importance weights
        # correct for these (decoupled PPO: Hilton et al. 2022, arXiv 2110.00641)
        settings = (self._config.generation.temperature, self._algorithm.tokens_per_microbatch)
        with computing(self._algorithm.precision, self.device):
            return replace(rows, old_log_probs=all_log_probs(self._policy, rows.sequences, *settings))

    def _own(self, owners: Sequence[int]) -> None:
        """Begins sums over blocks that these ranks own."""
        self._reducer = self._learner.reducer = Reducer(self.group, owners, self._reducer.exact)
        self._learner.start()

    def _balance(self) -> None:
        """Hands whole blocks to other workers for this update, so that all have about as many tokens."""
        if self.group.size == 1:
            return
        tokens = {b: rows.sequences.lengths[: rows.num_trained].sum() for b, rows in self._rows.items()}
        known = self._reducer.gather_blocks({block: torch.tensor([float(n)]) for block, n in tokens.items()})
        owners = balanced_owners([float(known[block]) for block in sorted(known)], self._owners)
        if owners != self._owners:
            own = cast("dict[int, TrainingRows]", to_device(self._rows, "cpu"))
            found = moved(self.group, self._owners, owners, {block: asdict(rows) for block, rows in own.items()})
            there = {block: TrainingRows.of_fields(fields) for block, fields in found.items()}
            self._rows = cast("dict[int, TrainingRows]", to_device(there, self.device))
            self._own(owners)

    def _flops(self, rows: TrainingRows) -> float:
        """Returns the FLOPs of the passes over the rows that are trained on."""
        lengths, predicted = rows.sequences.lengths[: rows.num_trained], rows.sequences.mask[: rows.num_trained].sum()
        return self._algorithm.epochs * self.shared.policy.update_flops(lengths.tolist(), int(predicted))

    def _passes(self, block: int, index: Tensor) -> list[Pass]:
        return self._objective.passes(block, self._rows[block], index, self.device)

    def _update(self, step_context: StepContext) -> dict[str, float]:
        algorithm = self._algorithm
        late = algorithm.critic_warmup_iterations if algorithm.name is ReasoningName.ppo else 0
        self._learner.lr = linear_decay(
            *(max(0, step_context.iteration - late), self._config.run.num_iterations - late),
            *(algorithm.lr, algorithm.lr_end_fraction, algorithm.lr_warmup_iterations),
        )
        self.sends_frozen = False
        fitted = fit(self._learner, self._minibatches(step_context), self._passes, self._compare)
        self._learner.publish()
        self._compare()  # where nothing was trained on
        return self._metrics(fitted)

    def _minibatches(self, step_context: StepContext) -> Iterable[Mapping[int, Tensor]]:
        """Returns the rows of each step: slices of those that are trained on, with slices of those looked at."""
        algorithm, blocks = self._algorithm, self._rows
        if algorithm.num_steps == 1:
            return [{block: torch.arange(len(rows)) for block, rows in blocks.items()}]

        def shuffled(purpose: str, sizes: Mapping[int, int]) -> Iterable[Mapping[int, Tensor]]:
            shuffle = (self._config.run.seed, purpose, step_context.iteration)
            return minibatches(shuffle, sizes, algorithm.num_minibatches, algorithm.epochs)

        trained = shuffled("policy", {block: rows.num_trained for block, rows in blocks.items()})
        watched = shuffled("watched", {block: len(rows) - rows.num_trained for block, rows in blocks.items()})
        return (
            {block: torch.cat([rows, blocks[block].num_trained + second[block]]) for block, rows in first.items()}
            for first, second in zip(trained, watched, strict=True)
        )

    def _compare(self, step: Step | None = None) -> bool:
        """Measures, before the first step, what differs between passes at the same weights; never stops an update.

        Raises:
            ObjectiveError: it is more than rounding, on a CPU in float32.
        """
        if self._differences is not None:
            return False
        own = {block: self._objective.largest.get(block, torch.zeros(2)) for block in self._rows}
        found = torch.stack(list(self._reducer.gather_blocks(own).values())).amax(0)
        self._differences = (float(found[0]), float(found[1]))
        precisions = {self._config.policy.precision, self._config.generation.precision, self._algorithm.precision}
        if not self._mixed and self.device == "cpu" and precisions == {Precision.float32}:
            require_unit_ratio(self._differences[0], _LARGEST_MISMATCH)
            require_unit_ratio(self._differences[1], _LARGEST_RATIO)
        return False

    def _metrics(self, fitted: Fitted) -> dict[str, float]:
        assert self._differences is not None
        mean = lambda name: fitted.mean(name, "ratios")  # noqa: E731
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
            total = self.group.all_reduce(counts)  # whole numbers: their sum has no order
            metrics["losses/log_ratio"] = Histogram(total.tolist(), LARGEST_LOG_RATIO)
        return metrics | ({"losses/reference_kl": mean("kl")} if self._algorithm.needs_reference else {})


def actor_inputs(algorithm: ReasoningAlgorithmConfig) -> list[str]:
    """Returns the stages whose data an actor gets, in the order of the edges."""
    needed = {
        "old_log_probs": algorithm.num_steps > 1,
        "reference": algorithm.needs_reference,
        "critic": algorithm.name is ReasoningName.ppo,
    }
    return ["generation", "reward", *(stage for stage, there in needed.items() if there)]
