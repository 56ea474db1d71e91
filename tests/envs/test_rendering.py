"""Images: faster shaders that draw the same, and nothing drawn twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def task() -> Iterator[object]:
    import mani_skill.envs  # noqa: F401  registers the tasks

    from envs.batched.build import make_batched_task

    made = make_batched_task("PickCube-v1", 3, True, obs_mode="rgb", sensor_configs={"width": 48, "height": 48})
    made.reset(seed=np.arange(3))
    yield made
    made.close()


class _Taken:
    """Counts the images that a camera takes."""

    def __init__(self, camera: object) -> None:
        self.camera, self.count = camera, 0

    def take_picture(self) -> None:
        self.count += 1
        self.camera.take_picture()

    def __getattr__(self, name: str) -> object:
        return getattr(self.camera, name)


@pytest.fixture
def counters(task: object, monkeypatch: pytest.MonkeyPatch) -> list[_Taken]:
    task.get_obs(task.get_info())
    group = task.scene.camera_groups["base_camera"]
    counters = [_Taken(camera) for camera in group._cameras]
    monkeypatch.setattr(group, "_cameras", counters)
    monkeypatch.setattr("envs.batched.rendering.pack_of", lambda camera: None)
    return counters


def _rgb(task: object) -> torch.Tensor:
    return task.get_obs(task.get_info())["sensor_data"]["base_camera"]["rgb"]


def _stock_images(task: object, name: str) -> np.ndarray:
    """Draws with SAPIEN's own shaders, from cameras beside the task's."""
    import sapien
    from mani_skill.render.shaders import PREBUILT_SHADER_CONFIGS, set_shader_pack

    images = []
    for scene, camera in zip(task.scene.sub_scenes, task._sensors["base_camera"].camera._render_cameras, strict=True):
        set_shader_pack(PREBUILT_SHADER_CONFIGS["minimal"])
        stock = sapien.render.RenderCameraComponent(camera.width, camera.height)
        stock.set_fovy(camera.fovy, compute_x=True)
        stock.near, stock.far, stock.local_pose = camera.near, camera.far, camera.local_pose
        camera.entity.add_component(stock)
        scene.render_system.step()
        stock.take_picture()
        images.append(stock.get_picture(name))
        camera.entity.remove_component(stock)
    return np.stack(images)


def test_a_scene_is_drawn_again_only_when_it_looks_otherwise(task: object, counters: list[_Taken]) -> None:
    first = _rgb(task).clone()
    assert torch.equal(_rgb(task), first)
    assert [counter.count for counter in counters] == [0, 0, 0]
    task.reset(seed=np.arange(3) + 10, options={"env_idx": torch.tensor([1])})
    second = _rgb(task)
    assert [counter.count for counter in counters] == [0, 1, 0]
    assert (second != first).flatten(1).any(1).tolist() == [False, True, False]
    task.advance(torch.ones(3, 8), [2])
    third = _rgb(task)
    assert [counter.count for counter in counters] == [0, 1, 1]
    assert (third != second).flatten(1).any(1).tolist() == [False, False, True]


def test_hiding_and_showing_an_object_draws_its_scene_again(task: object, counters: list[_Taken]) -> None:
    before = _rgb(task).clone()
    task.cube.hide_visual()
    hidden = _rgb(task)
    assert [counter.count for counter in counters] == [1, 1, 1]
    assert (hidden != before).flatten(1).any(1).all()
    task.cube.show_visual()
    assert torch.equal(_rgb(task), before)


def test_an_observation_keeps_its_images(task: object) -> None:
    kept = _rgb(task)
    copy = kept.clone()
    task.advance(torch.ones(3, 8), [0, 1, 2])
    assert not torch.equal(_rgb(task), copy)
    assert torch.equal(kept, copy)


def test_shaders_are_known_in_an_environment_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sapien

    from envs.batched import shaders

    (tmp_path / "link").symlink_to(shaders.STOCK_FOLDER.parent)
    monkeypatch.setattr(shaders, "STOCK_FOLDER", tmp_path / "link" / shaders.STOCK_FOLDER.name)
    with shaders.camera_shaders(sapien.Scene(), shaders.Pack.default):
        assert shaders.current_pack() == "default"


@pytest.mark.parametrize("otherwise", ["changed", "missing"])
def test_a_sapien_with_other_shaders_draws_with_its_own(
    otherwise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from envs.batched import shaders
    from envs.batched.shaders import STOCK, Pack, shader_folder

    folder = Path(shutil.copytree(shaders.STOCK_FOLDER, tmp_path / "shaders"))
    monkeypatch.setattr(shaders, "STOCK_FOLDER", folder)
    assert shader_folder.__wrapped__(Pack.colour) != STOCK
    assert not caplog.messages
    lights = folder / "common" / "lights.glsl"  # no line of it is changed, but the others include it
    if otherwise == "changed":
        lights.write_text(lights.read_text() + "\n")
    else:
        lights.unlink()
    assert shader_folder.__wrapped__(Pack.colour) == STOCK
    assert "other shaders than the faster ones are made from (common/lights.glsl)" in caplog.text


@pytest.mark.slow
def test_what_is_transparent_is_drawn_as_by_the_stock_shaders(task: object) -> None:
    from envs.batched.rendering import set_visible
    from envs.batched.shaders import Pack, pack_of

    task.reset(seed=np.arange(3) + 30)
    bodies = [b for cube in task.cube._objs for b in cube.components if hasattr(b, "visibility")]
    for body in bodies:
        body.visibility = 0.4
    drawn = _rgb(task)
    assert {pack_of(camera) for camera in task._sensors["base_camera"].camera._render_cameras} <= {*Pack}
    assert np.array_equal(drawn.numpy(), _stock_images(task, "Color")[..., :3])
    for cube in task.cube._objs:
        set_visible(cube, True)


def test_a_camera_that_is_asked_for_more_than_colours_gives_it(task: object) -> None:
    task.reset(seed=np.arange(3) + 40)
    _rgb(task)
    asked = task._sensors["base_camera"].get_obs(rgb=True, depth=True, segmentation=True)
    stock = _stock_images(task, "PositionSegmentation")
    assert np.array_equal(asked["segmentation"].numpy(), stock[..., [3]])
    assert np.array_equal(asked["depth"].numpy(), -stock[..., [2]])
    task.reset(seed=np.arange(3) + 41)  # and goes on so
    assert np.array_equal(_rgb(task).numpy(), _stock_images(task, "Color")[..., :3])


def test_a_vector_env_shows_lighter_meshes_on_request() -> None:
    from envs.vector import make

    def images(decimate: bool) -> torch.Tensor:
        env = make("PickCube-v1", 2, obs_mode="rgb", sensor_configs={"width": 64, "height": 64}, decimate=decimate)
        seen = env.reset(seed=[1, 2])[0]["sensor_data"]["base_camera"]["rgb"]
        env.close()
        return seen.int()

    difference = (images(True) - images(False)).abs().float().mean()
    assert 0 < difference < 3
