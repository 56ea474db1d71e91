"""Decimated visuals are lighter, look alike, and are shared between rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trimesh

from envs.batched import decimate
from envs.batched.disk_cache import cached


def test_a_decimated_sphere_is_still_about_that_sphere() -> None:
    sphere = trimesh.creation.icosphere(subdivisions=5, radius=2.0)
    vertices, triangles, normals = decimate.decimated_mesh(
        np.asarray(sphere.vertices, np.float32), np.asarray(sphere.faces, np.uint32)
    )
    assert len(sphere.faces) > 20_000
    assert decimate.MIN_TRIANGLES <= len(triangles) <= decimate.SLACK * decimate.MAX_TRIANGLES
    assert np.linalg.norm(vertices, axis=1) == pytest.approx(2.0, rel=0.1)
    assert (normals * vertices / 2.0).sum(1) == pytest.approx(1.0, abs=0.1)  # outwards
    assert (vertices.dtype, triangles.dtype, normals.dtype) == (np.float32, np.uint32, np.float32)


def test_split_vertices_are_welded_before_edges_collapse() -> None:
    sphere = trimesh.creation.icosphere(subdivisions=4, radius=1.0)
    split = np.asarray(sphere.vertices, np.float32)[sphere.faces].reshape(-1, 3)  # three vertices for each triangle
    vertices, triangles, _ = decimate.decimated_mesh(split, np.arange(len(split), dtype=np.uint32).reshape(-1, 3))
    assert len(triangles) <= decimate.SLACK * decimate.MAX_TRIANGLES
    assert len(vertices) < len(triangles)


def test_a_soup_of_loose_pieces_is_clustered() -> None:
    draw = np.random.default_rng(0)
    centres = draw.uniform(-1, 1, (5000, 1, 3))
    soup = (centres + draw.normal(0, 0.01, (5000, 3, 3))).reshape(-1, 3).astype(np.float32)
    _, triangles, _ = decimate.decimated_mesh(soup, np.arange(len(soup), dtype=np.uint32).reshape(-1, 3))
    assert 0 < len(triangles) < 2500


def test_a_cached_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path / "cache"))
    calls = []

    def write(path: Path) -> None:
        calls.append(path)
        path.write_text("once")

    paths = {cached("folder/file.txt", write) for _ in range(3)}
    assert paths == {tmp_path / "cache" / "folder" / "file.txt"}
    assert len(calls) == 1
    assert [p.name for p in (tmp_path / "cache" / "folder").iterdir()] == ["file.txt"]


def test_where_the_cache_cannot_be_written_the_file_is_made_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", str(tmp_path / "file"))
    assert cached("name", lambda path: path.write_text("made") and None).read_text() == "made"


@pytest.mark.sim
def test_the_decimated_pictures_look_like_the_full_ones() -> None:
    from envs.maniskill import make_env
    from rlinf_embodied.config import EnvConfig

    pictures = []
    for decimated in (False, True):
        env = make_env(EnvConfig(decimate=decimated, robot="panda_wristcam", obs_size=64, camera_fov=0.8), 2)
        seen = env.reset([1, 2]).images
        assert seen is not None
        pictures.append(seen.float())
        scene = env._sim._task.scene.sub_scenes[1]
        triangles = sum(
            len(part.triangles)
            for entity in scene.entities
            for body in entity.components
            if isinstance(body, decimate.RenderBody)
            for shape in body.render_shapes
            if isinstance(shape, decimate.RenderMesh)
            for part in shape.parts
        )
        assert triangles < 6_000 if decimated else triangles > 400_000
        env.close()
    difference = (pictures[0] - pictures[1]).abs()
    assert 0 < difference.mean() < 4  # of 255
    assert (difference.amax(-1) > 40).float().mean() < 0.05  # edges
