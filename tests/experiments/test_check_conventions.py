"""Planted faults are named and clean data raise no alarm: a cloned policy, and one that reads images."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from runs import clone, tiny
from scipy.spatial.transform import Rotation

from experiments.check_conventions import (
    ConventionsConfig,
    check,
    compose_check,
    find_faults,
    open_policy,
    read_demonstrations,
)
from experiments.examples import small_pi
from policies.pi.policy import PiPolicy
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.compose import compose_export
from rlinf_embodied.data.lerobot import LeRobotEpisode
from rlinf_embodied.data.lerobot_writer import write_dataset
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.embodied.sources import open_dataset
from rlinf_embodied.interfaces.envs import Observation

ENV = ["env=point_reach", "env.obs_size=16", "env.chunk=4", "env.horizon=12", "env.block_size=4"]
DEGREES = 57.29578
SHARED = next((p for p in Path(__file__).parents if (p / "shared/data/real_episodes").exists()), None)


@pytest.fixture(scope="module")
def cloned(tmp_path_factory) -> ConventionsConfig:
    out = tmp_path_factory.mktemp("data") / "reach"
    expert = ["policy=expert", "num_episodes=24", f"out={out}", "env.cameras=[base_camera]"]
    export_dataset(compose_export([*ENV, *expert]), lambda *progress: None)
    return ConventionsConfig(checkpoint=str(clone(tiny())), data=str(out), num_frames=100)


def with_state(demos: Demonstrations, change) -> Demonstrations:
    return replace(demos, observation=demos.observation.with_proprio(change(demos.observation.proprio)))


PLANTED = {
    "entry 0 of the actions has the other sign": lambda d: replace(d, actions=d.actions * torch.tensor([-1.0, 1.0])),
    "entry 1 of the actions (a gripper's place) has the other sign": lambda d: replace(
        d, actions=d.actions * torch.tensor([1.0, -1.0])
    ),
    "entries 0 and 1 of the actions are swapped": lambda d: replace(d, actions=d.actions.flip(-1)),
    "entries 0 and 1 of the state are swapped": lambda d: with_state(d, lambda s: s[:, [1, 0, 2, 3]]),
    "the state is in degrees, not radians": lambda d: with_state(d, lambda s: s * DEGREES),
    "the actions have another scale (normaliser, units or frame rate)": lambda d: replace(d, actions=d.actions * 0.3),
    "entry 1 of the actions (a gripper's place) lies in [0, 1], not [-1, 1]": lambda d: replace(
        d, actions=torch.stack([d.actions[..., 0], (d.actions[..., 1] + 1) / 2], -1)
    ),
}


def test_faults_in_the_data_of_a_cloned_policy_are_named_and_clean_data_raises_no_alarm(cloned, capsys) -> None:
    assert check(cloned) == 0
    assert "no fault found" in capsys.readouterr().out
    predict, demos, _ = read_demonstrations(cloned)
    for name, plant in PLANTED.items():
        (fault,) = find_faults(predict, plant(demos))  # entry i of the action is goal i less point i: two explanations
        assert name in (fault.name, *fault.alternatives)
        assert len(fault.alternatives) <= 2


# --------------------------------------------------------------------------------------------------------------- images
def reads_images(seen: Observation) -> torch.Tensor:
    """Actions [M, 1, 3]: column and row of the red pixel in the first camera, column of the one in the second."""
    first, second = (image[..., 0].float() - image[..., 2].float() for image in seen.images.values())
    places = [first.amax(1).argmax(1), first.amax(2).argmax(1), second.amax(1).argmax(1)]
    return (torch.stack(places, 1) / 7.5 - 1)[:, None]


def with_images(demos: Demonstrations, change) -> Demonstrations:
    images = change(dict(demos.observation.images))
    return replace(demos, observation=replace(demos.observation, images=images))


def test_faults_in_images_are_named() -> None:
    generator = torch.Generator().manual_seed(0)
    images = {}
    for name in ("front", "wrist"):
        images[name] = torch.full((60, 16, 16, 3), 40, dtype=torch.uint8)
        row, column = torch.randint(0, 16, (2, 60), generator=generator)
        images[name][torch.arange(60), row, column] = torch.tensor([250, 0, 0], dtype=torch.uint8)
    clean = Observation({"proprio": torch.randn(60, 2, generator=generator)}, ("reach",) * 60, images)
    noise = 0.1 * torch.randn(60, 1, 3, generator=generator)
    demos = Demonstrations(clean, reads_images(clean) + noise)
    both = lambda way: lambda shown: {name: way(image) for name, image in shown.items()}  # noqa: E731
    planted = {
        "images of front, wrist are mirrored": both(lambda x: x.flip(-2)),
        "images of front, wrist are rotated by 180 degrees": both(lambda x: x.flip(-3, -2)),
        "images of front, wrist are BGR, not RGB": both(lambda x: x.flip(-1)),
        "images of wrist are rotated by 90 degrees to the left": lambda shown: {
            **shown,
            "wrist": shown["wrist"].rot90(1, (-3, -2)),
        },
        "images of front are upside down": lambda shown: {**shown, "front": shown["front"].flip(-3)},
        "cameras front and wrist are swapped": lambda shown: {"front": shown["wrist"], "wrist": shown["front"]},
    }
    assert find_faults(reads_images, demos) == []
    found = {n: [fault.name for fault in find_faults(reads_images, with_images(demos, p))] for n, p in planted.items()}
    assert found == {name: [name] for name in planted}


# -------------------------------------------------------------------------------------------------------------- actions
ROWS, CHUNK = 80, 4
WEIGHTS = torch.randn(8, CHUNK * 7, generator=torch.Generator().manual_seed(1))


def moves(seen: Observation) -> torch.Tensor:
    """Actions [M, C, 7]: a translation, a rotation vector, and a gripper in [0, 1]."""
    actions = torch.tanh(seen.proprio @ WEIGHTS).reshape(-1, CHUNK, 7)
    return torch.cat([actions[..., :6], (actions[..., 6:] + 1) / 2], -1)


def of_euler_angles(actions: torch.Tensor) -> torch.Tensor:
    turns = Rotation.from_rotvec(actions[..., 3:6].reshape(-1, 3).numpy()).as_euler("xyz")
    return torch.cat([actions[..., :3], torch.from_numpy(turns).float().reshape(-1, CHUNK, 3), actions[..., 6:]], -1)


def in_tool(actions: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    turn = torch.from_numpy(Rotation.from_rotvec(state[:, 3:6].numpy()).as_matrix()).float()
    return torch.cat(
        [torch.einsum("mji,mcj->mci", turn, actions[..., k : k + 3]) for k in (0, 3)] + [actions[..., 6:]], -1
    )


def test_faults_in_poses_grippers_rates_and_statistics_are_named() -> None:
    generator = torch.Generator().manual_seed(0)
    clean = Observation({"proprio": torch.randn(ROWS, 8, generator=generator)}, ("reach",) * ROWS)
    noise = 0.02 * torch.randn(ROWS, CHUNK, 7, generator=generator)
    state, scale = clean.proprio, torch.tensor([1.0, 2.0, 0.3, 1.0, 5.0, 1.0, 1.0])
    planted = {
        "the rotations of the actions are Euler angles, not rotation vectors": of_euler_angles,
        "the actions are in the frame of the tool, not the base (orientation at 3 of the state: rotation vectors)": (
            lambda a: in_tool(a, state)
        ),
        "entry 6 of the actions (a gripper's place) lies in [0, 1], and the other end is open": (
            lambda a: torch.cat([a[..., :6], 1 - a[..., 6:]], -1)
        ),
        "the actions are in degrees, not radians": lambda a: a * DEGREES,
        "the actions are relative, not absolute, to the state": lambda a: a - state[:, None, :7],
        "the data has twice the frame rate that the policy learned (absolute actions)": (
            lambda a: a.repeat_interleave(2, 1)[:, :CHUNK]
        ),
        "the data has half the frame rate that the policy learned (relative actions)": (
            lambda a: torch.cat([a.unflatten(1, (2, 2)).sum(2), torch.zeros(ROWS, 2, 7)], 1)
        ),
        "the actions have another scale and offset in each entry (statistics)": lambda a: a * scale + 0.3,
    }
    assert find_faults(moves, Demonstrations(clean, moves(clean) + noise)) == []
    for name, plant in planted.items():
        changed = plant(moves(clean)) + noise
        is_pad = (torch.arange(CHUNK) >= 2).expand(ROWS, -1) if "half" in name else None
        found = find_faults(moves, Demonstrations(clean, changed, is_pad=is_pad))
        assert [fault.name for fault in found[:1]] == [name], (name, found)


# ------------------------------------------------------------------------------------------------- published policies
def on_actions(change):
    return lambda demos: replace(demos, actions=change(demos.actions))


REAL = {
    "images of image_1, image_0 are upside down": lambda d: with_images(
        d, lambda shown: {name: x.flip(-3) for name, x in shown.items()}
    ),
    "images of image_1, image_0 are mirrored": lambda d: with_images(
        d, lambda shown: {name: x.flip(-2) for name, x in shown.items()}
    ),
    "images of image_0 are rotated by 180 degrees": lambda d: with_images(
        d, lambda shown: {**shown, "image_0": shown["image_0"].flip(-3, -2)}
    ),
    "entries 0 and 1 of the state are swapped": lambda d: with_state(d, lambda s: s[:, [1, 0, 2, 3, 4, 5, 6]]),
    "the state is in degrees, not radians": lambda d: with_state(d, lambda s: s * DEGREES),
    "entry 0 of the actions has the other sign": on_actions(lambda a: a * torch.tensor([-1.0, *[1.0] * 6])),
    "entries 0 and 2 of the actions are swapped": on_actions(lambda a: a[..., [2, 1, 0, 3, 4, 5, 6]]),
    "entry 6 of the actions (a gripper's place) lies in [0, 1], and the other end is open": on_actions(
        lambda a: torch.cat([a[..., :6], 1 - a[..., 6:]], -1)
    ),
    "the actions are in degrees, not radians": on_actions(lambda a: a * DEGREES),
    "the actions have another scale and offset in each entry (statistics)": on_actions(
        lambda a: a * torch.tensor([1, 3, 0.3, 1, 4, 1, 1]) + 0.02
    ),
}


def fit(policy: PiPolicy, demos: Demonstrations, steps: int) -> None:
    """Fits a policy to chunks, which takes some two minutes."""
    parameters, generator = policy.imitation_parameters(True), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    assert policy.imitation_noise is not None
    for step in range(steps):
        part = demos.rows(torch.randint(len(demos), (32,), generator=generator))
        targets = part.targets("cpu") | {"noise": policy.imitation_noise.draw(0, "fit", step, range(32))}
        optimizer.zero_grad()
        (policy.imitation_loss(policy.encode_trainable(part.observation), part.actions, targets) / 32).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rate.step()


@pytest.mark.slow
@pytest.mark.skipif(SHARED is None, reason="shared/data/real_episodes is in no folder above the project's")
def test_faults_in_real_episodes_are_named_by_a_small_pi0_that_was_fitted_to_them(tmp_path) -> None:
    real = open_dataset(SHARED / "shared/data/real_episodes/bridge_rlds", "data")
    cameras = list(real.cameras)[:2]  # the others are black
    episodes = []
    for rows in map(real.frames, range(real.num_episodes)):
        shown = {name: real.images(name, np.array(rows)) for name in cameras}
        part = slice(rows.start, rows.stop)
        episodes.append(LeRobotEpisode(real.task(rows.start), real.columns["action"][part], real.state[part], shown))
    write_dataset(data := tmp_path / "data", episodes, 5, "widowx")
    words = " ".join(dict.fromkeys(" ".join(real.tasks).split()))
    sizes = {"cameras": cameras, "chunk": 4, "image_size": 28, "hidden_size": 64}
    small_pi.write_small(small_pi.Options(out=str(tmp_path / "pi0"), data=str(data), instruction=words, **sizes))
    options = ["clip_actions=false", "expert_only=false", "freeze_vision=false"]
    given = ["policy=pi0", "policy.critic=observation", *(f"policy.options.{option}" for option in options)]
    config = compose_check([f"checkpoint={tmp_path / 'pi0'}", f"data={data}", "num_frames=250", *given])
    policy = cast(PiPolicy, open_policy(config, open_dataset(data, "data")))
    fit(policy, read_demonstrations(config)[1], steps=350)
    policy.save(tmp_path / "fitted")
    config = replace(config, checkpoint=str(tmp_path / "fitted"), num_frames=40)
    with torch.no_grad():
        predict, demos, _ = read_demonstrations(config)
        assert find_faults(predict, demos) == []
        found = {name: find_faults(predict, plant(demos))[0].name for name, plant in REAL.items()}
    assert found == {name: name for name in REAL}
