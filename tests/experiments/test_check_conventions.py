"""Planted faults are named and clean data raise no alarm: behaviour-cloned policies, scripted ones, real episodes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import clone, tiny
from scipy.spatial.transform import Rotation
from torch.nn import functional as F

from envs.point_reach import PointSimulator
from experiments.bench import conventions
from experiments.check_conventions import ConventionsConfig, check, compose_check, find_faults, read_demonstrations
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.compose import compose_export
from rlinf_embodied.embodied.export import export_dataset
from rlinf_embodied.errors import ConfigError
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


def test_without_data_a_policy_is_checked_against_the_expert_of_an_env(cloned, capsys, monkeypatch) -> None:
    words = [f"checkpoint={cloned.checkpoint}", "num_episodes=12", "num_frames=80"]
    assert check(compose_check(words)) == 0  # in its own env
    assert "12 episodes of the expert in PointReach-v0\n" in capsys.readouterr().out
    turned, step, expert = torch.tensor([1.0, -1.0]), PointSimulator.step, PointSimulator.expert
    monkeypatch.setattr(PointSimulator, "step", lambda self, actions, rows: step(self, actions * turned, rows))
    monkeypatch.setattr(PointSimulator, "expert", lambda self: expert(self) * turned)
    own = [*ENV, "env.cameras=[base_camera]"]
    assert check(compose_check([*words, f"data={cloned.data}", *own])) == 1
    printed = capsys.readouterr().out
    assert printed.index("no fault found") < printed.index("12 episodes of the expert")  # the data comes first
    assert (
        "entry 1 of the actions (a gripper's place) has the other sign" in printed
    )  # or of the state: one explanation
    assert printed.endswith("1 faults found\n")


def test_without_data_and_env_a_published_folder_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data is '', but demonstrations are needed: give data=<folder> or env="):
        check(compose_check([f"checkpoint={tmp_path}", "policy=pi0"]))


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


def test_a_fault_that_changes_errors_little_is_named_if_there_are_many_frames() -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 16, (2, 600), generator=generator)
    image = torch.full((600, 16, 16, 3), 40, dtype=torch.uint8)
    image[torch.arange(600), places[0], places[1]] = torch.tensor([250, 0, 0], dtype=torch.uint8)
    clean = Observation(
        {"proprio": torch.randn(600, 2, generator=generator)}, ("reach",) * 600, {"a": image, "b": image}
    )
    demos = Demonstrations(clean, reads_images(clean) + 1.5 * torch.randn(600, 1, 3, generator=generator))
    assert find_faults(reads_images, demos) == []
    upside_down = with_images(demos, lambda shown: {**shown, "a": image.flip(-3)})
    (fault,) = find_faults(reads_images, upside_down)
    assert fault.name == "images of a are upside down"
    assert fault.error_undone > 0.9 * fault.error


def centre_of_light(seen: Observation) -> torch.Tensor:
    """Actions [M, 1, 2]: sine of thrice the distances of the light from the image's middle, in half sides."""
    light = seen.images["front"][..., 0].double()
    across = (torch.arange(128) + 0.5) / 64 - 1
    centres = [(light.sum(axis) * across).sum(1) / light.sum((1, 2)) for axis in (1, 2)]
    return (3 * torch.stack(centres, 1)[:, None]).sin().float()  # a crop is no scale of the actions


@pytest.mark.parametrize(("area", "name"), [(0.9, "cropped"), (1 / 0.9, "not cropped")])
def test_crops_are_named(area: float, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    y, x = (torch.rand(2, 60, 1, 1, generator=generator) * 90 + 19).unbind()
    rows, columns = torch.meshgrid(torch.arange(128), torch.arange(128), indexing="ij")
    spot = 255 * torch.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 60)
    clean = Observation({"proprio": x[:, 0]}, ("reach",) * 60, {"front": spot[..., None].expand(-1, -1, -1, 3).byte()})
    noise = 0.005 * torch.randn(60, 1, 2, generator=generator)
    demos = Demonstrations(clean, centre_of_light(clean) + noise)
    assert find_faults(centre_of_light, demos) == []
    border = round(64 * (area**0.5 - 1))
    framed = F.pad(clean.images["front"].movedim(-1, -3).float(), [border] * 4)  # or cropped, if it is negative
    resized = F.interpolate(framed, (128, 128), mode="bilinear").byte().movedim(-3, -1)
    faults = find_faults(centre_of_light, with_images(demos, lambda shown: {"front": resized}))
    assert [fault.name for fault in faults] == [f"images of front are {name} to 0.9 of their area"]


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
    turn = torch.from_numpy(Rotation.from_quat(state[:, 3:7].numpy()).as_matrix()).float()
    return torch.cat(
        [torch.einsum("mji,mcj->mci", turn, actions[..., k : k + 3]) for k in (0, 3)] + [actions[..., 6:]], -1
    )


