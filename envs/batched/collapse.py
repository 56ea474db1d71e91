"""Edge collapse by quadric error (Garland and Heckbert, 1997), for the last few hundred triangles of a mesh.

Fast libraries pass over the edges with a growing threshold; with few triangles left that ruins shapes.  Here the edge
with the smallest error always goes first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np

Point = tuple[float, float, float]
_BORDER = 10.0  # weight of the planes that keep an open border in place
_FLIP = 0.2  # cosine: how far a collapse may turn a neighbouring triangle
_SINGULAR = 1e-12  # of the determinant, relative to the quadric's size cubed
_ROUND = 1e-7  # of the mesh's size squared times the area: prefers short edges where errors are equal


def collapsed(vertices: np.ndarray, triangles: np.ndarray, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a mesh of at most `target` triangles where its edges allow it.

    Args:
        vertices: float [V, 3].
        triangles: integers [F, 3]; triangles that touch share vertices.
        target: number of triangles to stop at.

    Returns:
        vertices float64 [V', 3] and triangles int64 [F', 3].
    """
    work = _Work(np.asarray(vertices, np.float64), np.asarray(triangles))
    while work.num_triangles > target and work.collapse_next():
        pass
    return work.result()


class _Work:
    """A mesh while its edges collapse; vertices and triangles keep their numbers, those that are gone are missing."""

    def __init__(self, vertices: np.ndarray, triangles: np.ndarray) -> None:
        self.points: dict[int, Point] = dict(enumerate(map(tuple, vertices.tolist())))
        self.faces: dict[int, tuple[int, int, int]] = dict(enumerate(map(tuple, triangles.tolist())))
        self.around: dict[int, set[int]] = defaultdict(set)  # vertex -> triangles
        for number, face in self.faces.items():
            for corner in face:
                self.around[corner].add(number)
        self.quadrics = _quadrics(vertices, triangles)
        self.short = _ROUND * float(np.trace(self.quadrics.sum(0)[:3, :3])) / max(1, len(triangles))
        self.stamps: dict[int, int] = defaultdict(int)  # changes of a vertex; older entries of the heap are void
        self.heap: list[tuple[float, int, int, int, int, Point]] = []
        for a, b in {(min(e), max(e)) for f in self.faces.values() for e in _edges(f)}:
            self._push(a, b)

    @property
    def num_triangles(self) -> int:
        return len(self.faces)

    def collapse_next(self) -> bool:
        """Collapses the edge with the smallest error that may go; False if there is none."""
        while self.heap:
            _, a, b, stamp_a, stamp_b, place = heapq.heappop(self.heap)
            if a not in self.points or b not in self.points:
                continue
            if (self.stamps[a], self.stamps[b]) == (stamp_a, stamp_b) and self._allowed(a, b, place):
                self._collapse(a, b, place)
                return True
        return False

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        used = sorted({corner for face in self.faces.values() for corner in face})
        number = {vertex: k for k, vertex in enumerate(used)}
        triangles = np.array([[number[v] for v in face] for face in self.faces.values()], np.int64).reshape(-1, 3)
        return np.array([self.points[vertex] for vertex in used]).reshape(-1, 3), triangles

    def _push(self, a: int, b: int) -> None:
        cost, place = _cheapest(self.quadrics[a] + self.quadrics[b], self.points[a], self.points[b])
        length = sum((p - q) ** 2 for p, q in zip(self.points[a], self.points[b], strict=True))
        heapq.heappush(self.heap, (cost + self.short * length, a, b, self.stamps[a], self.stamps[b], place))

    def _neighbours(self, vertex: int) -> set[int]:
        return {corner for number in self.around[vertex] for corner in self.faces[number]} - {vertex}

    def _allowed(self, a: int, b: int, place: Point) -> bool:
        shared = self.around[a] & self.around[b]
        if len(self._neighbours(a) & self._neighbours(b)) > len(shared):
            return False  # two sheets would become one edge
        for vertex in (a, b):
            for number in self.around[vertex] - shared:
                face = self.faces[number]
                before = _normal(*(self.points[corner] for corner in face))
                after = _normal(*(place if corner == vertex else self.points[corner] for corner in face))
                if before is not None and (after is None or _dot(before, after) < _FLIP):
                    return False
        return True

    def _collapse(self, a: int, b: int, place: Point) -> None:
        """Moves vertex a to its new place and lets it take b's triangles."""
        for number in self.around[a] & self.around[b]:
            for corner in self.faces.pop(number):
                self.around[corner].discard(number)
        for number in self.around.pop(b):
            self.faces[number] = tuple(a if corner == b else corner for corner in self.faces[number])
            self.around[a].add(number)
        del self.points[b]
        self.points[a] = place
        self.quadrics[a] += self.quadrics[b]
        self.stamps[a] += 1
        for other in sorted(self._neighbours(a)):
            self._push(min(a, other), max(a, other))


