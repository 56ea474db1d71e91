"""Episodes of a policy, or of the expert, as a LeRobot v3 folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlinf_embodied.config import ExportConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.lerobot import LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import write_dataset
from rlinf_embodied.embodied.demonstrations import ROWS, for_demonstrations, run_episodes
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import (
    PHYSICS,
    load_policy,
    require_conditions,
    require_fitting,
    require_policy_class,
    trained_under,
)
from rlinf_embodied.embodied.rollout_stage import computed_in
from rlinf_embodied.embodied.serving import remote_policy
from rlinf_embodied.embodied.starting_point import require_env_target, why_no_expert
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.interfaces.envs import Observation, VectorEnv
from rlinf_embodied.plug_ins import env_options
from rlinf_embodied.randomness import reset_seed

_FPS = 20  # control steps of ManiSkill's tasks per second
_Acting = Callable[[int, Observation], Tensor]  # (env step, what all rows show) -> actions float32 [N, A]


def export_dataset(config: ExportConfig, progress: Callable[[int, int], None]) -> dict[str, int]:
    """Runs `num_episodes` episodes, writes those that are asked for, and counts those `run`, `solved` and `written`.

    Initial states are those of the warm start's demonstrations, drawn by `run.seed`: never those of an evaluation.  The
    new folder gets a frame per env step; `progress` is called with (done, total).

    Raises:
        ConfigError: a setting that means nothing here, or an `out` that holds something already.
        CheckpointError: the policy is missing, foreign, or was trained under other conditions.
        SimulatorError: no episode is left to write.
    """
    out = Path(config.out)
    require_exportable(config, out)
    env = make_env(replace(for_demonstrations(config.env), chunk=1, perturb=config.env.perturb), ROWS, "cpu")
    taken: list[tuple[bool, LeRobotEpisode]] = []
    try:
        act = _acting(config, env)
        for first in range(0, config.num_episodes, ROWS):
            numbers = range(first, min(first + ROWS, config.num_episodes))
            taken += _round(config, env, act, numbers)
            progress(numbers.stop, config.num_episodes)
    finally:
        env.close()
    kept = [episode for solved, episode in taken if solved or not config.successes_only]
    if not kept:
        raise SimulatorError(
            f"none of {len(taken)} episodes of {config.env.task} was solved, and successes_only is true: there is "
            "nothing to write; use more num_episodes, a better policy, or successes_only=false"
        )
    robot = getattr(env_options(config.env), "robot", None) or "default"
    write_dataset(out, kept, round(config.env.control_hz) or _FPS, robot, video=config.video)
    return {"run": len(taken), "solved": sum(solved for solved, _ in taken), "written": len(kept)}


def require_exportable(config: ExportConfig, out: Path) -> None:
    """Refuses what would be found out, or passed over, only after all episodes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out is {str(out)!r}, which is there already: give another name")
    rule, action = "a dataset holds images", "name cameras, or choose an env such as env=maniskill_push"
    require(bool(config.env.cameras), "env.cameras", config.env.cameras, rule, action)
    rule = "an observation of a dataset is of one env step"
    require(config.env.history == 1, "env.history", config.env.history, rule, "use a policy without history")
    require_env_target(config.env)
    if config.policy == "expert" and (why := why_no_expert(config.env)) is not None:
        raise ConfigError(f"policy is 'expert', but {why}: give checkpoint=<dir>")
    if config.policy == "checkpoint":
        folder = str(config.checkpoint)
        theirs = trained_under(folder)
        rule = "a recording says what one policy did, and this checkpoint has two levels of them"
        require(theirs.hierarchy is None, "checkpoint", folder, rule, "use one with one policy")
        require_policy_class(theirs.policy, cloned=False)
        if theirs.env.cameras:
            require_conditions("checkpoint", Path(folder), config.env, theirs.policy, "cpu", PHYSICS)


def _acting(config: ExportConfig, env: VectorEnv) -> _Acting:
    """Returns who acts; a policy acts chunk by chunk, as it was trained."""
    if config.policy == "expert":
        bound = math.inf if getattr(env_options(config.env), "physical_actions", False) else 1.0
        return lambda step, shown: env.expert_actions().clamp(-bound, bound)
    is_remote = config.policy == "remote"
    folder = str(config.remote.url if is_remote else config.checkpoint)
    trained = remote_policy(config.remote, config.env) if is_remote else trained_under(folder)
    loaded, executed = load_policy(trained.policy, folder, "cpu").policy, trained.env.executed
    policy = computed_in(trained.precision, loaded, trained.policy, "cpu")
    chunk: list[Tensor] = []
    kind, number = policy.spec.greedy_noise, -1
    level = trained.policy.temperature if kind is None else 0.0

    @torch.no_grad()
    def act(step: int, shown: Observation) -> Tensor:
        nonlocal number
        if step == 0:
            number += 1
            require_fitting(folder, shown)
        if step % executed == 0:
            rows = range(len(shown))
            noise = None if kind is None else kind.draw(config.run.seed, "export", rows, number, step)
            features = policy.encode(shown.prompted(trained.policy.prompt_suffix))
            chunk[:] = policy.act(features, noise, level).actions.unbind(1)
        return chunk[step % executed]  # in [-1, 1], or in the units that the policy learned from

    return act


def _round(config: ExportConfig, env: VectorEnv, act: _Acting, numbers: range) -> list[tuple[bool, LeRobotEpisode]]:
    """Runs an episode per row until the task has stayed solved for env.hold_steps; returns which end solved."""

    def controller(step: int, shown: Observation, labels: list[Tensor]) -> Tensor:
        labels.append(act(step, shown))
        return labels[0][:, None]

    seeds = [int(reset_seed(config.run.seed, -1, number)) for number in numbers]
    observation, hold = env.reset(seeds, list(range(len(seeds)))), config.env.hold_steps or config.env.horizon
    episodes = []
    for solved, taken in run_episodes(env, observation, controller, len(seeds), hold=hold):
        seen, actions = taken.observation, taken.actions[:, 0].numpy()
        images = {name: shown.numpy() for name, shown in seen.images.items()}
        episodes.append((solved, LeRobotEpisode(seen.instruction[0], actions, seen.proprio.numpy(), images)))
    return episodes
