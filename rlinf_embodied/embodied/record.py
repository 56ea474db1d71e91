"""Demonstrations of the expert, or of a teacher, as files: a ManiSkill trajectory file, or a LeRobot v3 folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.data.lerobot import LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import write_dataset
from rlinf_embodied.data.maniskill_h5 import RecordedEpisode, Recording, write_recording
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.teacher import Teacher
from rlinf_embodied.embodied.warm_start_source import is_recording, source_of
from rlinf_embodied.embodied.warm_start_stage import ROWS, for_demonstrations
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.interfaces.envs import Observation, VectorEnv
from rlinf_embodied.randomness import reset_seed

_FPS = 20  # control steps of ManiSkill's tasks per second


@dataclass(slots=True)
class _Taken:
    """One episode, step by step, up to the step that solves the task."""

    seed: int
    seen: list[Observation] = field(default_factory=list)  # before each action, one row each
    actions: list[Tensor] = field(default_factory=list)  # float32 [A]
    solved: bool = False


def record_demonstrations(config: TrainConfig, out: Path, progress: Callable[[int, int], None]) -> int:
    """Runs `warm_start.num_demos` episodes, writes those that solve the task, and returns their number.

    Args:
        config: env, and who acts: the scripted expert or `warm_start.teacher`.
        out: a .h5 file (actions and seeds; nothing is rendered), or a new folder (LeRobot, a frame per env step).
        progress: called with (done, total).

    Raises:
        ConfigError: a setting that means nothing here, or an `out` that holds something already.
        SimulatorError: nothing was solved.
    """
    _require_recordable(config, out)
    source = source_of(config.warm_start)
    env_config = for_demonstrations(
        replace(config.env, chunk=1, cameras=[] if is_recording(out) else config.env.cameras)
    )
    env = make_env(env_config, ROWS, "cpu")
    try:
        teacher = None if source is None else Teacher(source.path, env, "cpu")
        act = env.expert_actions if teacher is None else lambda: teacher.actions(env)
        number, taken = config.warm_start.num_demos, []
        for first in range(0, number, ROWS):
            numbers = range(first, min(first + ROWS, number))
            taken += _round(env, act, [int(reset_seed(config.run.seed, -1, k)) for k in numbers])
            progress(numbers.stop, number)
    finally:
        env.close()
    kept = [episode for episode in taken if episode.solved]
    if not kept:
        raise SimulatorError(f"none of {number} episodes of {config.env.task} was solved: there is nothing to write")
    _write(config, out, kept)
    return len(kept)


def _require_recordable(config: TrainConfig, out: Path) -> None:
    """Refuses what would be found out, or passed over, only after all episodes.

    Raises:
        ConfigError: see `record_demonstrations`.
    """
    for name in ("demonstrations", "checkpoint", "region"):
        value = getattr(config.warm_start, name)
        if value is not None:
            raise ConfigError(
                f"warm_start.{name} is {value!r}, but episodes of the expert, or of warm_start.teacher, are recorded "
                "from any initial state: leave it out"
            )
    if out.exists() and (is_recording(out) or any(out.iterdir())):
        raise ConfigError(f"out is {str(out)!r}, which is there already: give another name")
    if not is_recording(out) and not config.env.cameras:
        raise ConfigError("env.cameras is [], but a LeRobot folder holds images: name cameras, or give out=<file>.h5")


def _round(env: VectorEnv, act: Callable[[], Tensor], seeds: list[int]) -> list[_Taken]:
    episodes = [_Taken(seed) for seed in seeds]
    rows = list(range(len(seeds)))
    observation = env.reset(seeds, rows)
    for _ in range(env.spec.horizon):
        actions = act().clamp(-1.0, 1.0)
        result = env.step_chunk(actions[:, None])
        for row in (row for row in rows if not episodes[row].solved):
            episodes[row].seen.append(observation.rows([row]))
            episodes[row].actions.append(actions[row].cpu())
            episodes[row].solved = bool(result.success[row].any())
        observation = result.observation
        if all(episode.solved for episode in episodes):
            break
    return episodes


def _write(config: TrainConfig, out: Path, episodes: list[_Taken]) -> None:
    if is_recording(out):
        recorded = [
            RecordedEpisode(f"traj_{k}", e.seed, torch.stack(e.actions).numpy()) for k, e in enumerate(episodes)
        ]
        env = config.env
        write_recording(out, Recording(env.task, env.control_mode, env.robot, tuple(recorded)))
    else:
        frames = [_frames(episode, config.env.cameras) for episode in episodes]
        write_dataset(out, frames, _FPS, config.env.robot or "default")


def _frames(episode: _Taken, cameras: list[str]) -> LeRobotEpisode:
    seen = Observation.concatenate([observation.to("cpu") for observation in episode.seen])
    assert seen.images is not None, "an env with cameras showed no images"
    images = {name: seen.images[:, k].numpy() for k, name in enumerate(cameras)}
    return LeRobotEpisode(seen.instruction[0], torch.stack(episode.actions).numpy(), seen.proprio.numpy(), images)
