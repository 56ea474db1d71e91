"""The policy of the higher of two levels: whether it can be, and what it starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EnvConfig, HierarchyConfig, TrainConfig
from rlinf_embodied.config.checks import require, within
from rlinf_embodied.embodied.hierarchy import choice_spec
from rlinf_embodied.embodied.new_policy import NewPolicyConfig, NewPolicyStage
from rlinf_embodied.embodied.policy_check import new_policy, require_policy_class
from rlinf_embodied.embodied.policy_folder import PHYSICS, require_conditions, require_policy_folder, trained_under
from rlinf_embodied.embodied.sizes import differing_sizes, env_facts, saved_sizes
from rlinf_embodied.embodied.warm_start import new_policy as new_policy_folder
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.policies import Policy
from rlinf_embodied.runtime.session import Session


def levels_note(hierarchy: HierarchyConfig, env: EnvConfig) -> list[str]:
    """Returns a line that says what the high-level policy chooses and how often; no line without such a policy."""
    if not hierarchy.on:
        return []
    what = f"one of {len(hierarchy.choices)}" if hierarchy.choices else f"a point of {hierarchy.size} numbers"
    kind = "instructions" if hierarchy.instructions else "goals" if hierarchy.choices else "as the goal"
    stays = "stays as it is" if hierarchy.frozen else "learns, too"
    steps = hierarchy.every * env.executed
    return [f"levels   the higher one chooses {what} {kind} every {steps} env steps; the lower one {stays}"]


def require_high_level(hierarchy: HierarchyConfig, env: EnvConfig, kind: str) -> None:
    """Checks the high-level policy's class and the checkpoint that it starts from; `kind` is of the devices.

    Raises:
        ConfigError: hierarchy.policy names no policy, or has options that it does not know.
        CheckpointError: hierarchy.checkpoint holds no policy of this project, or one that makes other choices, or was
            trained under other conditions.
    """
    with within("hierarchy"):
        require_policy_class(hierarchy.policy, cloned=False)
    if hierarchy.checkpoint is not None:
        require_policy_folder("hierarchy.checkpoint", hierarchy.checkpoint)
        theirs = trained_under(hierarchy.checkpoint).env.task
        rule = f"that policy was trained in {theirs}, and this run is in {env.task}"
        require(theirs == env.task, "hierarchy.checkpoint", hierarchy.checkpoint, rule, "use one of this task")
        _require_choices(hierarchy, hierarchy.checkpoint)
        free = ("camera_fov", "chunk", "horizon")
        conditions = ("hierarchy.checkpoint", Path(hierarchy.checkpoint), env, hierarchy.policy, kind)
        require_conditions(*conditions, free, logged=PHYSICS)


def _require_choices(hierarchy: HierarchyConfig, checkpoint: str) -> None:
    """Checks that a policy was made for such choices: with others it would run, and some would never be made."""
    theirs = saved_sizes(Path(checkpoint))
    ours = {"action_dim": hierarchy.size, "categorical": bool(hierarchy.choices), "chunk": 1}
    unlike = {name: getattr(theirs, name) for name, value in ours.items() if getattr(theirs, name, value) != value}
    if unlike:
        raise CheckpointError(
            f"hierarchy.checkpoint is {checkpoint!r}, a policy with {unlike}, but these choices need {ours}: give the "
            "folder high/ of a checkpoint of two levels with the same choices, or leave it out"
        )


@dataclass(frozen=True, slots=True)
class NewHighLevelConfig(NewPolicyConfig):
    """What the stage needs to know."""

    hierarchy: HierarchyConfig = field(default_factory=HierarchyConfig)


class NewHighLevelStage(NewPolicyStage):
    """Makes a policy whose actions are choices."""

    def __init__(self, config: NewHighLevelConfig) -> None:
        super().__init__(config)
        self._hierarchy = config.hierarchy

    def _acts_in(self, env: EnvSpec) -> EnvSpec:
        return choice_spec(env, self._hierarchy)

    def _policy(self, env: EnvSpec) -> Policy:
        """Returns a new policy for the choices in an env.

        Raises:
            ConfigError: the columns of a goal are none of the env's.
        """
        _require_columns(self._hierarchy, env)
        with within("hierarchy"):
            return new_policy(self._config.policy, self._acts_in(env), self._config.seed, self._device)


def _require_columns(hierarchy: HierarchyConfig, env: EnvSpec) -> None:
    for name, columns in (("columns", hierarchy.columns), ("way_columns", hierarchy.way_columns)):
        rule = f"the proprioception of {env.task} has the columns 0..{env.proprio_dim - 1}"
        require(max(columns, default=-1) < env.proprio_dim, f"hierarchy.{name}", columns, rule, "name others")


def starting_high_level(config: TrainConfig, session: Session, cluster: Cluster, spare: Path | None = None) -> Path:
    """Returns the folder that the high-level policy starts from: the one that is given, or that of a new one.

    Raises:
        ConfigError: the columns of a goal are none of the env's.
        CheckpointError: the given policy is for observations of other sizes.
    """
    hierarchy = config.hierarchy
    if hierarchy.checkpoint is not None:
        folder, env = Path(hierarchy.checkpoint), env_facts(config.env, session, cluster)
        _require_columns(hierarchy, env)
        if differences := differing_sizes(saved_sizes(folder), choice_spec(env, hierarchy)):
            raise CheckpointError(
                f"hierarchy.checkpoint is {hierarchy.checkpoint!r}, but this run has other sizes: "
                f"{'; '.join(differences)}: use one that was trained in this env, or leave it out"
            )
        return folder
    asked = NewHighLevelConfig(config.env, hierarchy.policy, config.run.seed, hierarchy=hierarchy)
    of_choices = {name: getattr(hierarchy, name) for name in ("instructions", "goals", "columns")}
    more, target = {"level": "high", **of_choices}, f"{__name__}.NewHighLevelStage"
    return new_policy_folder(asked, config.warm_start.cache_dir, session, cluster, spare, more, target)
