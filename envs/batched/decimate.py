"""Lighter visual meshes for software rendering, where the cost of a small picture is the number of vertices."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import fast_simplification
import numpy as np
import sapien

KEPT_FRACTION = 0.03  # of a mesh's triangles
MIN_TRIANGLES = 40  # per mesh part, or small links vanish
LIGHT_TRIANGLES = 600  # bodies below this stay as they are

RenderBody = sapien.render.RenderBodyComponent
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
    """Replaces the heavy visual meshes of a scene by decimated copies: same material, scale and pose, no textures' uvs."""
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


def _lighter(body: RenderBody) -> RenderBody | None:
    """Returns a decimated copy of a visual body, None where that does not pay or a shape is no mesh."""
    shapes = body.render_shapes
    if not all(isinstance(shape, sapien.render.RenderShapeTriangleMesh) for shape in shapes):
        return None
    if sum(len(part.triangles) for shape in shapes for part in shape.parts) < LIGHT_TRIANGLES:
        return None
    light = RenderBody()
    for shape in shapes:
        for part in shape.parts:
            vertices, triangles, normals = _decimated(part.vertices, part.triangles)
            no_uvs = np.zeros((len(vertices), 2), np.float32)
            copy = sapien.render.RenderShapeTriangleMesh(vertices, triangles, normals, no_uvs, part.material)
            copy.scale, copy.local_pose = shape.scale, shape.local_pose
            light.attach(copy)
    return light


_meshes: dict[bytes, Mesh] = {}  # by content: all rows of an env, and all envs of a process, share the work


def _decimated(vertices: np.ndarray, triangles: np.ndarray) -> Mesh:
    key = hashlib.blake2b(vertices.tobytes() + triangles.tobytes(), digest_size=16).digest()
    if key not in _meshes:
        _meshes[key] = decimated_mesh(vertices, triangles)
    return _meshes[key]


def decimated_mesh(vertices: np.ndarray, triangles: np.ndarray) -> Mesh:
    """Returns a copy of a mesh with about KEPT_FRACTION of its triangles, and new vertex normals."""
    welded, inverse = np.unique(vertices.round(6), axis=0, return_inverse=True)  # split vertices would tear apart
    faces = inverse.reshape(-1)[triangles].astype(np.int32)
    target = min(max(MIN_TRIANGLES, int(len(faces) * KEPT_FRACTION)), len(faces))
    points, faces = fast_simplification.simplify(welded.astype(np.float32), faces, target_count=target)
    across = np.cross(points[faces[:, 1]] - points[faces[:, 0]], points[faces[:, 2]] - points[faces[:, 0]])
    normals = np.zeros_like(points)
    for corner in range(3):
        np.add.at(normals, faces[:, corner], across)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True) + 1e-9
    return points.astype(np.float32), faces.astype(np.uint32), normals.astype(np.float32)