def _edges(face: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    a, b, c = face
    return (a, b), (b, c), (c, a)


def _quadrics(vertices: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Returns the sum of squared distances to the planes of a vertex's triangles, by area, as matrices [V, 4, 4]."""
    a, b, c = vertices[triangles].transpose(1, 0, 2)
    across = np.cross(b - a, c - a)
    area = np.linalg.norm(across, axis=1)
    quadrics = np.zeros((len(vertices), 4, 4))
    _add_planes(quadrics, triangles, across / (area[:, None] + 1e-30), a, area)
    edges = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
    _, back, count = np.unique(np.sort(edges, 1), axis=0, return_inverse=True, return_counts=True)
    border = count[back.reshape(-1)] == 1
    ends, sides = edges[border], np.tile(across, (3, 1))[border]
    along = vertices[ends[:, 1]] - vertices[ends[:, 0]]
    walls = np.cross(along, sides)
    walls /= np.linalg.norm(walls, axis=1, keepdims=True) + 1e-30
    _add_planes(quadrics, ends, walls, vertices[ends[:, 0]], _BORDER * (along**2).sum(1))
    return quadrics


def _add_planes(
    quadrics: np.ndarray, corners: np.ndarray, normals: np.ndarray, through: np.ndarray, weights: np.ndarray
) -> None:
    planes = np.c_[normals, -(normals * through).sum(1)]
    squares = planes[:, :, None] * planes[:, None, :] * weights[:, None, None]
    for column in corners.T:
        np.add.at(quadrics, column, squares)


def _cheapest(quadric: np.ndarray, a: Point, b: Point) -> tuple[float, Point]:
    """Returns the smallest error at which both ends of an edge can meet, and the point."""
    (xx, xy, xz, x), (_, yy, yz, y), (_, _, zz, z), (_, _, _, one) = quadric.tolist()

    def error(p: Point) -> float:
        u, v, w = p
        return (xx * u + 2 * (xy * v + xz * w + x)) * u + (yy * v + 2 * (yz * w + y)) * v + (zz * w + 2 * z) * w + one

    mean = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2, (a[2] + b[2]) / 2)
    candidates = [a, b, mean]
    c1, c2, c3 = yy * zz - yz * yz, xz * yz - xy * zz, xy * yz - xz * yy
    determinant = xx * c1 + xy * c2 + xz * c3
    if determinant > _SINGULAR * (xx + yy + zz) ** 3:
        c4, c5, c6 = xx * zz - xz * xz, xy * xz - xx * yz, xx * yy - xy * xy
        best = (
            -(c1 * x + c2 * y + c3 * z) / determinant,
            -(c2 * x + c4 * y + c5 * z) / determinant,
            -(c3 * x + c5 * y + c6 * z) / determinant,
        )
        near = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
        if sum((p - q) ** 2 for p, q in zip(best, mean, strict=True)) <= near:
            candidates.append(best)
    return min((max(0.0, error(p)), p) for p in candidates)


def _normal(a: Point, b: Point, c: Point) -> Point | None:
    ux, uy, uz = b[0] - a[0], b[1] - a[1], b[2] - a[2]
    vx, vy, vz = c[0] - a[0], c[1] - a[1], c[2] - a[2]
    x, y, z = uy * vz - uz * vy, uz * vx - ux * vz, ux * vy - uy * vx
    length = (x * x + y * y + z * z) ** 0.5
    return None if length == 0.0 else (x / length, y / length, z / length)


def _dot(a: Point, b: Point) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
