"""What a picture costs on one core, by route, and how far decimated pictures are from full ones.

    python -m experiments.bench.pictures [num_envs=32] [size=64] [rounds=12] [out=<json>] [sheet=<png>]

Costs are CPU seconds of the whole process, renderer threads included, medians (min-max) over rounds in which the
variants take turns; every scene has moved before each of them.

    pictures    take_images, what EpisodeEnv calls: colours only
    whole       the same cameras with the shaders that also draw positions and segmentation
    observation ManiSkill's own obs_mode="rgb" on the batched task
    one row     the same after one row was reset: the others keep their pictures
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# Simulators are looked into, and their protocols do not show what is found there.

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import mani_skill.envs  # noqa: F401  registers the tasks
import numpy as np
import torch

from envs.batched.build import make_batched_task
from envs.batched.decimate import decimate_visuals
from envs.batched.rendering import take_images
from envs.batched.shaders import Pack, give_shaders
from envs.maniskill import make_env
from experiments.bench.harness import Benchmark, Report, Run, Spread, Table, alternate, seconds_of
from rlinf_embodied.config import EnvConfig

VIEWS = {"robot": "panda_wristcam", "cameras": ["base_camera", "hand_camera"], "camera_fov": 0.8}
WARM_UP = 2  # rounds that do not count
STRONG = 40  # of 255: a difference that is seen
EPISODE_STEPS, EVERY = 24, 4  # steps of the compared episodes, and between compared pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    num_envs: int = 32
    size: int = 64
    rounds: int = 12
    out: str = ""
    sheet: str = ""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to take pictures of all rows."""

    move: Callable[[], object]  # before each measurement
    take: Callable[[], object]

    def cpu_s(self) -> float:
        """Returns the CPU seconds of taking them."""
        self.move()
        return seconds_of(self.take, clock=time.process_time)


def costs(num_envs: int, size: int, rounds: int) -> dict[str, Spread]:
    """Returns CPU milliseconds per env by variant."""
    variants: dict[str, Variant] = {}
    for label, views in (("PickCube, 1 camera", {"camera_fov": 0.8}), ("PickCube with wrist camera, 2 cameras", VIEWS)):
        for kind in ("pictures", "whole"):
            sim = _env(num_envs, size, True, views)._sim
            renderer = sim._renderer
            if kind == "whole":
                _draw_everything(renderer)
            take = partial(lambda shown: take_images(shown._scenes(), shown._cameras), renderer)
            variants[f"{label}: {kind}"] = Variant(partial(_move, sim.step, num_envs, sim.action_dim), take)
    task = _rgb_task(num_envs, size)
    task._get_obs_extra = lambda info: {}  # the task's numbers are no part of a picture
    observe = partial(task.get_obs, {})
    variants["PickCube, 1 camera: observation"] = Variant(partial(_move, task.advance, num_envs, 8), observe)
    variants["PickCube, 1 camera: one row"] = Variant(partial(_reset_one, task), observe)
    found = alternate({name: v.cpu_s for name, v in variants.items()}, rounds, warm_up=WARM_UP, quiet=True)
    return {name: Spread.of(1e3 * seconds / num_envs for seconds in several) for name, several in found.items()}


def _move(step: Callable[..., object], num_envs: int, action_dim: int) -> None:
    step(torch.rand(num_envs, action_dim) * 2 - 1, list(range(num_envs)))


def _draw_everything(renderer: object) -> list:
    """Gives all cameras the shaders that also draw positions and segmentation; returns the cameras."""
    cameras = [camera for row in renderer._cameras for camera in row]
    for camera in cameras:
        give_shaders(camera, Pack.whole)
    return cameras


def _env(num_envs: int, size: int, decimate: bool, views: Mapping[str, object]) -> object:
    env = make_env(EnvConfig(obs_size=size, decimate=decimate, **views), num_envs)
    env.reset(list(range(num_envs)))
    return env


def _rgb_task(num_envs: int, size: int) -> object:
    sensors = {"width": size, "height": size, "base_camera": {"fov": 0.8}}
    task = make_batched_task(
        "PickCube-v1", num_envs, True, obs_mode="rgb", control_mode="pd_joint_delta_pos", sensor_configs=sensors
    )
    cameras = task._sensors["base_camera"].camera._render_cameras
    for scene, camera in zip(task.scene.sub_scenes, cameras, strict=True):
        decimate_visuals(scene, [camera])
    task.reset(seed=np.arange(num_envs))
    return task


def _reset_one(task: object) -> None:
    task.get_obs({})
    seeds = np.random.default_rng().integers(1 << 30, size=task.num_envs)
    task.reset(seed=seeds, options={"env_idx": torch.tensor([0])})


# ------------------------------------------------------------------------------------------------------------- quality
def differences(size: int, sheet: str) -> dict[str, dict[str, float]]:
    """Returns how decimated pictures differ from full ones along noisy expert episodes, by camera."""
    (full, full_objects), (light, light_objects) = _episode(size, False), _episode(size, True)
    if sheet:
        _write_sheet(sheet, full, light)
    found = {}
    for k, camera in enumerate(("base_camera", "hand_camera")):
        difference = np.abs(full[:, :, k].astype(int) - light[:, :, k])
        found[f"{camera}, {size} pixels"] = {
            "mean_of_255": float(difference.mean()),
            "strong_pct": 100 * float((difference.max(-1) > STRONG).mean()),
            "other_object_pct": 100 * float((full_objects[:, :, k] != light_objects[:, :, k]).mean()),
        }
    return found


def _episode(size: int, decimate: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns pictures uint8 [T, N, K, S, S, 3] and the objects in them [T, N, K, S, S] of the same four episodes."""
    env = _env(4, size, decimate, VIEWS)
    renderer = env._sim._renderer
    cameras, pictures, objects = _draw_everything(renderer), [], []
    for step in range(EPISODE_STEPS):
        noise = torch.randn(4, env.spec.action_dim, generator=torch.Generator().manual_seed(step))
        env._sim.step((env.expert_actions() + 0.15 * noise).clamp(-1, 1), range(4))
        if step % EVERY == 0:
            pictures.append(take_images(renderer._scenes(), renderer._cameras).numpy())
            seen = np.stack([camera.get_picture("PositionSegmentation")[..., 3] for camera in cameras])
            objects.append(seen.reshape(pictures[-1].shape[:-1]))
    env.close()
    return np.stack(pictures), np.stack(objects)


def _write_sheet(path: str, *rows: np.ndarray) -> None:
    """Writes pictures of one episode: a row of enlarged pictures for each argument, base and hand camera in turn."""
    from PIL import Image

    lines = [np.concatenate([row[t, 0, k] for t in (0, 2, 4) for k in (0, 1)], 1) for row in rows]
    image = Image.fromarray(np.concatenate(lines))
    image.resize((image.width * 3, image.height * 3), Image.Resampling.NEAREST).save(path)


def measure(run: Run[Options]) -> Report:
    """Measures costs and differences."""
    own = run.options
    cost, difference = costs(own.num_envs, own.size, own.rounds), differences(own.size, own.sheet)
    columns = list(next(iter(difference.values())))
    shown = [(name, *(f"{value:.3g}" for value in values.values())) for name, values in difference.items()]
    tables = (
        Table(("CPU ms per env", "median (min-max)"), [(name, f"{spread:.3g}") for name, spread in cost.items()]),
        Table(("decimated beside full", *columns), shown),
    )
    return Report(content={"costs_ms": cost, "differences": difference}, text="\n\n".join(map(str, tables)))


BENCHMARK = Benchmark("pictures", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
