"""Lighter visual meshes for software rendering, where a small picture costs what its vertices cost."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import fast_simplification
import numpy as np
import sapien
from scipy.spatial import cKDTree

from envs.batched.collapse import collapsed
from envs.batched.disk_cache import cached

VERSION = 8  # of the meshes that this module makes: it is part of what a picture depends on
VIEW_MARGIN = 1.25  # times the field of view: what is a little outside may come in
UNSEEN = 4.0  # times as wide are pixels for bodies outside every camera's view
NEAREST_RADII = 0.5  # of a body's bounding sphere: a camera that is nearer sees a part of it only
TRIANGLES_PER_PIXEL = 2.5  # of a part's diagonal: at a tolerance e, a curved surface of radius r needs about r / e
MIN_TRIANGLES = 32  # per mesh part
LOST_PIXELS = 0.3  # parts with a smaller diagonal are left out
WELD_PIXELS = 1 / 16  # vertices closer than this are one: loose pieces and double walls become one surface
SPARED_TRIANGLES = 100  # a body that would not lose as many stays as it is
SLACK = 1.5  # times the target is near enough
AGGRESSIVENESS = 3  # of the fast edge collapse; 7 changes shapes twice as much
SMOOTH_DEGREES = 50.0  # between triangles that are shaded as one surface
COARSE = 8  # times the target is where the fast collapse hands over to the exact one
LOOSE = 32  # times the target is where pieces are joined before the exact collapse, which is slow
SOUP = 4  # times the target is good enough for a mesh of many loose pieces
FLAT = 1e-4  # relative tolerance for a rectangle with an even texture

Camera = sapien.render.RenderCameraComponent
RenderBody = sapien.render.RenderBodyComponent
RenderMesh = sapien.render.RenderShapeTriangleMesh
Material = sapien.render.RenderMaterial
_MATERIAL_FIELDS = (
    *("base_color", "base_color_texture", "emission", "emission_texture", "roughness", "roughness_texture"),
    *("metallic", "metallic_texture", "specular", "ior", "transmission", "transmission_roughness"),
)


@dataclass(frozen=True, slots=True)
class Mesh:
    """One part of a visual shape."""

    vertices: np.ndarray  # float32 [V, 3], metres before the shape's scale
    triangles: np.ndarray  # uint32 [F, 3]
    normals: np.ndarray  # float32 [V, 3]
    uvs: np.ndarray  # float32 [V, 2]


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


def decimate_visuals(scene: sapien.Scene, cameras: Sequence[Camera]) -> list[Swap]:
    """Replaces the heavy visual meshes of a scene by decimated copies with the same materials, scales and poses.

    How many triangles a copy has follows from its distance to these cameras now, their fields of view and sizes.
    """
    swaps = []
    for entity in scene.entities:
        others = [camera for camera in cameras if camera.entity != entity] or cameras
        for heavy in [c for c in entity.components if isinstance(c, RenderBody)]:
            light = _lighter(heavy, _pixel(heavy, others))
            if light is not None:
                swaps.append(Swap(entity, heavy, light))
                swaps[-1].show_light()
    return swaps


def _pixel(body: RenderBody, cameras: Sequence[Camera]) -> float:
    """Returns how wide a pixel is at a body, metres: in the camera that sees it largest, rounded to powers of sqrt 2.

    Rounding lets rows and nearby bodies share meshes.
    """
    low, high = body.get_global_aabb_fast()
    grid = np.stack(np.meshgrid([0, 0.5, 1], [0, 0.5, 1], [0, 0.5, 1]), -1).reshape(-1, 3)
    points = low + grid * (high - low)
    nearest = NEAREST_RADII * float(np.linalg.norm(high - low)) / 2
    width = min(_width(camera, points, nearest) for camera in cameras)
    return float(2 ** (np.round(2 * np.log2(width)) / 2))


def _width(camera: Camera, points: np.ndarray, nearest: float) -> float:
    """Returns the width of a camera's pixel at the nearest of the points [P, 3] that it sees."""
    world_to_camera = camera.global_pose.inv().to_transformation_matrix()
    forward, left, up = world_to_camera[:3, :3] @ points.T + world_to_camera[:3, 3:]
    slope = np.tan(camera.fovy / 2)
    aside = VIEW_MARGIN * slope * forward
    seen = (forward > camera.near) & (abs(left) < aside) & (abs(up) < aside)
    if seen.any():
        return 2 * slope * max(forward[seen].min(), nearest) / camera.height
    distance = (forward**2 + left**2 + up**2).min() ** 0.5
    return UNSEEN * 2 * slope * max(distance, nearest) / camera.height


