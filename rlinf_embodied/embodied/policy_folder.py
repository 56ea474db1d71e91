"""A policy folder: weights in Hugging Face form, and under which conditions they were trained.

config.json  model.safetensors  dataset_statistics.json      what the policy writes
evaluation.json                                              env and policy sections, evaluation fingerprint; hierarchy
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rlinf_embodied.config import (
    EnvConfig,
    HierarchyConfig,
    PerturbConfig,
    PolicyConfig,
    Precision,
    PrefixSchedule,
    Reward,
)
from rlinf_embodied.config.checks import require
from rlinf_embodied.device import kind_of
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import OBSERVATION_VERSION, EnvSpec, FeatureKind, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import ImitationPolicy, Policy
from rlinf_embodied.learning.weights import SharedPolicy, move
from rlinf_embodied.plug_ins import env_options, load_plug_in, load_target, named_when_raised
from rlinf_embodied.telemetry.run_folder import library_versions

CONDITIONS = "evaluation.json"
_LIBRARIES = ("torch", "mani_skill", "sapien", "transformers")
USE_ITS_OWN = "Use its own settings (ManiSkill: env.options.backend=batched is physx_cpu, gpu is physx_cuda)"
_CHOICES = ("every", "instructions", "goal_low", "goal_high", "columns", "way_columns", "way_to_goal")
PHYSICS = ("backend", "decimate")  # what differs between simulators of one task
_PACKAGE = "policies."
_NEEDED = ("encode", "act", "evaluate", "value", "policy_parameters", "value_parameters", "save", "from_folder")
_CLONED = ("imitation_loss",)
_OF_ROLLOUTS = ("num_envs", "block_size", "rows_per_call", "chunks_per_rollout", "auto_reset", "carry_over")
_SEE = "see docs/own_policy.md"


def load_policy(config: PolicyConfig, folder: str, device: str, env: EnvSpec | None = None) -> SharedPolicy[Policy]:
    """Returns the policy in a folder, on its device; a published folder does not know its env.

    Raises:
        CheckpointError: the folder is missing, or made for other settings.
    """
    if "://" not in folder and not Path(folder).is_file():  # a published policy may be one file, or a server
        require_policy_folder("checkpoint", folder)
    policy = cast(type[Policy], load_target(config._target_)).from_folder(Path(folder), env, config)
    move(policy.module, device)
    return SharedPolicy(policy, device=device)


def require_policy_folder(path: str, folder: str) -> None:
    """Checks that a folder holds a policy; `path` is the config path to name."""
    place = Path(folder) / "config.json"
    if not place.exists():
        action = "give a checkpoint folder, for example <run.dir>/checkpoints/latest"
        raise CheckpointError(f"{path} is {folder!r}, but there is no {place}: {action}")


def is_published(folder: str | Path, config: PolicyConfig) -> bool:
    """Whether a folder is one that others wrote, and the policy reads such folders.

    Raises:
        CheckpointError: it was not written here, and the policy reads no other.
    """
    if (Path(folder) / CONDITIONS).exists():
        return False
    if not getattr(load_target(config._target_), "reads_published", False):
        trained_under(str(folder))  # says what is wrong with it
    return True


def save_policy(
    policy: Policy,
    folder: Path,
    env: EnvConfig,
    config: PolicyConfig,
    device: str = "cpu",
    precision: Precision = Precision.float32,
) -> None:
    """Writes a policy with the conditions of its training; `device` is torch's name of the one it was trained on.

    Raises:
        CheckpointError: the policy's `save` wrote no config.json, by which a folder is known to hold a policy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    policy.save(folder)
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{type(policy).__name__}.save wrote {sorted(path.name for path in folder.iterdir())}, but a policy folder "
            "holds a config.json: write one, as policies.checkpoint_folder.write_folder does (docs/own_policy.md)"
        )
    save_conditions(folder, env, config, device, precision=precision)