def test_faults_in_poses_grippers_rates_and_statistics_are_named() -> None:
    generator = torch.Generator().manual_seed(0)
    quaternions = F.normalize(torch.randn(ROWS, 4, generator=generator))
    state = torch.cat([torch.randn(ROWS, 3, generator=generator), quaternions, torch.rand(ROWS, 1)], 1)
    clean = Observation({"proprio": state}, ("reach",) * ROWS)
    noise = 0.02 * torch.randn(ROWS, CHUNK, 7, generator=generator)
    pose, scale = torch.cat([state[:, :6], torch.zeros(ROWS, 1)], 1)[:, None], torch.tensor([1, 2, 0.3, 1, 5, 1, 1])
    halved, nothing = torch.tensor([*[0.5] * 6, 1.0]), torch.full((ROWS, 2, 7), torch.nan)
    sums = lambda a: torch.cat([a.unflatten(1, (2, 2))[..., :6].sum(2), a[:, 1::2, 6:]], -1)  # noqa: E731
    planted = {
        "the rotations of the actions are Euler angles, not rotation vectors": of_euler_angles,
        "the actions are in the frame of the tool, not the base (orientation at 3 of the state: xyzw)": (
            lambda a: in_tool(a, state)
        ),
        "entry 6 of the actions (a gripper's place) lies in [0, 1], and the other end is open": (
            lambda a: torch.cat([a[..., :6], 1 - a[..., 6:]], -1)
        ),
        "entry 6 of the actions (a gripper's place) lies in [-1, 1], not [0, 1]": (
            lambda a: torch.cat([a[..., :6], 2 * a[..., 6:] - 1], -1)
        ),
        "the actions are in degrees, not radians": lambda a: a * DEGREES,
        "the actions are relative, not absolute, to the state": lambda a: a - pose,
        "the actions are absolute, not relative to the state": lambda a: a + pose,
        "the data has twice the frame rate that the policy learned (absolute actions)": (
            lambda a: a.repeat_interleave(2, 1)[:, :CHUNK]
        ),
        "the data has twice the frame rate that the policy learned (relative actions)": (
            lambda a: a.repeat_interleave(2, 1)[:, :CHUNK] * halved
        ),
        "the data has half the frame rate that the policy learned (absolute actions)": (
            lambda a: torch.cat([a[:, 1::2], nothing], 1)
        ),
        "the data has half the frame rate that the policy learned (relative actions)": (
            lambda a: torch.cat([sums(a), nothing], 1)
        ),
        "the actions begin one step late": lambda a: torch.cat([a[:, 1:], nothing[:, :1]], 1),
        "the actions begin one step early": lambda a: torch.cat([nothing[:, :1], a[:, :-1]], 1),
        "the actions have another scale and offset in each entry (statistics)": lambda a: a * scale + 0.3,
    }
    assert find_faults(moves, Demonstrations(clean, moves(clean) + noise)) == []
    for name, plant in planted.items():
        changed = plant(moves(clean)) + noise
        demos = Demonstrations(clean, changed.nan_to_num(), is_pad=changed[..., 0].isnan())
        found = find_faults(moves, demos)
        assert [fault.name for fault in found] == [name], (name, found)
    first = replace(clean, state={"proprio": state[:, [0, 1, 2, 6, 3, 4, 5, 7]]})
    (fault,) = find_faults(moves, Demonstrations(first, moves(clean) + noise))
    assert fault.name == "the quaternion at 3 of the state has its real part first"


# ------------------------------------------------------------------------------------------------- published policies
@pytest.mark.skipif(SHARED is None, reason="shared/data/real_episodes is in no folder above the project's")
def test_the_benchmark_of_planted_faults_takes_real_episodes(capsys) -> None:
    data = str(SHARED / "shared/data/real_episodes/bridge_rlds")
    few = {"cameras": ["image_1", "image_0"], "faults": ["the actions are absolute"], "steps": 2}
    assert conventions.measure(conventions.Options(data=data, policy="tiny_vla", **few)) in (0, 1)
    assert "| the actions are absolute, not relative to the state |" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["pi0", "openvla_oft", "tiny_vla"])
@pytest.mark.skipif(SHARED is None, reason="shared/data/real_episodes is in no folder above the project's")
def test_faults_in_real_episodes_are_named_by_a_small_policy_that_was_fitted_to_them(policy: str, capsys) -> None:
    data = str(SHARED / "shared/data/real_episodes/bridge_rlds")
    cameras = ["image_1", "image_0"]  # the others are black
    assert conventions.measure(conventions.Options(data=data, policy=policy, cameras=cameras)) == 0
    assert capsys.readouterr().out.count("| as planted: ") >= 12
