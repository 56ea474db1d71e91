"""The learner as a stage: batches of transitions in, new weights out, and all the state that training has.

    batches of every block, columns [U, R, ...] --> U updates, each a sum over all blocks --> new version

What an update is, which networks it trains and what of them is state beside the policy is an algorithm's (`Updates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from torch import nn

from rlinf_embodied.config import ControlAlgorithmConfig, ControlName, EnvConfig
from rlinf_embodied.control.cloning_updates import CloningUpdates
from rlinf_embodied.control.implicit_updates import ImplicitUpdates
from rlinf_embodied.control.soft_updates import SoftUpdates
from rlinf_embodied.control.transitions import Columns, length
from rlinf_embodied.embodied.carry_over import CARRY_OVER, unflatten_carry_over
from rlinf_embodied.embodied.policy_folder import load_policy, save_policy
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig
from rlinf_embodied.interfaces.envs import RunningEpisode
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.learner_stage import LearnerStage
from rlinf_embodied.learning.reduce import Reducer, make_reducer
from rlinf_embodied.learning.shared_policy import SharedPolicy
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """What the stage needs to know."""

    model: PolicyStageConfig
    algorithm: ControlAlgorithmConfig
    env: EnvConfig


@dataclass(frozen=True, slots=True)
class LearnerReport:
    """What the driver learns of an iteration's updates."""

    metrics: dict[str, float]
    version: int


class Updates(Protocol):
    """How an algorithm learns; `learners` and `modules` are its state, by their names in a checkpoint."""

    @property
    def learners(self) -> Mapping[str, Learner]:
        """The optimizers."""
        ...

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Networks beside the policy."""
        ...

    def run(self, iteration: int, batches: Mapping[int, Columns]) -> dict[str, float]:
        """Makes the U updates of an iteration from the batches of this worker's blocks and returns metrics."""
        ...


_UPDATES: dict[ControlName, Callable[[Policy, ControlAlgorithmConfig, Reducer, int], Updates]] = {
    ControlName.sac: SoftUpdates,
    ControlName.iql: ImplicitUpdates,
    ControlName.bc: CloningUpdates,
    ControlName.dagger: CloningUpdates,
}


class ControlLearnerStage(LearnerStage):
    """Updates the policy and what belongs to it; data-parallel over the workers that host it."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Loads the policy (or takes its worker's copy) and makes what learns.

        Raises:
            ConfigError: the policy cannot be trained by the algorithm.
        """
        model, algorithm = self._config.model, self._config.algorithm
        shared = cast(
            SharedPolicy[Policy],
            context.share("policy", lambda: load_policy(model.policy, model.folder, context.device)),
        )
        reducer = make_reducer(algorithm.reduction, context.group, context.owners, context.device)
        shared.enter(self.user)
        self._updates = _UPDATES[algorithm.name](shared.policy, algorithm, reducer, model.seed)
        self.hold(shared, context.group.rank, context.device, self._updates.learners, self._updates.modules)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes the updates of an iteration from one payload of batches per block; none of empty ones."""
        batches = {b: cast(Columns, to_device(payload, self.device)) for b, (payload,) in inputs.items()}
        metrics: dict[str, float] = {"losses/updates": 0.0}
        if all(batches.values()):
            metrics = self._updates.run(step_context.iteration, batches)
            metrics["losses/updates"] = float(length(next(iter(batches.values()))))
        self.shared.version = step_context.iteration + 1
        return Output(dict.fromkeys(inputs), LearnerReport(metrics, self.shared.version))

    def write_policy(self, folder: Path) -> None:
        save_policy(self.shared.policy, folder, self._config.env, self._config.model.policy, self.device)

    def load_carry_over(self, step_context: StepContext, folder: str) -> dict[int, list[RunningEpisode | None]]:
        """Returns what the env carried over, {} if nothing."""
        return unflatten_carry_over(load_tensors(Path(folder), CARRY_OVER), self._config.env.block_size)
