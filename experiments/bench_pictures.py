"""What a picture costs on one core, by route, and how far decimated pictures are from full ones.

    python experiments/bench_pictures.py [num_envs=32] [size=64] [rounds=12] [out=<json>] [sheet=<png>]

Costs are CPU seconds of the whole process, renderer threads included, medians (min-max) over rounds in which the
variants take turns; every scene has moved before each of them.

    pictures    take_pictures, what EpisodeEnv calls: colours only
    whole       the same cameras with the shaders that also draw positions and segmentation
    observation ManiSkill's own obs_mode="rgb" on the batched task
    one row     the same after one row was reset: the others keep their pictures
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# Simulators are looked into, and what they are is found in their modules, which are imported late.

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench_report import split_arguments, use_one_thread_per_process

DEFAULTS = {"num_envs": 32, "size": 64, "rounds": 12, "out": "", "sheet": ""}
VIEWS = {"robot": "panda_wristcam", "cameras": ["base_camera", "hand_camera"], "camera_fov": 0.8}
WARM_UP = 2  # rounds that do not count
STRONG = 40  # of 255: a difference that is seen
EPISODE_STEPS, EVERY = 24, 4  # steps of the compared episodes, and between compared pictures


def main(arguments: list[str]) -> None:
    """Prints the tables."""
    own, rest = split_arguments(arguments, DEFAULTS)
    if rest:
        raise SystemExit(f"bench_pictures.py does not know {', '.join(rest)}: use {', '.join(DEFAULTS)}")
    use_one_thread_per_process()
    import torch

    torch.set_num_threads(1)
    num_envs, size, rounds = int(own["num_envs"]), int(own["size"]), int(own["rounds"])
    result = {"costs_ms": _costs(num_envs, size, rounds), "differences": _differences(size, str(own["sheet"]))}
    for title, table in result.items():
        print(title)
        for name, values in table.items():
            print(f"  {name:<50}" + "  ".join(f"{key} {value:.3g}" for key, value in values.items()))
    if own["out"]:
        import json

        Path(str(own["out"])).write_text(json.dumps(result, indent=1) + "\n")


def _costs(num_envs: int, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns CPU milliseconds per env: median, min, max."""
    import torch

    from envs.batched.rendering import take_pictures
    from envs.batched.shaders import Pack, give_shaders

    calls: dict[str, Callable[[], object]] = {}
    moves: dict[str, Callable[[], object]] = {}
    for label, views in (("PickCube, 1 camera", {"camera_fov": 0.8}), ("PickCube with wrist camera, 2 cameras", VIEWS)):
        simulator = _env(num_envs, size, True, views)._sim
        renderer, rows = simulator._renderer, list(range(num_envs))

        def move(simulator=simulator, rows=rows) -> None:
            simulator.step(torch.rand(num_envs, simulator.action_dim) * 2 - 1, rows)

        whole = _env(num_envs, size, True, views)._sim
        for camera in (camera for row in whole._renderer._cameras for camera in row):
            give_shaders(camera, Pack.whole)
        for kind, shown in (("pictures", renderer), ("whole", whole._renderer)):
            calls[f"{label}: {kind}"] = lambda shown=shown: take_pictures(shown._scenes(), shown._cameras)
        moves[f"{label}: pictures"] = move
        moves[f"{label}: whole"] = lambda s=whole, rows=rows: s.step(torch.rand(num_envs, s.action_dim) * 2 - 1, rows)
    task = _rgb_task(num_envs, size)
    calls["PickCube, 1 camera: observation"] = calls["PickCube, 1 camera: one row"] = lambda: task.get_obs({})
    moves["PickCube, 1 camera: observation"] = lambda: task.advance(torch.rand(num_envs, 8) * 2 - 1, range(num_envs))
    moves["PickCube, 1 camera: one row"] = lambda: _reset_one(task)
    task._get_obs_extra = lambda info: {}  # the task's numbers are no part of a picture
    return _timed(calls, moves, rounds, num_envs)


