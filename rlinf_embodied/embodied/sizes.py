"""Whether a policy fits the observations and actions of an env: asked of the env before anything is profiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import trained_under
from rlinf_embodied.embodied.warm_start_stage import for_demonstrations
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.flow.graph import StageSpec, Workflow
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.runtime.host import StageContext
from rlinf_embodied.runtime.session import Session, of_type

_STAGE = "env_sizes"
_SIZES = {
    "action_dim": "actions",
    "proprio_dim": "proprioception",
    "privileged_dim": "the state that a critic sees",
}
_DECIDES_SIZES = ("_target_", "task", "control_mode", "robot", "options")


class EnvSizesStage:
    """Builds an env of one row, and tells what it is."""

    def __init__(self, config: EnvConfig) -> None:
        """Takes plain data."""
        self._config = config

    def setup(self, context: StageContext) -> EnvSpec:
        """Returns the facts about the env, which is gone then."""
        bare = replace(self._config, cameras=[])  # images have a size of their own, which the fingerprint compares
        env = make_env(for_demonstrations(bare), 1, context.device)
        env.close()
        return env.spec


def require_sizes(path: str, folder: Path, env: EnvConfig, session: Session, cluster: Cluster) -> None:
    """Checks that the policy in a folder fits an env; where both are of one task and robot, nothing is built for it.

    Args:
        path: of the folder in the config, for errors.
        folder: of the policy.
        env: that it is to act in.
        session: where an env can be built.
        cluster: its devices.

    Raises:
        CheckpointError: vectors of the two differ in size.
    """
    theirs = trained_under(str(folder)).env
    if all(getattr(theirs, name) == getattr(env, name) for name in _DECIDES_SIZES):
        return
    workflow = Workflow("env sizes", 1, {_STAGE: StageSpec(_STAGE, f"{__name__}.EnvSizesStage", env)})
    executor = Executor.on_all_devices(workflow, session, cluster)
    (ours,) = of_type(executor.facts[_STAGE], EnvSpec)
    session.clear()
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    differences = differing_sizes(described.get("env", {}), ours)
    if differences:
        raise CheckpointError(
            f"{path} is {str(folder)!r}, a policy for {theirs.task}, but {env.task} has other sizes: "
            f"{'; '.join(differences)}. Use a checkpoint of {env.task}, or another way to a starting policy "
            "(docs/warm_start.md)"
        )


def differing_sizes(saved: Mapping[str, object], env: EnvSpec) -> list[str]:
    """Returns what differs, as "actions has 7 numbers there and 8 here"; what `saved` lacks may be anything."""
    here = asdict(env)
    return [
        f"{what} has {saved[name]} numbers there and {here[name]} here"
        for name, what in _SIZES.items()
        if name in saved and saved[name] != here[name]
    ]
