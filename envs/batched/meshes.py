"""Meshes simplified to a fraction of a pixel."""

from __future__ import annotations

from dataclasses import dataclass

import fast_simplification
import numpy as np
from scipy.spatial import cKDTree

from envs.batched.collapse import collapsed

VERSION = 9  # of the meshes that this module makes; images depend on it
TRIANGLES_PER_PIXEL = 2.5  # of a part's diagonal: at a tolerance e, a curved surface of radius r needs about r / e
MIN_TRIANGLES = 32  # per mesh part
LOST_PIXELS = 0.3  # parts with a smaller diagonal are left out
WELD_PIXELS = 1 / 16  # vertices closer than this are one: loose pieces and double walls become one surface
SLACK = 1.5  # a mesh of at most this many times the target is not changed
AGGRESSIVENESS = 3  # of the fast edge collapse; 7 changes shapes twice as much
SMOOTH_DEGREES = 50.0  # between triangles that are shaded as one surface
COARSE = 8  # times the target: where the fast collapse hands over to the exact one
LOOSE = 32  # times the target: above it, loose pieces are joined before the exact collapse, which is slow
SOUP = 4  # times the target: accepted for a mesh of many loose pieces
FLAT = 1e-4  # relative tolerance for a rectangle with an even texture


@dataclass(frozen=True, slots=True)
class Mesh:
    """One part of a visual shape."""

    vertices: np.ndarray  # float32 [V, 3], metres before the shape's scale
    triangles: np.ndarray  # uint32 [F, 3]
    normals: np.ndarray  # float32 [V, 3]
    uvs: np.ndarray  # float32 [V, 2]


def decimated(mesh: Mesh, pixel: float) -> Mesh:
    """Returns a copy of a mesh with as many triangles as are visible in images with pixels of this width.

    Args:
        mesh: one part of a visual shape.
        pixel: width of a pixel in the mesh's unit of length.

    Returns:
        A mesh of at most as many triangles, none if it is too small to see; one with few is returned unchanged.
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
    a, b, c = places[mesh.triangles].transpose(1, 0, 2)
    (x1, y1), (x2, y2) = (b - a).T, (c - a).T
    area = float(np.abs(x1 * y2 - x2 * y1).sum() / 2)
    if not np.isclose(area, np.prod(np.ptp(corners, axis=0)), rtol=FLAT):
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
        normals[mine] = _smooth_groups(facing[mine // 3]) @ across[mine // 3]
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


def _smooth_groups(facing: np.ndarray) -> np.ndarray:
    """Returns which of the triangles around a vertex are shaded as one surface, bool [k, k], from their normals.

    Angles count from one to the next, so that a vertex has few normals: each one costs as much as a vertex.
    """
    joined = facing @ facing.T > np.cos(np.radians(SMOOTH_DEGREES))
    np.fill_diagonal(joined, True)
    while (further := joined @ joined).sum() > joined.sum():
        joined = further
    return joined


def _welded(vertices: np.ndarray, triangles: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """Joins the vertices of each grid cell at the first of them; triangles that collapse or coincide are dropped."""
    _, first, inverse = np.unique(np.round(vertices / cell), axis=0, return_index=True, return_inverse=True)
    faces = inverse.reshape(-1)[triangles].astype(np.int32)
    a, b, c = faces.T
    faces = faces[(a != b) & (b != c) & (c != a)]
    _, once = np.unique(np.sort(faces, axis=1), axis=0, return_index=True)
    return vertices[first].astype(np.float32), np.ascontiguousarray(faces[np.sort(once)])
