"""Lighter visual meshes for software rendering, where vertices dominate the cost of a small image."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import sapien

from envs.batched.meshes import VERSION, Mesh, decimated
from rlinf_embodied.cache import cache_root, cached

VIEW_MARGIN = 1.25  # times the field of view, for bodies that move into it
UNSEEN = 4.0  # factor of the pixel width for bodies outside every camera's view
NEAREST_RADII = 0.5  # of a body's bounding sphere: a nearer camera sees only a part of it
SPARED_TRIANGLES = 100  # a body that would lose fewer is not decimated

Camera = sapien.render.RenderCameraComponent
RenderBody = sapien.render.RenderBodyComponent
RenderMesh = sapien.render.RenderShapeTriangleMesh
Material = sapien.render.RenderMaterial
_MATERIAL_FIELDS = (
    *("base_color", "base_color_texture", "emission", "emission_texture", "roughness", "roughness_texture"),
    *("metallic", "metallic_texture", "specular", "ior", "transmission", "transmission_roughness"),
)


@dataclass(frozen=True, slots=True)
class Swap:
    """An entity's visual body and the decimated copy that took its place."""

    entity: sapien.Entity
    heavy: RenderBody
    light: RenderBody

    def show_heavy(self) -> None:
        self._exchange(self.light, self.heavy)

    def show_light(self) -> None:
        self._exchange(self.heavy, self.light)

    def _exchange(self, old: RenderBody, new: RenderBody) -> None:
        new.visibility = old.visibility
        self.entity.remove_component(old)
        self.entity.add_component(new)


def decimate_visuals(scene: sapien.Scene, cameras: Sequence[Camera]) -> list[Swap]:
    """Replaces the heavy visual meshes of a scene by decimated copies with the same materials, scales and poses.

    The number of triangles of a copy depends on its current distance to these cameras, and on their fields of view and
    image sizes.
    """
    swaps = []
    for entity in scene.entities:
        others = [camera for camera in cameras if camera.entity != entity] or cameras
        for heavy in [c for c in entity.components if isinstance(c, RenderBody)]:
            light = _lighter(heavy, others)
            if light is not None:
                swaps.append(Swap(entity, heavy, light))
                swaps[-1].show_light()
    return swaps


def _pixel(body: RenderBody, names: Sequence[str], cameras: Sequence[Camera]) -> float:
    """Returns the width of a pixel at a body, metres: in the camera nearest to it, rounded to powers of sqrt 2.

    Rounding lets rows and nearby bodies share meshes.
    """
    named = zip(body.render_shapes, names, strict=True)
    corners = np.concatenate([_corners(body, shape, name) for shape, name in named])
    low, high = corners.min(0), corners.max(0)
    grid = np.stack(np.meshgrid([0, 0.5, 1], [0, 0.5, 1], [0, 0.5, 1]), -1).reshape(-1, 3)
    points = low + grid * (high - low)
    nearest = NEAREST_RADII * float(np.linalg.norm(high - low)) / 2
    width = min(_width(camera, points, nearest) for camera in cameras)
    return float(2 ** (np.round(2 * np.log2(width)) / 2))


# Corners in a mesh's own units, by its name: SAPIEN's get_global_aabb_fast goes through all vertices in every call.
_boxes: dict[str, np.ndarray] = {}


def _corners(body: RenderBody, shape: RenderMesh, name: str) -> np.ndarray:
    """Returns the corners of the box around a shape, in the world [8, 3]."""
    if name not in _boxes:
        vertices = np.concatenate([part.vertices for part in shape.parts])
        sides = zip(vertices.min(0), vertices.max(0), strict=True)
        _boxes[name] = np.stack(np.meshgrid(*sides), -1).reshape(-1, 3)
    to_world = (body.entity.pose * shape.local_pose).to_transformation_matrix()
    return (_boxes[name] * shape.scale) @ to_world[:3, :3].T + to_world[:3, 3]


