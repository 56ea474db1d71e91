"""Lighter visual meshes for software rendering, where a small picture costs what its vertices cost."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import fast_simplification
import numpy as np
import sapien

from envs.batched.disk_cache import cached

KEPT_FRACTION = 0.03  # of a mesh's triangles
MIN_TRIANGLES = 60  # per mesh part, or small links vanish
MAX_TRIANGLES = 150  # per mesh part: the Panda's wrist camera alone has half a million
LIGHT_TRIANGLES = 600  # bodies below this stay as they are
WELD_M = 1e-6  # vertices closer than this are one
SLACK = 4  # times the target is near enough; a mesh that stays above it is a soup of loose pieces
GRID_CELLS = 24  # per longest side, for such meshes
AGGRESSIVENESS = (3, 5, 7)  # of edge collapse, tried in turn: 7 changes shapes twice as much, 3 may stop too early

RenderBody = sapien.render.RenderBodyComponent
RenderMesh = sapien.render.RenderShapeTriangleMesh
Mesh = tuple[np.ndarray, np.ndarray, np.ndarray]  # vertices float32 [V, 3], triangles uint32 [F, 3], normals [V, 3]


@dataclass(frozen=True, slots=True)
class Swap:
    """An entity's visual body and the decimated copy that took its place."""

    entity: sapien.Entity
    heavy: RenderBody
    light: RenderBody

    def show_heavy(self) -> None:
        """Puts the original in place."""
        _exchange(self.entity, self.light, self.heavy)

    def show_light(self) -> None:
        """Puts the decimated copy in place."""
        _exchange(self.entity, self.heavy, self.light)


def decimate_visuals(scene: sapien.Scene) -> list[Swap]:
    """Replaces the heavy visual meshes of a scene by decimated copies with the same materials, scales and poses."""
    swaps = []
    for entity in scene.entities:
        for heavy in [c for c in entity.components if isinstance(c, RenderBody)]:
            light = _lighter(heavy)
            if light is not None:
                swaps.append(Swap(entity, heavy, light))
                swaps[-1].show_light()
    return swaps


def _exchange(entity: sapien.Entity, old: RenderBody, new: RenderBody) -> None:
    new.visibility = old.visibility
    entity.remove_component(old)
    entity.add_component(new)


_light_bodies: dict[tuple, RenderBody | None] = {}  # the rows of an env, and the envs of a process, share meshes


def _lighter(body: RenderBody) -> RenderBody | None:
    """Returns a decimated copy of a visual body, None where that does not pay or a shape is no mesh."""
    shapes = body.render_shapes
    if not shapes or not all(isinstance(shape, RenderMesh) for shape in shapes):
        return None
    names = [_source(shape) for shape in shapes]
    key = tuple((name, *_placement(shape)) for name, shape in zip(names, shapes, strict=True))
    if key not in _light_bodies:
        _light_bodies[key] = _build(shapes, names)
    light = _light_bodies[key]
    return None if light is None else light.clone()


def _placement(shape: RenderMesh) -> tuple[bytes, bytes, bytes]:
    pose = shape.local_pose
    return np.asarray(shape.scale).tobytes(), pose.p.tobytes(), pose.q.tobytes()


def _source(shape: RenderMesh) -> str:
    """Returns a name that stands for the content of a shape's meshes."""
    if shape.filename:
        stat = os.stat(shape.filename)
        return f"{shape.filename}|{stat.st_size}|{stat.st_mtime_ns}"
    digest = hashlib.blake2b(digest_size=16)
    for part in shape.parts:
        digest.update(part.vertices.tobytes() + part.triangles.tobytes())
        digest.update(bytes(np.asarray(part.material.base_color, np.float32)))
    return digest.hexdigest()


