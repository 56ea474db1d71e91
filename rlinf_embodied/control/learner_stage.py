"""The learner as a stage: batches of transitions in, new weights out, and all the state that training has.

    batches of every block, columns [U, R, ...] --> U updates, each a sum over all blocks --> new version

What an update is, which networks it trains and what of them is state beside the policy is an algorithm's (`Updates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor, nn

from rlinf_embodied.config import ControlAlgorithmConfig, ControlName, EnvConfig
from rlinf_embodied.control.cloning_updates import CloningUpdates
from rlinf_embodied.control.implicit_updates import ImplicitUpdates
from rlinf_embodied.control.soft_updates import SoftUpdates
from rlinf_embodied.control.transitions import Columns, length
from rlinf_embodied.embodied.carry_over import flatten_carry_over, unflatten_carry_over
from rlinf_embodied.embodied.policy_folder import load_policy, save_policy
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig
from rlinf_embodied.interfaces.envs import RunningEpisode
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.learning.checkpoint import load_tensors, weights_sha256
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.reduce import Reducer, make_reducer
from rlinf_embodied.learning.shared_policy import SharedPolicy
from rlinf_embodied.learning.snapshot import StageState
from rlinf_embodied.learning.training_state import TrainingState
from rlinf_embodied.learning.weights import WeightsMessage, export_weights
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device

_CARRY_OVER = "carry_over"


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


class LearnerStage:
    """Updates the policy and what belongs to it; data-parallel over the workers that host it."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Loads the policy (or takes its worker's copy) and makes what learns.

        Raises:
            ConfigError: the policy cannot be trained by the algorithm.
        """
        model, algorithm = self._config.model, self._config.algorithm
        shared = context.share("policy", lambda: load_policy(model.policy, model.folder, context.device))
        self._shared = cast(SharedPolicy[Policy], shared)
        self._shared.enter("learner")
        self._policy, self._rank, self._device = self._shared.policy, context.group.rank, context.device
        reducer = make_reducer(algorithm.reduction, context.group, context.owners, context.device)
        self._updates = updates = _UPDATES[algorithm.name](self._policy, algorithm, reducer, model.seed)
        self._training = TrainingState(self._shared, self._rank, updates.learners, updates.modules)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes the updates of an iteration from one payload of batches per block; none of empty ones."""
        batches = {b: cast(Columns, to_device(payload, self._device)) for b, (payload,) in inputs.items()}
        metrics: dict[str, float] = {"losses/updates": 0.0}
        if all(batches.values()):
            metrics = self._updates.run(step_context.iteration, batches)
            metrics["losses/updates"] = float(length(next(iter(batches.values()))))
        self._shared.version = step_context.iteration + 1
        return Output(dict.fromkeys(inputs), LearnerReport(metrics, self._shared.version))

    # ------------------------------------------------------------------------------------------------ context switch
    def offload(self, step_context: StepContext) -> None:
        """Leaves the device's memory; the policy's weights stay if the rollout uses them."""
        self._shared.leave("learner")
        self._training.move("cpu")

    def onload(self, step_context: StepContext) -> None:
        self._shared.enter("learner")
        self._training.move(self._device)

    # --------------------------------------------------------------------------------------------- weights and state
    def export_weights(self, step_context: StepContext) -> WeightsMessage:
        """Returns the policy's weights with their version and checksum."""
        return export_weights(self._policy.module, self._shared.version, whole=False)

    def weights_digest(self, step_context: StepContext) -> str:
        """Returns the SHA-256 of all weights: the policy's, and those that only the learner has."""
        own = {f"{n}/{key}": t for n, module in self._updates.modules.items() for key, t in module.state_dict().items()}
        return weights_sha256({**self._policy.module.state_dict(), **own})

    def save(
        self, step_context: StepContext, argument: tuple[str, int, int, dict[str, object], str], *parts: object
    ) -> None:
        """Begins a checkpoint (the first worker does).

        Args:
            step_context: of the iteration that is to come.
            argument: (root, step, keep, JSON state, name of the replay buffer's tensors).
            parts: what the workers of the env and of the replay buffer published: episodes by block, tensors by name.
        """
        tensors = self._training.export()
        if self._rank != 0:
            return
        root, step, keep, state, replay = argument
        carried: dict[int, list[RunningEpisode | None]] = {}
        held: dict[str, Tensor] = {}
        for part in cast("Sequence[dict]", parts):
            if any(isinstance(key, int) for key in part):
                carried |= part
            else:
                held |= part
        tensors |= {replay: held} if held else {}
        tensors |= {_CARRY_OVER: flatten_carry_over(carried)} if carried else {}
        policy, config = self._policy, self._config

        def write_policy(folder: Path) -> None:
            save_policy(policy, folder, config.env, config.model.policy, self._device)

        self._training.write((root, step, keep), write_policy, tensors, state | {"blocks": sorted(carried)})

    def wait_saved(self, step_context: StepContext) -> None:
        """Returns when the checkpoint that was begun last is on the disk."""
        self._training.wait()

    def teardown(self) -> None:
        """Returns when nothing is being written."""
        self._training.leave()

    def load(self, step_context: StepContext, folder: str) -> None:
        """Restores networks, learners and version; the policy's weights were loaded with it."""
        self._training.load(folder, step_context.iteration)

    def load_carry_over(self, step_context: StepContext, folder: str) -> dict[int, list[RunningEpisode | None]]:
        """Returns what the env carried over, {} if nothing."""
        return unflatten_carry_over(load_tensors(Path(folder), _CARRY_OVER), self._config.env.block_size)

    def export_snapshot(self, step_context: StepContext) -> StageState | None:
        """Returns weights, networks and moments (the first worker does)."""
        return self._training.snapshot()

    def import_snapshot(self, step_context: StepContext, parts: Sequence[StageState | None]) -> None:
        self._training.go_on_from(parts)
