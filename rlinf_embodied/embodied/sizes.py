"""Whether a policy fits the observations and actions of an env: asked of the env before anything is profiled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.demonstrations import for_demonstrations
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import trained_under
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.interfaces.envs import EnvSpec, FeatureKind
from rlinf_embodied.runtime.host import StageContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.workflow.graph import StageSpec, Workflow

_STAGE = "env_sizes"
_DECIDES_SIZES = ("_target_", "task", "states", "options")


class EnvSizesStage:
    """Builds an env of one row, and tells what it is."""

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
    executor = Executor.on_all_devices(workflow, session, cluster)
    (facts,) = of_type(executor.facts[_STAGE], EnvSpec)
    session.clear()
    return facts


def require_sizes(path: str, folder: Path, env: EnvConfig, session: Session, cluster: Cluster) -> None:
    """Checks that the policy in a folder fits an env; where both are of one task and robot, nothing is built for it.

    Args:
        path: of the folder in the config, for errors.
        folder: of the policy.
        env: that it is to act in.
        session: where an env can be built.
        cluster: its devices.

    Raises:
        CheckpointError: the two have different actions, state vectors or privileged state.
    """
    theirs = trained_under(str(folder)).env
    if all(getattr(theirs, name) == getattr(env, name) for name in _DECIDES_SIZES):
        return
    differences = differing_sizes(saved_sizes(folder), env_facts(env, session, cluster))
    if differences:
        raise CheckpointError(
            f"{path} is {str(folder)!r}, a policy for {theirs.task}, but {env.task} has other sizes: "
            f"{'; '.join(differences)}. Use a checkpoint of {env.task}, or another way to a starting policy "
            "(docs/warm_start.md)"
        )


def require_acting(folder: Path, env: EnvSpec) -> None:
    """Checks that the policy in a folder, `checkpoint` of the config, can act in an env that has been built.

    Raises:
        CheckpointError: what it sees, or the actions that it gives, have another size there.
    """
    acts_on = (FeatureKind.image, FeatureKind.state) if env.cameras else (FeatureKind.state, FeatureKind.privileged)
    differences = differing_sizes(saved_sizes(folder), env, acts_on)
    if differences:
        raise CheckpointError(
            f"checkpoint is {str(folder)!r}, but {env.task} has other sizes than the env of its training: "
            f"{'; '.join(differences)}. No setting makes them fit, nor does allow_mismatch=true: use the env that it "
            "was trained in, or another checkpoint"
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


def saved_sizes(folder: Path) -> EnvSpec | None:
    """Returns the env for which a policy was made; None where its folder does not tell."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return EnvSpec.of(described["env"]) if "env" in described else None


def differing_sizes(
    saved: EnvSpec | None, env: EnvSpec, kinds: Sequence[FeatureKind] = (FeatureKind.state, FeatureKind.privileged)
) -> list[str]:
    """Returns what differs, as "an action has 7 numbers there and 8 here"; `saved` of None fits anything.

    State vectors differ by name or length.  Images differ by size only: cameras are in the policy's order.
    """
    if saved is None:
        return []
    differences = [f"an action has {saved.action_dim} numbers there and {env.action_dim} here"]
    differences = differences if saved.action_dim != env.action_dim else []
    for kind in kinds:
        theirs, ours = saved.of_kind(kind), env.of_kind(kind)
        name = lambda feature, kind=kind: "" if kind is FeatureKind.image else feature.name  # noqa: E731
        if [(name(f), f.shape) for f in theirs] != [(name(f), f.shape) for f in ours]:
            there, here = (", ".join(f"{f.name} {list(f.shape)}" for f in part) or "nothing" for part in (theirs, ours))
            differences.append(f"{kind.value} is {there} there and {here} here")
    return differences
