"""Episodes of a policy, or of the expert, as a LeRobot v3 folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.config import ExportConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.lerobot import LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import write_dataset
from rlinf_embodied.embodied.demonstrations import ROWS, for_demonstrations
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.hierarchy import has_two_levels
from rlinf_embodied.embodied.policy_check import require_policy_class
from rlinf_embodied.embodied.policy_folder import (
    PHYSICS,
    load_policy,
    require_conditions,
    require_fitting,
    trained_under,
)
from rlinf_embodied.embodied.starting_point import require_env_target, why_no_expert
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.interfaces.envs import Observation, VectorEnv
from rlinf_embodied.plug_ins import env_options
from rlinf_embodied.randomness import reset_seed

_FPS = 20  # control steps of ManiSkill's tasks per second
# (numbers of the episodes, env step, what all rows show) -> actions float32 [N, A]
_Acting = Callable[[range, int, Observation], Tensor]


@dataclass(slots=True)
class _Taken:
    """One episode, step by step, until the task has stayed solved for long enough."""

    seen: list[Observation] = field(default_factory=list)  # before each action, one row each
    actions: list[Tensor] = field(default_factory=list)  # float32 [A]
    success: list[bool] = field(default_factory=list)  # after each action

    @property
    def solved(self) -> bool:
        """Whether it ends solved."""
        return self.success[-1]

    def lasts(self, steps: int) -> bool:
        """Whether the task has been solved after each of the last `steps` actions."""
        return len(self.success) >= steps and all(self.success[-steps:])


def export_dataset(config: ExportConfig, progress: Callable[[int, int], None]) -> dict[str, int]:
    """Runs `num_episodes` episodes, writes those that are asked for, and counts those `run`, `solved` and `written`.

    Initial states are those of the warm start's demonstrations, drawn by `run.seed`: never those of an evaluation.

    Args:
        config: env, who acts, and the new folder, which gets a frame per env step.
        progress: called with (done, total).

    Raises:
        ConfigError: a setting that means nothing here, or an `out` that holds something already.
        CheckpointError: the policy is missing, foreign, or was trained under other conditions.
        SimulatorError: no episode is left to write.
    """
    out = Path(config.out)
    require_exportable(config, out)
    env = make_env(replace(for_demonstrations(config.env), chunk=1), ROWS, "cpu")
    taken: list[_Taken] = []
    try:
        act = _acting(config, env)
        for first in range(0, config.num_episodes, ROWS):
            numbers = range(first, min(first + ROWS, config.num_episodes))
            taken += _round(config, env, act, numbers)
            progress(numbers.stop, config.num_episodes)
    finally:
        env.close()
    kept = [episode for episode in taken if episode.solved or not config.successes_only]
    if not kept:
        raise SimulatorError(
            f"none of {len(taken)} episodes of {config.env.task} was solved, and successes_only is true: there is "
            "nothing to write; use more num_episodes, a better policy, or successes_only=false"
        )
    robot = getattr(env_options(config.env), "robot", None) or "default"
    write_dataset(out, [_frames(episode) for episode in kept], _FPS, robot, video=config.video)
    return {"run": len(taken), "solved": sum(episode.solved for episode in taken), "written": len(kept)}


# --------------------------------------------------------------------------------------------------------------- checks
def require_exportable(config: ExportConfig, out: Path) -> None:
    """Refuses what would be found out, or passed over, only after all episodes."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out is {str(out)!r}, which is there already: give another name")
    if not config.env.cameras:
        raise ConfigError(
            "env.cameras is [], but a dataset holds images: name cameras, or choose an env such as env=maniskill_push"
        )
    if config.policy == "expert":
        why = why_no_expert(config.env)
        if why is not None:
            raise ConfigError(f"policy is 'expert', but {why}: give checkpoint=<dir>")
        require_env_target(config.env)
        return
    assert config.checkpoint is not None
    rule = "a recording says what one policy did, and this checkpoint has two levels of them"
    require(not has_two_levels(config.checkpoint), "checkpoint", config.checkpoint, rule, "use one with one policy")
    theirs = trained_under(config.checkpoint)
    require_env_target(config.env)
    require_policy_class(theirs.policy, cloned=False)
    if theirs.env.cameras:
        folder = Path(config.checkpoint)
        require_conditions("checkpoint", folder, config.env, theirs.policy, "cpu", PHYSICS)


# --------------------------------------------------------------------------------------------------------------- acting
def _acting(config: ExportConfig, env: VectorEnv) -> _Acting:
    """Returns who acts; a policy acts chunk by chunk, as it was trained."""
    if config.policy == "expert":
        return lambda numbers, step, shown: env.expert_actions()
    folder = str(config.checkpoint)
    trained = trained_under(folder)
    settings, chunk = trained.policy, []
    policy, executed = load_policy(settings, folder, "cpu").policy, trained.env.executed

    @torch.no_grad()
    def act(numbers: range, step: int, shown: Observation) -> Tensor:
        if step == 0:
            require_fitting(folder, shown)
        if step % executed == 0:
            rows = np.asarray([*numbers, *[0] * (ROWS - len(numbers))])
            drawn = lambda: policy.spec.noise.draw(config.run.seed, "export", rows, step // executed)  # noqa: E731
            noise = None if config.greedy else drawn()
            chunk[:] = policy.act(policy.encode(shown), noise, settings.temperature).actions.unbind(1)
        return chunk[step % executed]

    return act


def _round(config: ExportConfig, env: VectorEnv, act: _Acting, numbers: range) -> list[_Taken]:
    """Runs an episode per row, at most ROWS of them, until the task has stayed solved for env.hold_steps."""
    hold_steps = config.env.hold_steps or config.env.horizon
    seeds = [int(reset_seed(config.run.seed, -1, number)) for number in numbers]
    episodes = [_Taken() for _ in seeds]
    observation = env.reset(seeds, list(range(len(seeds))))
    for step in range(env.spec.horizon):
        actions = act(numbers, step, observation).clamp(-1.0, 1.0)
        result = env.step_chunk(actions[:, None])
        for row, episode in enumerate(episodes):
            if episode.lasts(hold_steps):
                continue
            episode.seen.append(observation.rows([row]))
            episode.actions.append(actions[row].cpu())
            episode.success.append(bool(result.success[row].any()))
        observation = result.observation
        if all(episode.lasts(hold_steps) for episode in episodes):
            break
    return episodes


def _frames(episode: _Taken) -> LeRobotEpisode:
    seen = Observation.concatenate([observation.to("cpu") for observation in episode.seen])
    images = {name: shown.numpy() for name, shown in seen.images.items()}
    return LeRobotEpisode(seen.instruction[0], torch.stack(episode.actions).numpy(), seen.proprio.numpy(), images)