def _build(shapes: list[RenderMesh], names: list[str]) -> RenderBody | None:
    stored = [_stored_meshes(name, shape) for name, shape in zip(names, shapes, strict=True)]
    if sum(num_triangles for num_triangles, _ in stored) < LIGHT_TRIANGLES:
        return None
    light = RenderBody()
    for shape, (_, meshes) in zip(shapes, stored, strict=True):
        for part, (vertices, triangles, normals) in zip(shape.parts, meshes, strict=True):
            no_uvs = np.zeros((len(vertices), 2), np.float32)
            copy = RenderMesh(vertices, triangles, normals, no_uvs, part.material)
            copy.scale, copy.local_pose = shape.scale, shape.local_pose
            light.attach(copy)
    return light


def _stored_meshes(name: str, shape: RenderMesh) -> tuple[int, list[Mesh]]:
    """Returns a shape's number of triangles and its decimated parts, from the disk cache or for it."""
    settings = (KEPT_FRACTION, MIN_TRIANGLES, MAX_TRIANGLES, WELD_M, GRID_CELLS, AGGRESSIVENESS, SLACK)
    digest = hashlib.blake2b(f"{name}|{settings}".encode(), digest_size=16).hexdigest()

    def write(path: Path) -> None:
        parts = [(part.vertices, part.triangles) for part in shape.parts]  # reading them copies from the renderer
        arrays = {f"{k}/{i}": a for k, part in enumerate(parts) for i, a in enumerate(decimated_mesh(*part))}
        np.savez(path, num_triangles=sum(len(triangles) for _, triangles in parts), **arrays)

    with np.load(cached(f"meshes/{digest}.npz", write)) as stored:
        num_parts = (len(stored.files) - 1) // 3
        meshes = [(stored[f"{k}/0"], stored[f"{k}/1"], stored[f"{k}/2"]) for k in range(num_parts)]
        return int(stored["num_triangles"]), meshes


def decimated_mesh(vertices: np.ndarray, triangles: np.ndarray) -> Mesh:
    """Returns a copy of a mesh with about KEPT_FRACTION of its triangles (within bounds), and new vertex normals.

    Args:
        vertices: float32 [V, 3].
        triangles: integers [F, 3], indices of vertices.

    Returns:
        vertices float32 [V', 3], triangles uint32 [F', 3] with F' <= F, unit normals float32 [V', 3].
    """
    target = int(np.clip(len(triangles) * KEPT_FRACTION, MIN_TRIANGLES, MAX_TRIANGLES))
    target = min(target, len(triangles))
    points, faces = _simplified(*_welded(vertices, triangles, WELD_M), target)  # collapsing needs shared vertices
    if len(faces) > SLACK * target:  # many loose pieces do not collapse: join what falls into one cell of a grid
        cell = float(np.ptp(vertices, axis=0).max()) / GRID_CELLS
        points, faces = _simplified(*_welded(vertices, triangles, cell), target)
    across = np.cross(points[faces[:, 1]] - points[faces[:, 0]], points[faces[:, 2]] - points[faces[:, 0]])
    normals = np.zeros_like(points)
    for corner in range(3):
        np.add.at(normals, faces[:, corner], across)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True) + 1e-9
    return points.astype(np.float32), faces.astype(np.uint32), normals.astype(np.float32)


def _simplified(points: np.ndarray, faces: np.ndarray, target: int) -> tuple[np.ndarray, np.ndarray]:
    for aggressiveness in AGGRESSIVENESS:
        if len(faces) <= SLACK * target:
            break
        points, faces = fast_simplification.simplify(points, faces, target_count=target, agg=aggressiveness)
    return points, faces


def _welded(vertices: np.ndarray, triangles: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """Joins the vertices of each grid cell at the first of them; triangles that collapse or coincide are dropped."""
    _, first, inverse = np.unique(np.round(vertices / cell), axis=0, return_index=True, return_inverse=True)
    faces = inverse.reshape(-1)[triangles].astype(np.int32)
    a, b, c = faces.T
    faces = faces[(a != b) & (b != c) & (c != a)]
    _, once = np.unique(np.sort(faces, axis=1), axis=0, return_index=True)
    return vertices[first].astype(np.float32), np.ascontiguousarray(faces[np.sort(once)])
