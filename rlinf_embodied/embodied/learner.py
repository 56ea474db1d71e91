"""The learner as a stage: it gives the data of its blocks to an algorithm, which makes new weights of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.batch import EnvColumns, PolicyColumns, Rollouts, TwoLevelColumns
from rlinf_embodied.algorithms.transitions import Columns, length
from rlinf_embodied.config import AlgorithmConfig, EnvConfig, Source
from rlinf_embodied.device import require_precision
from rlinf_embodied.embodied.hierarchy import HIGH_FOLDER, LowLevelFiles, read_files
from rlinf_embodied.embodied.policy_folder import load_policy, save_conditions, save_policy
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig, computed_in
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.learner_stage import LearnerStage, StagePart
from rlinf_embodied.learning.reduce import make_reducer
from rlinf_embodied.learning.shared_policy import SharedPolicy
from rlinf_embodied.learning.weights import require_version
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device

CARRY_OVER = "carry_over"  # of the env, in a checkpoint
View = Callable[[TwoLevelColumns, EnvColumns], tuple[PolicyColumns, EnvColumns]]


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """What the stage needs to know."""

    model: PolicyStageConfig
    algorithm: AlgorithmConfig
    env: EnvConfig
    num_iterations: int
    exact: bool
    view: View | None = None  # of two levels of policies: which columns are this one's
    low: LowLevelFiles | None = None  # of the high level: the other policy of its checkpoints


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """What the driver learns of an update."""

    metrics: dict[str, float]
    version: int


class PolicyLearner(LearnerStage):
    """Updates the policy by an algorithm; data-parallel over the workers that host it."""

    user = "actor"

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Loads the policy (or takes its worker's copy) and makes the algorithm.

        Raises:
            ObjectiveError: the policy has nothing to train.
            ConfigError: the algorithm cannot train it, or the device does not compute in algorithm.precision.
        """
        config, model, algorithm = self._config, self._config.model, self._config.algorithm
        require_precision(algorithm.precision, context.device)
        found = context.share(model.name, lambda: load_policy(model.policy, model.folder, context.device))
        shared = cast(SharedPolicy[Policy], found)
        shared.enter(self.user)
        training = Training(
            algorithm=algorithm,
            policy=self._computing(shared.policy, context.device),
            settings=model.policy,
            seed=model.seed,
            block_size=model.block_size,
            num_iterations=config.num_iterations,
            exact=config.exact,
            reducer=make_reducer(algorithm.reduction, context.group, context.owners, context.device),
            context=context,
            copy=lambda: self._computing(load_policy(model.policy, model.folder, "cpu").policy, context.device),
        )
        self._made = made = cast(Callable[[Training], Algorithm], load_target(algorithm.implementation))(training)
        prefix = "" if config.low is None else "high_"  # one checkpoint holds both levels' optimizers
        learners = {prefix + name: learner for name, learner in made.learners.items()}
        self.hold(shared, context.group.rank, context.device, learners, made.modules, policy=model.name)

    def _computing(self, policy: Policy, device: str) -> Policy:
        return computed_in(self._config.algorithm.precision, policy, self._config.model.policy, device)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes one iteration's update.

        Args:
            step_context: of the iteration.
            inputs: payloads of this worker's blocks: (policy columns of all rounds, env columns of all rounds), or
                from the replay buffer one payload with batches, empty while it fills.

        Raises:
            ObjectiveError: samples come from another version of the weights, or do not fit those of now.
        """
        found = {b: [to_device(payload, self.device) for payload in payloads] for b, payloads in inputs.items()}
        if self._config.algorithm.learns_from is Source.rollouts:
            metrics = self._made.update(step_context, self._rollouts(step_context, found))
        else:
            batches = {block: cast(Columns, payload) for block, (payload,) in found.items()}
            learns = all(batches.values())
            metrics = self._made.update(step_context, batches) if learns else {}
            metrics["losses/updates"] = float(length(next(iter(batches.values())))) if learns else 0.0
        self.shared.version = step_context.iteration + 1
        return Output(dict.fromkeys(inputs), LearnerReport(metrics, self.shared.version))

    def _rollouts(self, step_context: StepContext, found: Mapping[int, list[Any]]) -> dict[int, Rollouts]:
        rollouts: dict[int, Rollouts] = {block: _pair(payloads) for block, payloads in found.items()}
        if (view := self._config.view) is not None:
            rollouts = {b: [view(cast(TwoLevelColumns, p), env) for p, env in parts] for b, parts in rollouts.items()}
        versions = {columns.version for parts in rollouts.values() for columns, _ in parts}
        require_version(versions, self.shared.version, step_context.staleness)
        return rollouts

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

    def load_carry_over(self, step_context: StepContext, folder: str) -> dict[str, Tensor]:
        """Returns what the env carried over, {} if nothing."""
        return load_tensors(Path(folder), CARRY_OVER)


def _pair(payloads: list[object]) -> Rollouts:
    """Splits [policy columns of each round, env columns of each round] into pairs."""
    half = len(payloads) // 2
    return [
        (cast(PolicyColumns, p), cast(EnvColumns, e)) for p, e in zip(payloads[:half], payloads[half:], strict=True)
    ]