def save_conditions(
    folder: Path,
    env: EnvConfig,
    config: PolicyConfig,
    device: str = "cpu",
    hierarchy: HierarchyConfig | None = None,
    precision: Precision = Precision.float32,
) -> None:
    """Writes under which conditions the policy of a folder acts; with `hierarchy` it is the low-level one of two."""
    conditions = fingerprint(env, config, kind_of(device))
    content: dict[str, Any] = {"env": asdict(env), "policy": asdict(config), "fingerprint": conditions}
    content["precision"] = precision
    if hierarchy is not None:
        content["hierarchy"] = {name: getattr(hierarchy, name) for name in _CHOICES}
        content["hierarchy"]["policy"] = asdict(hierarchy.policy)
    (folder / CONDITIONS).write_text(json.dumps(content, indent=2) + "\n")


def require_fitting(folder: str, observation: Observation, criticised: bool = False) -> None:
    """Checks that the policy of a folder was made for observations like one; published folders do not tell.

    State vectors are compared by name and length, images by their size: cameras are in the policy's order.  A policy
    that sees images needs no privileged state to act, unless a critic on it is asked, too (`criticised`).

    Raises:
        CheckpointError: it was made for others.
    """
    path = Path(folder) / "config.json"
    described = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "env" not in described:
        return
    made_for = EnvSpec.of(described["env"])
    theirs = {part.name: list(part.shape) for part in made_for.of_kind(FeatureKind.state)}
    ours = {name: list(vector.shape[1:]) for name, vector in observation.state.items()}
    if made_for.cameras:
        theirs |= {f"image {k}": list(part.shape) for k, part in enumerate(made_for.of_kind(FeatureKind.image))}
        ours |= {f"image {k}": list(image.shape[1:]) for k, image in enumerate(observation.images.values())}
    if observation.privileged is not None and (criticised or not made_for.cameras):
        theirs["privileged"], ours["privileged"] = [made_for.privileged_dim], [observation.privileged.shape[1]]
    if list(ours.items()) != list(theirs.items()):  # their order counts: vectors are put side by side
        raise CheckpointError(
            f"the policy in {folder} was made for {made_for.task} with the observation {theirs}, but this env shows "
            f"{ours}: use the env that it was trained in with its env.* as they were, or another checkpoint"
        )