def _exchange(entity: sapien.Entity, old: RenderBody, new: RenderBody) -> None:
    new.visibility = old.visibility
    entity.remove_component(old)
    entity.add_component(new)


_light_bodies: dict[tuple, RenderBody | None] = {}  # the rows of an env, and the envs of a process, share meshes


def _lighter(body: RenderBody, pixel: float) -> RenderBody | None:
    """Returns a decimated copy of a visual body, None where that does not pay or a shape is no mesh."""
    shapes = body.render_shapes
    if not shapes or not all(isinstance(shape, RenderMesh) for shape in shapes):
        return None
    names = [_source(shape) for shape in shapes]
    key = (pixel, *((name, *_placement(shape)) for name, shape in zip(names, shapes, strict=True)))
    if key not in _light_bodies:
        _light_bodies[key] = _build(shapes, names, pixel)
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
    """Returns the number of triangles of each part of a shape and its decimated mesh, from the disk cache or for it."""
    digest = hashlib.blake2b(f"{VERSION}|{name}|{pixel:.6g}".encode(), digest_size=16).hexdigest()

    def write(path: Path) -> None:
        parts = [Mesh(p.vertices, p.triangles, p.get_vertex_normal(), p.get_vertex_uv()) for p in shape.parts]
        light = enumerate(asdict(decimated(part, pixel)) for part in parts)
        arrays = {f"{k}/{field}": array for k, mesh in light for field, array in mesh.items()}
        np.savez(path, counts=[len(part.triangles) for part in parts], **arrays)

    with np.load(cached(f"meshes/{digest}.npz", write)) as stored:
        counts = stored["counts"].tolist()
        return [
            (count, Mesh(*(stored[f"{k}/{field.name}"] for field in fields(Mesh)))) for k, count in enumerate(counts)
        ]


def decimated(mesh: Mesh, pixel: float) -> Mesh:
    """Returns a copy of a mesh with the triangles that show in pictures where a pixel is this wide.

    Args:
        mesh: one part of a visual shape.
        pixel: width of a pixel in the mesh's unit of length.

    Returns:
        A mesh of at most as many triangles, none if it cannot be seen; one with few is returned as it is.
    """
    if _diagonal(mesh) < LOST_PIXELS * pixel:
        return Mesh(mesh.vertices[:0], mesh.triangles[:0], mesh.normals[:0], mesh.uvs[:0])
    if (rectangle := _rectangle(mesh)) is not None:
        return rectangle
    target = max(MIN_TRIANGLES, round(TRIANGLES_PER_PIXEL * _diagonal(mesh) / pixel))
    if len(mesh.triangles) <= SLACK * target:
        return mesh
    return _shaded(*_collapsed(mesh, target, WELD_PIXELS * pixel), mesh)


def _diagonal(mesh: Mesh) -> float:
    return float(np.linalg.norm(np.ptp(mesh.vertices, axis=0)))


