"""The learner as a stage: policy epochs over the completions of all blocks, and all the state that training has.

With one optimizer step per iteration a block's gradient depends on nothing but the block: it is computed as soon as the
block arrives, while others are still being generated, and the last chunk's call adds all up and makes the step.  With
more steps everything waits for the last chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.losses import require_unit_ratio
from rlinf_embodied.config import MathConfig, Precision, ReasoningName, Reduction
from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.learning.checkpoint import load_tensors, save, weights_sha256
from rlinf_embodied.learning.optimizer import FlatOptimizer, linear_decay
from rlinf_embodied.learning.reduce import ExactReducer, FastReducer, Reducer
from rlinf_embodied.learning.update import block_sums, minibatch_step, slices, split_sums, step_from
from rlinf_embodied.learning.weights import WeightsMessage, export_weights
from rlinf_embodied.reasoning.generation_stage import LanguageStage, LanguageStageConfig
from rlinf_embodied.reasoning.objective import STATISTICS, Objective
from rlinf_embodied.reasoning.policy_folder import save_policy
from rlinf_embodied.reasoning.training_rows import Round, TrainingRows, training_rows
from rlinf_embodied.runtime.host import Output, StageContext, Tick
from rlinf_embodied.runtime.tensor_wire import to_device

# differences of log-probs at the same weights, in float32 on a CPU
_LARGEST_MISMATCH = 1e-3  # of generation and training: other kernels
_LARGEST_RATIO = 1e-4  # of two passes of training over the same completions in other batches


@dataclass(frozen=True, slots=True)
class ActorStageConfig:
    """What the stage needs to know."""

    held: LanguageStageConfig
    config: MathConfig
    inputs: tuple[str, ...]  # stages whose data it gets, in the order of the edges


@dataclass(frozen=True, slots=True)
class ActorReport:
    """What the driver learns of an update; nothing before the last chunk."""

    metrics: dict[str, float]
    version: int


class ActorStage(LanguageStage):
    """Updates the language model; data-parallel over the workers that host it."""

    _user = "actor"

    def __init__(self, config: ActorStageConfig) -> None:
        """Takes plain data; `setup` loads the policy."""
        super().__init__(config.held)
        self._config, self._algorithm = config.config, config.config.algorithm
        self._inputs = config.inputs
        self._sums: dict[int, Tensor] = {}
        self._rows: dict[int, TrainingRows | None] = {}

    def setup(self, context: StageContext) -> None:
        """Loads the policy (or takes its worker's copy) and makes the optimizer."""
        super().setup(context)
        algorithm = self._algorithm
        self._rank = context.group.rank
        exact = algorithm.reduction is Reduction.exact
        self._reducer: Reducer = (ExactReducer if exact else FastReducer)(context.group, context.owners)
        self._optimizer = FlatOptimizer(
            self._shared.policy.parameters(),
            algorithm.lr,
            betas=(0.9, algorithm.beta2),
            max_grad_norm=algorithm.max_grad_norm,
        )

    # -------------------------------------------------------------------------------------------------------- update
    def run(self, tick: Tick, inputs: Mapping[int, list[object]]) -> Output:
        """Takes the blocks of a chunk, and with the last one makes the iteration's update.

        Raises:
            ObjectiveError: completions come from other weights, or their log-probs differ too much from training's.
        """
        if tick.chunk == 0:
            self._rows, self._sums = {}, {}
            self._objective = self._new_objective()
        ppo = self._algorithm.name is ReasoningName.ppo
        warming = ppo and tick.iteration < self._algorithm.critic_warmup_iterations
        for block in sorted(inputs):
            self._rows[block] = self._rows_of(tick, block, inputs[block])
            if self._algorithm.num_steps == 1 and not warming:
                rows = self._rows[block]
                self._sums[block] = self._block_sums(block, rows, None if rows is None else torch.arange(len(rows)))
        made = dict.fromkeys(inputs)
        if tick.chunk < tick.num_chunks - 1:
            return Output(made, ActorReport({}, self._shared.version))
        metrics = {} if warming else self._update(tick)
        metrics["rollout/useful_groups"] = self._total({b: r.num_groups if r else 0 for b, r in self._rows.items()})
        self._rows, self._sums = {}, {}
        self._shared.version = tick.iteration + 1
        return Output(made, ActorReport(metrics, self._shared.version))

    def _new_objective(self) -> Objective:
        generation = self._config.generation
        return Objective(
            self._shared.policy, self._algorithm, generation.temperature, generation.max_new_tokens, largest={}
        )

    def _rows_of(self, tick: Tick, block: int, payloads: list[object]) -> TrainingRows | None:
        rounds = _rounds([to_device(payload, self._device) for payload in payloads], self._inputs)
        versions = {r.completions.version for r in rounds}
        versions |= {part.version for r in rounds for part in (r.proximal,) if part is not None}
        if versions != {self._shared.version}:
            raise ObjectiveError(
                f"completions or log-probs come from weights of version {sorted(versions)}, but the actor has "
                f"{self._shared.version}: the weights were not installed"
            )
        kept = None
        if self._algorithm.dynamic_sampling:
            chosen = cast("tuple[tuple[int, int, int], ...]", tick.message)
            kept = [(number, group) for number, of_block, group in chosen if of_block == block]
        return training_rows(rounds, self._algorithm, kept)

    def _block_sums(self, block: int, rows: TrainingRows | None, index: Tensor | None) -> Tensor:
        parts = () if rows is None or index is None else self._objective.parts(block, rows, index, self._device)
        return block_sums(parts, self._optimizer.parameters, len(STATISTICS))

    def _update(self, tick: Tick) -> dict[str, float]:
        algorithm = self._algorithm
        self._optimizer.lr = linear_decay(
            tick.iteration, self._config.run.num_iterations, algorithm.lr, algorithm.lr_end_fraction
        )
        self._differences = (0.0, 0.0)
        made = [self._one_step()] if algorithm.num_steps == 1 else self._several_steps(tick)
        total = torch.stack([statistics.cpu() for statistics, _ in made]).sum(0)
        return self._metrics(total, [norm for _, norm in made if norm is not None])

    def _one_step(self) -> tuple[Tensor, float | None]:
        sums = split_sums(self._reducer.sum_blocks(self._sums), self._optimizer.parameters)
        statistics, _, norm = step_from(sums, self._optimizer, self._check_first)
        return statistics, norm

    def _several_steps(self, tick: Tick) -> list[tuple[Tensor, float | None]]:
        """Returns (statistics, norm) of each step."""
        parts, seed, made = self._algorithm.num_minibatches, self._held.seed, []
        for epoch in range(self._algorithm.epochs):
            sizes = {block: 0 if rows is None else len(rows) for block, rows in self._rows.items()}
            cut = {b: slices(seed, "policy", tick.iteration, epoch, b, n, parts) for b, n in sizes.items()}
            for k in range(parts):
                rows = {block: pieces[k] for block, pieces in cut.items()}
                veto = None if made else self._check_first
                statistics, _, norm = minibatch_step(
                    rows, self._minibatch_loss, self._optimizer, len(STATISTICS), self._reducer, veto
                )
                made.append((statistics, norm))
        return made

    def _minibatch_loss(self, block: int, index: Tensor):
        rows = self._rows[block]
        assert rows is not None
        return self._objective.parts(block, rows, index, self._device)

    def _check_first(self, statistics: Tensor, weight: float) -> bool:
        """Measures what differs between passes over the same completions at the same weights; forbids nothing.

        Raises:
            ObjectiveError: it is more than rounding, on a CPU in float32.
        """
        own = {block: self._objective.largest.get(block, torch.zeros(2)) for block in self._rows}
        found = torch.stack(list(self._reducer.gather_blocks(own).values())).amax(0)
        self._differences = (float(found[0]), float(found[1]))
        if self._device == "cpu" and self._config.policy.precision is Precision.float32:
            require_unit_ratio(self._differences[0], _LARGEST_MISMATCH)
            require_unit_ratio(self._differences[1], _LARGEST_RATIO)
        return False

    def _total(self, numbers: Mapping[int, int]) -> float:
        own = {block: torch.tensor([float(number)]) for block, number in numbers.items()}
        return sum(float(value[0]) for value in self._reducer.gather_blocks(own).values())

    def _metrics(self, total: Tensor, norms: Sequence[float]) -> dict[str, float]:
        sums = dict(zip(STATISTICS, total.tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        mean = lambda name: sums[name] / tokens  # noqa: E731
        return {
            "losses/policy_loss": sums["loss"] / max(sums["weight"], 1.0),
            "losses/approx_kl": mean("approx_kl"),
            "losses/clipfrac": mean("clipped"),
            "losses/entropy": mean("entropy"),
            "losses/grad_norm": sum(norms) / max(len(norms), 1),
            "losses/mismatch_mean": mean("mismatch"),
            "losses/mismatch_max": self._differences[0],
            "losses/initial_log_ratio": self._differences[1],
            "losses/mismatch_kl": mean("mismatch_kl"),
            "losses/mismatch_ratio": mean("ratio"),
            "losses/importance_capped": mean("capped"),
            "charts/learning_rate": self._optimizer.lr,
            "charts/optimizer_steps": float(len(norms)),
        } | ({"losses/reference_kl": mean("kl")} if self._algorithm.kl_coef else {})

    # ------------------------------------------------------------------------------------------------ context switch
    def offload(self, tick: Tick) -> None:
        """Leaves the device's memory with the optimizer's state; the weights stay if generation uses them."""
        super().offload(tick)
        self._optimizer.move_state("cpu")

    def onload(self, tick: Tick) -> None:
        """Comes back."""
        super().onload(tick)
        self._optimizer.move_state(self._device)

    # --------------------------------------------------------------------------------------------- weights and state
    def export_weights(self, tick: Tick) -> WeightsMessage:
        """Returns all weights with their version and checksum."""
        return export_weights(self._shared.policy.module, self._shared.version)

    def weights_digest(self, tick: Tick) -> str:
        """Returns the SHA-256 of all weights."""
        return weights_sha256(self._shared.policy.module.state_dict())

    def save(self, tick: Tick, argument: tuple[str, int, int, dict[str, object], dict[str, dict[str, Tensor]]]) -> None:
        """Writes a checkpoint (the first worker does): (root, step, keep, JSON state, what other stages add)."""
        if self._rank != 0:
            return
        root, step, keep, state, tensors = argument
        own = {"policy_optimizer": self._optimizer.export_state()}
        if self._config.policy.lora.rank:  # the folder holds merged weights, from which adapters cannot be had back
            own["policy_module"] = self._shared.policy.module.state_dict()
        policy, config = self._shared.policy, self._config
        save(
            *(Path(root), step),
            policy_writer=lambda folder: save_policy(policy, folder, config),
            tensors=own | tensors,
            state=state | {"version": self._shared.version},
            keep=keep,
        )

    def load(self, tick: Tick, folder: str) -> None:
        """Restores optimizer, adapters and version; the weights were loaded with the policy."""
        self._optimizer.import_state(load_tensors(Path(folder), "policy_optimizer"))
        module = load_tensors(Path(folder), "policy_module")
        if module:
            self._shared.policy.module.load_state_dict(module)
        self._shared.version = tick.iteration


def _rounds(payloads: Sequence[object], inputs: Sequence[str]) -> list[Round]:
    """Sorts a block's payloads (edge by edge, rounds within an edge) into rounds."""
    count = len(payloads) // len(inputs)
    by_stage = {stage: payloads[i * count : (i + 1) * count] for i, stage in enumerate(inputs)}
    names = {"completions": "generation", "rewards": "reward", "proximal": "proximal", "reference": "reference"}
    names["advantages"] = "critic"
    found = {name: by_stage[stage] for name, stage in names.items() if stage in by_stage}
    return [Round(**{name: parts[k] for name, parts in found.items()}) for k in range(count)]  # pyright: ignore[reportArgumentType]