def _timed(
    calls: Mapping[str, Callable], moves: Mapping[str, Callable], rounds: int, num_envs: int
) -> dict[str, dict[str, float]]:
    import numpy as np

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + rounds):
        for name, call in calls.items():
            moves[name]()
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    kept = {name: np.array(values[WARM_UP:]) * 1e3 / num_envs for name, values in seconds.items()}
    return {
        name: {"median": float(np.median(values)), "min": float(values.min()), "max": float(values.max())}
        for name, values in kept.items()
    }


def _env(num_envs: int, size: int, decimate: bool, views: Mapping[str, object]) -> object:
    from envs.maniskill import make_env
    from rlinf_embodied.config import EnvConfig

    env = make_env(EnvConfig(obs_size=size, decimate=decimate, **views), num_envs)
    env.reset(list(range(num_envs)))
    return env


def _rgb_task(num_envs: int, size: int) -> object:
    import mani_skill.envs  # noqa: F401  registers the tasks
    import numpy as np

    from envs.batched.build import make_batched_task
    from envs.batched.decimate import decimate_visuals

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
    import numpy as np
    import torch

    task.get_obs({})
    seeds = np.random.default_rng().integers(1 << 30, size=task.num_envs)
    task.reset(seed=seeds, options={"env_idx": torch.tensor([0])})


# ------------------------------------------------------------------------------------------------------------- quality
def _differences(size: int, sheet: str) -> dict[str, dict[str, float]]:
    """Returns how decimated pictures differ from full ones along noisy expert episodes, by camera."""
    import numpy as np

    full, full_objects = _episode(size, False)
    light, light_objects = _episode(size, True)
    if sheet:
        _write_sheet(sheet, full, light)
    table = {}
    for k, camera in enumerate(("base_camera", "hand_camera")):
        difference = np.abs(full[:, :, k].astype(int) - light[:, :, k])
        table[f"{camera}, {size} pixels"] = {
            "mean_of_255": float(difference.mean()),
            "strong_pct": 100 * float((difference.max(-1) > STRONG).mean()),
            "other_object_pct": 100 * float((full_objects[:, :, k] != light_objects[:, :, k]).mean()),
        }
    return table


def _episode(size: int, decimate: bool) -> tuple:
    """Returns pictures uint8 [T, N, K, S, S, 3] and the objects in them [T, N, K, S, S] of the same four episodes."""
    import numpy as np
    import torch

    from envs.batched.rendering import take_pictures
    from envs.batched.shaders import Pack, give_shaders

    env = _env(4, size, decimate, VIEWS)
    renderer = env._sim._renderer
    cameras = [camera for row in renderer._cameras for camera in row]
    for camera in cameras:
        give_shaders(camera, Pack.whole)
    pictures, objects = [], []
    for step in range(EPISODE_STEPS):
        noise = torch.randn(4, env.spec.action_dim, generator=torch.Generator().manual_seed(step))
        env._sim.step((env.expert_actions() + 0.15 * noise).clamp(-1, 1), range(4))
        if step % EVERY == 0:
            pictures.append(take_pictures(renderer._scenes(), renderer._cameras).numpy())
            seen = np.stack([camera.get_picture("PositionSegmentation")[..., 3] for camera in cameras])
            objects.append(seen.reshape(pictures[-1].shape[:-1]))
    env.close()
    return np.stack(pictures), np.stack(objects)


def _write_sheet(path: str, *rows: object) -> None:
    """Writes pictures of one episode: a row of enlarged pictures for each argument, base and hand camera in turn."""
    import numpy as np
    from PIL import Image

    lines = [np.concatenate([row[t, 0, k] for t in (0, 2, 4) for k in (0, 1)], 1) for row in rows]
    image = Image.fromarray(np.concatenate(lines))
    image.resize((image.width * 3, image.height * 3), Image.Resampling.NEAREST).save(path)


if __name__ == "__main__":
    main(sys.argv[1:])
