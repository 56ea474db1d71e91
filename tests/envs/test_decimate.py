"""Decimated visuals are lighter, look alike, and are shared between rows."""

from __future__ import annotations

import numpy as np
import pytest
import trimesh

from envs.batched import decimate, meshes
from envs.batched.meshes import Mesh, decimated
from tests.observations import stacked


def _mesh(vertices: np.ndarray, triangles: np.ndarray) -> Mesh:
    vertices = np.asarray(vertices, np.float32)
    return Mesh(vertices, np.asarray(triangles, np.uint32), np.zeros_like(vertices), vertices[:, :2].copy())


def _sphere(subdivisions: int, radius: float) -> Mesh:
    sphere = trimesh.creation.icosphere(subdivisions=subdivisions, radius=radius)
    return _mesh(sphere.vertices, sphere.faces)


@pytest.mark.parametrize("pixels_across", [16, 64])
def test_a_decimated_sphere_is_that_sphere_to_a_fraction_of_a_pixel(pixels_across: int) -> None:
    sphere = _sphere(5, 2.0)
    pixel = 4.0 / pixels_across
    light = decimated(sphere, pixel)
    assert len(sphere.triangles) > 20_000
    budget = meshes.TRIANGLES_PER_PIXEL * 3**0.5 * pixels_across  # of the bounding box's diagonal
    assert 0.8 * budget <= len(light.triangles) <= budget + 1
    assert abs(light.vertices[light.triangles].mean(1)).max() <= 2.0 + pixel / 4
    assert np.linalg.norm(light.vertices[light.triangles].mean(1), axis=1).min() > 2.0 - pixel
    assert (light.normals * light.vertices / 2.0).sum(1) == pytest.approx(1.0, abs=0.1)  # outwards
    assert {a.dtype for a in (light.vertices, light.normals, light.uvs)} == {np.dtype(np.float32)}
    assert abs(light.uvs - light.vertices[:, :2]).max() < 2 * pixel  # what was drawn here still is


def test_a_soup_of_loose_pieces_is_joined() -> None:
    draw = np.random.default_rng(0)
    centres = draw.uniform(-1, 1, (5000, 1, 3))
    soup = (centres + draw.normal(0, 0.01, (5000, 3, 3))).reshape(-1, 3)
    light = decimated(_mesh(soup, np.arange(len(soup)).reshape(-1, 3)), 0.1)
    assert 0 < len(light.triangles) <= meshes.SOUP * meshes.TRIANGLES_PER_PIXEL * 12**0.5 / 0.1 * 1.1


def test_edges_of_a_box_stay_sharp() -> None:
    box = trimesh.creation.box((1.0, 1.0, 1.0)).subdivide().subdivide().subdivide()
    light = decimated(_mesh(box.vertices, box.faces), 0.1)
    assert len(light.triangles) < len(box.faces)
    assert abs(light.normals).max(1) == pytest.approx(1.0, abs=1e-3)  # each along an axis
    assert abs(light.vertices).max() == pytest.approx(0.5, abs=1e-5)
    assert trimesh.Trimesh(light.vertices, light.triangles).area == pytest.approx(6.0, rel=1e-3)


def test_ground_becomes_one_rectangle_with_its_texture_but_not_with_a_hole() -> None:
    x, y = np.meshgrid(np.arange(41.0), np.arange(31.0), indexing="ij")
    vertices = np.stack([x.ravel(), y.ravel(), np.full(x.size, -0.9)], 1)
    corner = (np.arange(40)[:, None] * 31 + np.arange(30)).ravel()
    triangles = np.concatenate([np.c_[corner, corner + 31, corner + 32], np.c_[corner, corner + 32, corner + 1]])
    ground = _mesh(vertices, triangles)
    ground.normals[:] = (0, 0, 1)
    ground.uvs[:] = ground.uvs * 0.25 + 3
    light = decimated(ground, 0.01)
    assert len(light.triangles) == 2
    assert light.uvs == pytest.approx(light.vertices[:, :2] * 0.25 + 3)
    a, b, c = light.vertices[light.triangles].transpose(1, 0, 2)
    assert np.cross(b - a, c - a).sum(0) == pytest.approx([0, 0, 2400])  # both face up; area 1200
    pierced = Mesh(ground.vertices, np.delete(ground.triangles, 600, 0), ground.normals, ground.uvs)
    assert len(decimated(pierced, 0.01).triangles) > 2


def test_what_is_smaller_than_a_pixel_is_left_out_and_what_is_light_stays() -> None:
    sphere = _sphere(2, 0.01)
    assert len(decimated(sphere, 0.5).triangles) == 0
    assert decimated(sphere, 1e-4) is sphere


def _triangles(scene: object) -> int:
    bodies = [b for entity in scene.entities for b in entity.components if isinstance(b, decimate.RenderBody)]
    shapes = [s for body in bodies for s in body.render_shapes if isinstance(s, decimate.RenderMesh)]
    return sum(len(part.triangles) for shape in shapes for part in shape.parts)


@pytest.mark.sim
def test_the_box_around_a_body_is_sapiens() -> None:
    from envs.maniskill import make_env
    from rlinf_embodied.config import EnvConfig

    env = make_env(EnvConfig(cameras=["hand_camera"], options={"robot": "panda_wristcam", "decimate": False}), 1)
    env.reset([1])
    bodies = [b for e in env.simulator.task.scene.sub_scenes[0].entities for b in e.components]
    bodies = [b for b in bodies if isinstance(b, decimate.RenderBody)]
    meshes_only = [b for b in bodies if all(isinstance(s, decimate.RenderMesh) for s in b.render_shapes)]
    assert len(meshes_only) > 10
    for body in meshes_only:
        corners = [decimate._corners(body, shape, decimate._source(shape)) for shape in body.render_shapes]
        low, high = body.get_global_aabb_fast()
        assert np.concatenate(corners).min(0) == pytest.approx(low, abs=1e-6)
        assert np.concatenate(corners).max(0) == pytest.approx(high, abs=1e-6)
    env.close()


@pytest.mark.slow
@pytest.mark.sim
def test_the_decimated_images_look_like_the_full_ones() -> None:
    from envs.maniskill import make_env
    from rlinf_embodied.config import EnvConfig

    views = ["base_camera", "hand_camera"]
    images, triangles = {}, {}
    for size, decimated_too in ((64, False), (64, True), (256, True)):
        options = {"robot": "panda_wristcam", "camera_fov": 0.8, "decimate": decimated_too}
        env = make_env(EnvConfig(obs_size=size, cameras=views, options=options), 1)
        images[size, decimated_too] = stacked(env.reset([1])).float()
        triangles[size, decimated_too] = _triangles(env.simulator.task.scene.sub_scenes[0])
        env.close()
    assert triangles[64, False] > 400_000
    assert triangles[64, True] < 4_000
    assert triangles[256, True] > 2 * triangles[64, True]
    difference = (images[64, True] - images[64, False]).abs()
    assert 0 < difference.mean() < 2  # of 255
    assert (difference.amax(-1) > 40).float().mean() < 0.02  # edges