def fingerprint(env: EnvConfig, policy: PolicyConfig, kind: str) -> dict[str, Any]:
    """Returns what an evaluation must share with the training for its number to mean anything, as JSON values.

    `kind` is torch's name of the devices: "cuda", "cpu", ...
    """
    libraries = library_versions()
    return {
        "task": env.task,
        "cameras": list(env.cameras),
        "obs_size": env.obs_size,
        "chunk": env.chunk,
        "horizon": env.horizon,
        "action_head": policy.name,
        "observations": OBSERVATION_VERSION,
        "backend": "own",
        **env_options(env).conditions(bool(env.cameras), kind),
        **{f"version of {name}": libraries[name] for name in _LIBRARIES if name in libraries},
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any], a: str = "there", b: str = "here") -> list[str]:
    """Returns how two fingerprints differ, for example ["obs_size is 64 there and 128 here"]."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return [f"{name} is {there.get(name)!r} {a} and {here.get(name)!r} {b}" for name in names]


def env_differences(a: str, b: str) -> list[str]:
    """Returns how the envs differ in which two checkpoints were trained, but for the number of rows and steps."""

    def settings(folder: str) -> dict[str, Any]:
        env = asdict(trained_under(folder).env)
        nested = {f"{key}.{name}": value for key in ("perturb", "options") for name, value in env.pop(key).items()}
        return {f"env.{name}": value for name, value in (env | nested).items() if name not in _OF_ROLLOUTS}

    return differences(settings(a), settings(b), "for a", "for b")


def require_conditions(
    path: str, folder: Path, env: EnvConfig, policy: PolicyConfig, kind: str, free: Sequence[str] = ()
) -> None:
    """Checks that training can start from a folder; versions of libraries may differ, what was learned stays useful.

    `path` is the config path to name; fields of the fingerprint that are `free` may differ.

    Raises:
        CheckpointError: the folder is missing, foreign or damaged, or was made under other conditions.
    """
    sides = trained_under(str(folder)).fingerprint, fingerprint(env, policy, kind)
    passes = lambda name: name in free or name.startswith("version of ")  # noqa: E731
    there, here = ({name: value for name, value in side.items() if not passes(name)} for side in sides)
    if found := differences(there, here):
        raise CheckpointError(
            f"{path} is {str(folder)!r}, but that policy was trained under other conditions: {'; '.join(found)}. "
            f"{USE_ITS_OWN}, or another checkpoint"
        )


@dataclass(frozen=True, slots=True)
class TrainedUnder:
    """What evaluation.json says."""

    env: EnvConfig
    policy: PolicyConfig
    fingerprint: Mapping[str, Any]
    hierarchy: HierarchyConfig | None = None  # where the folder has a high-level policy, too
    precision: Precision = Precision.float32  # in which it acted


def trained_under(folder: str) -> TrainedUnder:
    """Returns the conditions under which the policy in a folder was trained.

    Raises:
        CheckpointError: the folder is missing, foreign, or damaged.
    """
    require_policy_folder("checkpoint", folder)
    path = Path(folder) / CONDITIONS
    if not path.exists():
        rule = f"it holds no {CONDITIONS}: it was not written by this project"
        raise CheckpointError(f"checkpoint is {folder!r}, but {rule}; evaluate it with the code that made it")
    try:
        return conditions_in(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        rule = "it is damaged, or was written by another version of this project"
        raise CheckpointError(f"{path} cannot be read ({error}): {rule}; use another checkpoint") from error


def conditions_in(content: Mapping[str, Any]) -> TrainedUnder:
    """Returns the conditions in the content of evaluation.json.

    Raises:
        ValueError, KeyError, TypeError, ConfigError: it is of another form.
    """
    env, levels = dict(content["env"]), content.get("hierarchy")
    env["reward"], env["perturb"] = Reward(env["reward"]), PerturbConfig(**env.get("perturb", {}))
    env["rtc"] = PrefixSchedule(env.get("rtc", PrefixSchedule.off))
    if levels is not None:
        levels = HierarchyConfig(**{**levels, "policy": PolicyConfig(**levels["policy"])})
    conditions, precision = dict(content["fingerprint"]), Precision(content.get("precision", Precision.float32))
    return TrainedUnder(EnvConfig(**env), PolicyConfig(**content["policy"]), conditions, levels, precision)


def require_policy_class(config: PolicyConfig, cloned: bool) -> None:
    """Checks that policy._target_ is a class with the methods of `Policy`, and policy.options those that it has.

    What its methods return is looked at by tests/policies/test_policy_contract.py.

    Raises:
        ConfigError: it cannot be imported or called, is no class, lacks a method, or has other options.
    """
    kind = load_plug_in(config._target_, "policy._target_", "config", "env", "seed")
    declared = getattr(kind, "options_type", None)  # a dataclass
    if declared is not None:
        typed(config.options, declared, "policy.options")
    if config._target_.startswith(_PACKAGE):
        return
    path, rule = "policy._target_", "it is no class, by whose `from_folder` checkpoints are read"
    require(isinstance(kind, type), path, config._target_, rule, "name a class")
    plain = lambda owner, name: getattr(getattr(owner, name, None), "__func__", getattr(owner, name, None))  # noqa: E731
    # a method of the protocol that a class does not override does nothing
    missing = [n for n in (*_NEEDED, *_CLONED[: int(cloned)]) if plain(kind, n) in (None, plain(ImitationPolicy, n))]
    rule = f"{config._target_.rpartition('.')[2]} has no {', '.join(missing)}"
    action = f"write what is missing ({_SEE})"
    if missing == [*_CLONED]:
        action += ", inheriting from ImitationPolicy, or start from random weights: warm_start.from_scratch=true"
    require(not missing, path, config._target_, rule, action)


def new_policy(config: PolicyConfig, env: EnvSpec, seed: int, device: str) -> Policy:
    """Returns a new policy on its device.

    Raises:
        ConfigError: it cannot be made for this env; names the line of the user's that raised.
    """
    make, path, target = load_target(config._target_), "policy._target_", config._target_
    where = f"{path} is {target!r}, but making it for {env.task} raised "
    with named_when_raised(lambda error: ConfigError(f"{where}{error}\nFix it there")):
        policy = make(config, env, seed)
    for name in ("spec", "module"):
        rule = f"{type(policy).__name__} has no attribute {name}"
        require(hasattr(policy, name), path, target, rule, f"set it in __init__ ({_SEE})")
    made = cast(Policy, policy)
    move(made.module, device)
    return made