def _collapsed(mesh: Mesh, target: int, weld: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns vertices and triangles of the simplified mesh."""
    points, faces = _welded(mesh.vertices, mesh.triangles, weld)  # collapsing needs shared vertices
    if len(faces) > COARSE * target:
        points, faces = fast_simplification.simplify(points, faces, target_count=COARSE * target, agg=AGGRESSIVENESS)
    while len(faces) > LOOSE * target:
        weld *= 2
        points, faces = _welded(points, faces, weld)
    points, faces = collapsed(points, faces, target)
    while len(faces) > SOUP * target:  # many loose pieces do not collapse: join what is near
        weld *= 2**0.5
        points, faces = collapsed(*_welded(points, faces, weld), target)
    return points, faces


def _rectangle(mesh: Mesh) -> Mesh | None:
    """Returns a mesh as one rectangle if it is one with an evenly spread texture, like the ground, else None."""
    low, high = mesh.vertices.min(0), mesh.vertices.max(0)
    across = (high - low).argmin()
    if high[across] - low[across] > FLAT * (high - low).max():
        return None
    first, second = (axis for axis in range(3) if axis != across)
    places = mesh.vertices[:, [first, second]].astype(np.float64)
    corners = np.array([[a, b] for a in (low[first], high[first]) for b in (low[second], high[second])], np.float64)
    if not np.isclose(_area(places, mesh.triangles), np.prod(np.ptp(corners, axis=0)), rtol=FLAT):
        return None  # it has holes, another outline, or lies on itself
    affine = np.linalg.lstsq(np.c_[places, np.ones(len(places))], mesh.uvs.astype(np.float64), rcond=None)[0]
    if not np.allclose(np.c_[places, np.ones(len(places))] @ affine, mesh.uvs, atol=FLAT * np.abs(mesh.uvs).max()):
        return None
    vertices = np.empty((4, 3), np.float32)
    vertices[:, [first, second]], vertices[:, across] = corners, low[across]
    triangles = np.array([[0, 2, 1], [1, 2, 3]], np.uint32)
    normal = mesh.normals[0]
    if normal @ np.cross(vertices[2] - vertices[0], vertices[1] - vertices[0]) < 0:
        triangles = triangles[:, ::-1].copy()
    uvs = (np.c_[corners, np.ones(4)] @ affine).astype(np.float32)
    return Mesh(vertices, triangles, np.tile(normal, (4, 1)), uvs)


def _area(places: np.ndarray, triangles: np.ndarray) -> float:
    a, b, c = places[triangles].transpose(1, 0, 2)
    (x1, y1), (x2, y2) = (b - a).T, (c - a).T
    return float(np.abs(x1 * y2 - x2 * y1).sum() / 2)


def _shaded(points: np.ndarray, faces: np.ndarray, mesh: Mesh) -> Mesh:
    """Returns the mesh with normals that are smooth within SMOOTH_DEGREES, and the original's nearest uvs."""
    across = np.cross(points[faces[:, 1]] - points[faces[:, 0]], points[faces[:, 2]] - points[faces[:, 0]])
    facing = across / (np.linalg.norm(across, axis=1, keepdims=True) + 1e-30)
    corners = faces.reshape(-1)
    order = np.argsort(corners, kind="stable")
    starts = np.searchsorted(corners[order], np.arange(len(points) + 1))
    normals = np.empty((len(corners), 3))
    for vertex in range(len(points)):
        mine = order[starts[vertex] : starts[vertex + 1]]
        own = facing[mine // 3]
        normals[mine] = (own @ own.T > np.cos(np.radians(SMOOTH_DEGREES))) @ across[mine // 3]
    normals /= np.linalg.norm(normals, axis=1, keepdims=True) + 1e-30
    distinct, index = np.unique(np.c_[corners, normals.round(3)], axis=0, return_inverse=True)
    vertex = distinct[:, 0].astype(int)
    nearest = cKDTree(mesh.vertices).query(points)[1]
    return Mesh(
        vertices=points[vertex].astype(np.float32),
        triangles=index.reshape(-1, 3).astype(np.uint32),
        normals=distinct[:, 1:].astype(np.float32),
        uvs=mesh.uvs[nearest][vertex],
    )


def _welded(vertices: np.ndarray, triangles: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """Joins the vertices of each grid cell at the first of them; triangles that collapse or coincide are dropped."""
    _, first, inverse = np.unique(np.round(vertices / cell), axis=0, return_index=True, return_inverse=True)
    faces = inverse.reshape(-1)[triangles].astype(np.int32)
    a, b, c = faces.T
    faces = faces[(a != b) & (b != c) & (c != a)]
    _, once = np.unique(np.sort(faces, axis=1), axis=0, return_index=True)
    return vertices[first].astype(np.float32), np.ascontiguousarray(faces[np.sort(once)])
