"""Whether a policy fits the observations and actions of an env: asked of the env before anything is profiled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.demonstrations import for_demonstrations
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import trained_under
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.runtime.host import StageContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.workflow.graph import StageSpec, Workflow

_STAGE = "env_sizes"
_SIZES = {
    "action_dim": "actions",
    "proprio_dim": "proprioception",
    "privileged_dim": "the state that a critic sees",
}
_ACTS_ON = ("action_dim", "proprio_dim")  # of a policy that sees; one without cameras acts on the state as well
_DECIDES_SIZES = ("_target_", "task", "control_mode", "robot", "options")


class EnvSizesStage:
    """Builds an env of one row for its facts."""

    def __init__(self, config: EnvConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> EnvSpec:
        """Returns the facts about the env, which is gone then."""
        bare = replace(self._config, cameras=[])  # images have a separate size, which the fingerprint compares
        env = make_env(for_demonstrations(bare), 1, context.device)
        env.close()
        return env.spec


def env_facts(env: EnvConfig, session: Session, cluster: Cluster) -> EnvSpec:
    """Returns the facts about an env, which is built for them, without its cameras; the session is left empty."""
    workflow = Workflow("env sizes", 1, {_STAGE: StageSpec(_STAGE, f"{__name__}.EnvSizesStage", env)})
    (facts,) = of_type(Executor.on_all_devices(workflow, session, cluster).facts[_STAGE], EnvSpec)
    session.clear()
    return facts


def require_sizes(path: str, folder: Path, env: EnvConfig, session: Session, cluster: Cluster) -> None:
    """Checks that the policy in a folder, `path` of the config, fits an env, which is built where that may differ.

    Raises:
        CheckpointError: vectors of the two differ in size.
    """
    theirs = trained_under(str(folder)).env
    if all(getattr(theirs, name) == getattr(env, name) for name in _DECIDES_SIZES):
        return
    if found := differing_sizes(saved_sizes(folder), env_facts(env, session, cluster)):
        raise CheckpointError(
            f"{path} is {str(folder)!r}, a policy for {theirs.task}, but {env.task} has other sizes: "
            f"{'; '.join(found)}. Use a checkpoint of {env.task}, or another way to a starting policy "
            "(docs/warm_start.md)"
        )


def require_acting(folder: Path, env: EnvSpec) -> None:
    """Checks that the policy in a folder, `checkpoint` of the config, can act in an env that has been built.

    Raises:
        CheckpointError: what it sees, or the actions that it gives, have another size there.
    """
    if found := differing_sizes(saved_sizes(folder), env, _ACTS_ON if env.cameras else _SIZES):
        raise CheckpointError(
            f"checkpoint is {str(folder)!r}, but {env.task} has other sizes than the env of its training: "
            f"{'; '.join(found)}. No setting makes them fit, nor does allow_mismatch=true: use the env that it was "
            "trained in, or another checkpoint"
        )


def require_shapes(folder: str, env: EnvConfig) -> None:
    """Checks what the config alone says about the shapes of a policy's input and output, before an env is built.

    Raises:
        CheckpointError: chunks, or the pictures that the policy sees, have another shape there.
    """
    theirs = trained_under(folder).env
    sizes = {"chunk": (theirs.chunk, env.chunk), "number of cameras": (len(theirs.cameras), len(env.cameras))}
    if theirs.cameras and env.cameras:
        sizes["obs_size"] = (theirs.obs_size, env.obs_size)
    differences = [f"{name} is {there} there and {here} here" for name, (there, here) in sizes.items() if there != here]
    if differences:
        raise CheckpointError(
            f"checkpoint is {folder!r}, a policy for other shapes than this evaluation has: {'; '.join(differences)}. "
            "No setting makes them fit, nor does allow_mismatch=true: leave out what overrides the checkpoint's own "
            "env.chunk, env.cameras and env.obs_size"
        )


def saved_sizes(folder: Path) -> Mapping[str, object]:
    """Returns the sizes of the env for which a policy was made; {} where its folder does not tell."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("env", {})


def differing_sizes(saved: Mapping[str, object], env: EnvSpec, names: Iterable[str] = _SIZES) -> list[str]:
    """Returns what differs, as "actions has 7 numbers there and 8 here"; what `saved` lacks may be anything."""
    here = asdict(env)
    return [
        f"{what} has {saved[name]} numbers there and {here[name]} here"
        for name, what in _SIZES.items()
        if name in names and name in saved and saved[name] != here[name]
    ]
