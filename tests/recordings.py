"""Demonstrations on disk for tests: ManiSkill's trajectory files, real ones and such as point_reach would have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import torch

from envs import point_reach
from envs.point_reach import STEP
from rlinf_embodied.config import EnvConfig


def write_recording(
    path: Path,
    episodes: Sequence[tuple[int, np.ndarray]],
    task: str = "PointReach-v0",
    control_mode: str = "pd_ee_delta_pose",
) -> Path:
    """Writes (seed, actions [T, A]) pairs in the form of ManiSkill's RecordEpisode."""
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for k, (_, actions) in enumerate(episodes):
            file[f"traj_{k}/actions"] = actions
    entries = [
        {"episode_id": k, "episode_seed": seed, "control_mode": control_mode, "reset_kwargs": {"seed": seed}}
        for k, (seed, _) in enumerate(episodes)
    ]
    described = {"env_info": {"env_id": task, "env_kwargs": {"control_mode": control_mode}}, "episodes": entries}
    path.with_suffix(".json").write_text(json.dumps(described))
    return path


def point_episodes(env: EnvConfig, number: int, first_seed: int = 100) -> list[tuple[int, np.ndarray]]:
    """Returns (seed, actions [T, 2]) of point_reach's expert, each up to the step that solves it."""
    episodes = []
    for seed in range(first_seed, first_seed + number):
        row = point_reach.make_env(env, 1)
        way = row.reset([seed]).proprio[0]
        actions = []
        point, goal = way[:2].clone(), way[2:]
        while (goal - point).norm() >= point_reach.REACHED or not actions:
            actions.append(((goal - point) / STEP).clamp(-1, 1))
            point = (point + actions[-1] * STEP).clamp(-1, 1)
        episodes.append((seed, torch.stack(actions).numpy()))
    return episodes


def record_maniskill(path: Path, task: str, seeds: Sequence[int], robot: str = "panda", **kwargs: object) -> Path:
    """Records our expert on a stock env with ManiSkill's own RecordEpisode; returns the .h5 file."""
    import gymnasium as gym
    import mani_skill.envs  # noqa: F401
    from mani_skill.utils.wrappers import RecordEpisode

    from envs.tasks import EXPERTS, TaskView

    env = gym.make(
        task, obs_mode="none", control_mode="pd_ee_delta_pose", robot_uids=robot, render_backend="cpu", **kwargs
    )
    env = RecordEpisode(env, str(path.parent), trajectory_name=path.stem, save_video=False, source_type="expert")
    view = TaskView(env.unwrapped, True)
    for seed in seeds:
        env.reset(seed=seed)
        done = False
        while not done:
            _, _, terminated, truncated, _ = env.step(EXPERTS[task](view))
            done = bool(terminated) or bool(truncated)
    env.close()
    return path