def _width(camera: Camera, points: np.ndarray, nearest: float) -> float:
    """Returns the width of a camera's pixel at the nearest of the points [P, 3] that it sees."""
    world_to_camera = camera.global_pose.inv().to_transformation_matrix()
    forward, left, up = world_to_camera[:3, :3] @ points.T + world_to_camera[:3, 3:]
    slope = np.tan(camera.fovy / 2)
    aside = VIEW_MARGIN * slope * forward
    visible = (forward > camera.near) & (abs(left) < aside) & (abs(up) < aside)
    if visible.any():
        return 2 * slope * max(forward[visible].min(), nearest) / camera.height
    distance = (forward**2 + left**2 + up**2).min() ** 0.5
    return UNSEEN * 2 * slope * max(distance, nearest) / camera.height


_light_bodies: dict[tuple, RenderBody | None] = {}  # the rows of an env, and the envs of a process, share meshes


def _lighter(body: RenderBody, cameras: Sequence[Camera]) -> RenderBody | None:
    """Returns a decimated copy of a visual body, None if it would save too little or a shape is not a mesh."""
    shapes = body.render_shapes
    if not shapes or not all(isinstance(shape, RenderMesh) for shape in shapes):
        return None
    names = [_source(shape) for shape in shapes]
    pixel = _pixel(body, names, cameras)
    poses = [np.concatenate([shape.scale, shape.local_pose.p, shape.local_pose.q]).tobytes() for shape in shapes]
    key = (pixel, *names, *poses)
    if key not in _light_bodies:
        _light_bodies[key] = _build(shapes, names, pixel)
    light = _light_bodies[key]
    return None if light is None else light.clone()


def _source(shape: RenderMesh) -> str:
    """Returns a name that identifies the content of a shape's meshes."""
    if shape.filename:
        stat = os.stat(shape.filename)
        return f"{shape.filename}|{stat.st_size}|{stat.st_mtime_ns}"
    digest = hashlib.blake2b(digest_size=16)
    for part in shape.parts:
        digest.update(part.vertices.tobytes() + part.triangles.tobytes())
        digest.update(bytes(np.asarray(part.material.base_color, np.float32)))
    return digest.hexdigest()


def _build(shapes: list[RenderMesh], names: list[str], pixel: float) -> RenderBody | None:
    light, spared = RenderBody(), 0
    for shape, name in zip(shapes, names, strict=True):
        stored = _stored_meshes(name, shape, pixel / float(np.max(np.abs(shape.scale))))
        for part, (num_triangles, mesh) in zip(shape.parts, stored, strict=True):
            spared += num_triangles - len(mesh.triangles)
            if len(mesh.triangles) == num_triangles and part.material.normal_texture is not None:
                return None  # a mesh made from arrays has no tangents, and its normal map would be lost
            if len(mesh.triangles):
                material = _without_normal_map(part.material)
                copy = RenderMesh(mesh.vertices, mesh.triangles, mesh.normals, mesh.uvs, material)
                copy.scale, copy.local_pose = shape.scale, shape.local_pose
                light.attach(copy)
    return light if spared >= SPARED_TRIANGLES else None


def _without_normal_map(material: Material) -> Material:
    if material.normal_texture is None:
        return material
    copy = Material()
    for name in _MATERIAL_FIELDS:
        value = getattr(material, name)
        if value is not None:
            setattr(copy, name, value)
    return copy


def _stored_meshes(name: str, shape: RenderMesh, pixel: float) -> list[tuple[int, Mesh]]:
    """Returns the number of triangles of each part of a shape and its decimated mesh, from the disk cache."""
    digest = hashlib.blake2b(f"{VERSION}|{name}|{pixel:.6g}".encode(), digest_size=16).hexdigest()

    def write(path: Path) -> None:
        parts = [Mesh(p.vertices, p.triangles, p.get_vertex_normal(), p.get_vertex_uv()) for p in shape.parts]
        light = enumerate(asdict(decimated(part, pixel)) for part in parts)
        arrays = {f"{k}/{field}": array for k, mesh in light for field, array in mesh.items()}
        np.savez(path, counts=[len(part.triangles) for part in parts], **arrays)

    with np.load(cached(cache_root() / f"meshes/{digest}.npz", write)) as stored:
        counts = stored["counts"].tolist()
        return [
            (count, Mesh(*(stored[f"{k}/{field.name}"] for field in fields(Mesh)))) for k, count in enumerate(counts)
        ]
