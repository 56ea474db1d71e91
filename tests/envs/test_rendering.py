"""Images: faster shaders that draw the same."""

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
    made.begin([0, 1, 2], [0, 1, 2])
    yield made
    made.close()


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
    assert "differ from those that the faster ones are made from (common/lights.glsl)" in caplog.text


@pytest.mark.slow
def test_what_is_transparent_is_drawn_as_by_the_stock_shaders(task: object) -> None:
    from envs.batched.rendering import set_visible
    from envs.batched.shaders import Pack, pack_of

    task.begin([0, 1, 2], [30, 31, 32])
    bodies = [b for cube in task.cube._objs for b in cube.components if hasattr(b, "visibility")]
    for body in bodies:
        body.visibility = 0.4
    drawn = _rgb(task)
    assert {pack_of(camera) for camera in task._sensors["base_camera"].camera._render_cameras} <= {*Pack}
    assert np.array_equal(drawn.numpy(), _stock_images(task, "Color")[..., :3])
    for cube in task.cube._objs:
        set_visible(cube, True)
