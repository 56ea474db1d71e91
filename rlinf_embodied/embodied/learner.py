"""The learner as a stage: it gives the data of its blocks to an algorithm, which makes new weights of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.algorithms.batch import EnvColumns, PolicyColumns, Rollouts, TwoLevelColumns
from rlinf_embodied.algorithms.transitions import Columns, length
from rlinf_embodied.config import AlgorithmConfig, Source
from rlinf_embodied.device import require_precision
from rlinf_embodied.embodied.hierarchy import HIGH_FOLDER, TwoLevelConfig
from rlinf_embodied.embodied.policy_folder import CONDITIONS, load_policy, save_conditions, save_policy
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig, computed_in
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.learning.learner_stage import LearnerStage, StagePart
from rlinf_embodied.learning.reduce import make_reducer
from rlinf_embodied.learning.weights import SharedPolicy, require_version, state_bytes
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device

_CHECKPOINT = ("state.json", "manifest.json")  # of a folder that is a whole checkpoint
View = Callable[[TwoLevelColumns, EnvColumns], tuple[PolicyColumns, EnvColumns]]


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """What the stage needs to know."""

    model: PolicyStageConfig
    algorithm: AlgorithmConfig
    num_iterations: int
    view: View | None = None  # of two levels of policies: which columns are this one's
    counts_ratios: bool = False  # whether metrics have a histogram of log ratios
    both: TwoLevelConfig | None = None  # of the high level: its checkpoints hold the low-level policy, too


class PolicyLearner(LearnerStage):
    """Updates the policy by an algorithm; data-parallel over the workers that host it."""

    user = "actor"

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> int:
        """Loads the policy (or takes its worker's copy) and makes the algorithm; returns the bytes of the weights.

        Raises:
            ObjectiveError: the policy has nothing to train.
            ConfigError: the algorithm cannot train it, or the device does not compute in algorithm.precision.
        """
        config, model, algorithm = self._config, self._config.model, self._config.algorithm
        require_precision(algorithm.precision, context.device)
        found = context.share(model.name, lambda: load_policy(model.policy, model.folder, context.device))
        shared = cast(SharedPolicy[Policy], found)
        shared.enter(self.user)
        computing = lambda policy: computed_in(algorithm.precision, policy, model.policy, context.device)  # noqa: E731
        training = Training(
            algorithm=algorithm,
            policy=computing(shared.policy),
            settings=model.policy,
            seed=model.seed,
            block_size=model.env.block_size,
            num_iterations=config.num_iterations,
            exact=model.exact,
            reducer=make_reducer(algorithm.reduction, context.group, context.owners, context.device),
            context=context,
            counts_ratios=config.counts_ratios and not algorithm.compile,  # a compiled pass gives sums alone
            copy=lambda: computing(load_policy(model.policy, model.folder, "cpu").policy),
        )
        self._made = made = cast(Algorithm, algorithm.make(training))
        prefix = "" if config.both is None else "high_"  # one checkpoint holds both levels' optimizers
        learners = {prefix + name: learner for name, learner in made.learners.items()}
        modules = {prefix + name: module for name, module in made.modules.items()}
        self.hold(shared, context.group, context.device, learners, modules, policy=model.name)
        return state_bytes(shared.policy.module)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Makes one iteration's update and reports its metrics.

        A block's payloads are (policy columns of all rounds, env columns of all rounds), or from the replay buffer one
        payload with batches, empty while it fills.

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
        return Output(dict.fromkeys(inputs), metrics)

    def _rollouts(self, step_context: StepContext, found: Mapping[int, list[Any]]) -> dict[int, Rollouts]:
        """Splits payloads [policy columns of each round, env columns of each round] into pairs."""
        view, rollouts = self._config.view, dict[int, Rollouts]()
        for block, payloads in found.items():
            half = len(payloads) // 2
            pairs = zip(payloads[:half], payloads[half:], strict=True)
            rollouts[block] = [pair if view is None else view(*pair) for pair in pairs]
        versions = {columns.version for parts in rollouts.values() for columns, _ in parts}
        require_version(versions, self.shared.version, step_context.staleness)
        return rollouts

    def write_policy(self, folder: Path) -> None:
        """Writes the policy; the high level in `high/`, next to the low-level one as it is while nobody trains it."""
        model, both, precision = self._config.model, self._config.both, self._config.algorithm.precision
        own = folder if both is None else folder / HIGH_FOLDER
        save_policy(self.shared.policy, own, model.env, model.policy, self.device, precision)
        if both is not None:
            for name, content in _files(Path(both.low.folder)).items():
                if name not in _CHECKPOINT:
                    (folder / name).write_bytes(content)
            low = both.low
            save_conditions(folder, model.env, low.policy, self.device, both.hierarchy, low.precision)

    def state_part(self, step_context: StepContext) -> StagePart | None:
        """Returns the low level's part of a checkpoint that the high level writes, with the policy's files.

        The conditions are those of both levels, and the high level's to write.
        """
        part = super().state_part(step_context)
        if part is None:
            return None
        with tempfile.TemporaryDirectory(prefix="rlinf_embodied-") as folder:
            self.write_policy(Path(folder))
            files = _files(Path(folder))
            return replace(part, files={name: files[name] for name in files if name != CONDITIONS})


def _files(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder by name, without those below it."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
