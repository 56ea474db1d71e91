"""Whether a training has what it starts with, a policy and plug-ins: asked before anything heavy is imported."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.config import ClusterConfig, EnvConfig, Source, TrainConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.plug_ins import env_options, load_plug_in


def require_start(config: TrainConfig) -> None:
    """Checks that there is a scripted expert, something in its place, or a run that may be resumed.

    Raises:
        ConfigError: there is neither.
    """
    start = config.warm_start
    fine_tunes = config.algorithm.learns_from is Source.demonstrations
    given = config.files if fine_tunes else start.checkpoint or start.from_scratch
    folder = None if config.run.dir is None else Path(config.run.dir) / "checkpoints"
    resumes = config.resume != "auto" or (folder is not None and folder.exists())
    if given or start.demonstrations or resumes or (why := why_no_expert(config.env)) is None:
        return
    raise ConfigError(
        f"{why}, and training starts from a policy that sometimes succeeds. Give one of\n"
        "  warm_start.demonstrations=<file.h5 of ManiSkill, or folder of a LeRobot dataset>\n"
        "                                        (record a policy that learned from the simulator's state)\n"
        "  warm_start.checkpoint=<dir>           a checkpoint folder of a policy for this task\n"
        "  warm_start.from_scratch=true          random weights: right with policy=state, seldom with images\n"
        "or a task with an expert, as env=maniskill_pick. See docs/warm_start.md"
    )


def require_demonstrations(config: TrainConfig) -> None:
    """Checks that the demonstrations of algorithm.bc_coef have a source.

    Raises:
        ConfigError: there is none.
    """
    coef = getattr(config.algorithm, "bc_coef", 0.0)
    given = config.files or config.warm_start.demonstrations
    if coef and not given and (why := why_no_expert(config.env)) is not None:
        action = "give data=<file.h5 of ManiSkill, or folder of a LeRobot dataset>, or use 0"
        raise ConfigError(f"algorithm.bc_coef is {coef}, but {why}, and no demonstrations are given: {action}")


def require_env_target(env: EnvConfig) -> None:
    """Checks that a custom env can be imported and called, and env.options by its module's `read_options`.

    Raises:
        ConfigError: it cannot, or an option is not known or wrong; names the field.
    """
    load_plug_in(env._target_, "env._target_", "config", "num_envs", "device", "render_final")
    env_options(env)


def on_cores(env: EnvConfig, cluster: ClusterConfig) -> EnvConfig:
    """Returns the env section with which simulators stay on cores if these are devices next to the accelerators.

    Raises:
        ConfigError: cluster.cpu_devices is set, and env.options ask for an accelerator or cannot be read.
    """
    if cluster.cpu_devices == 0:
        return env
    require_env_target(env)
    return replace(env, options=env.options | env_options(env).on_cores())


def why_no_expert(env: EnvConfig) -> str | None:
    """Returns why an env has no scripted expert; None where it has one, or where only the env itself can tell.

    Raises:
        ConfigError: a custom env cannot be imported.
    """
    require_env_target(env)
    ask = getattr(importlib.import_module(env._target_.rpartition(".")[0]), "why_no_expert", None)
    return None if ask is None else ask(env)
