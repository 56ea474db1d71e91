"""Conversions between conventions of vectors, from a dataset to a policy and back.

A conversion is written `<first>:<from>:<to>` or `<first>-<last>:<from>:<to>`, with the first and the
last entry of the vector that it converts.  Several are applied one after the other, so each refers to the entries of
the result of the one before.

    rotations    quaternion_xyzw, quaternion_wxyz, rotation_vector, euler_xyz, columns_6d
    grippers     zero_one (1 opens), zero_one_closed (1 closes), signed ([-1, 1], 1 opens), signed_closed
    units        degrees, radians; metres, millimetres
    actions      absolute, relative: minus the state's entries at the same frame

Euler angles are roll, pitch and yaw about fixed axes, R = Rz Ry Rx; columns_6d holds the first two columns of R
(Zhou et al. 2019, arXiv 1812.07035).  Results are canonical: quaternions with a real part that
is not negative, rotation vectors of at most pi, a pitch within pi / 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi

import numpy as np
from scipy.spatial.transform import Rotation

from rlinf_embodied.config.checks import require
from rlinf_embodied.data.recorded import ACTION, STATE, RecordedDataset


def _from_columns(values: np.ndarray) -> Rotation:
    x, y = values[:, :3], values[:, 3:]
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    y = y - (x * y).sum(1, keepdims=True) * x
    y = y / np.linalg.norm(y, axis=1, keepdims=True)
    return Rotation.from_matrix(np.stack([x, y, np.cross(x, y)], 2))


def _quaternion(rotation: Rotation) -> np.ndarray:
    return rotation.as_quat(canonical=True)


# by name: how many entries, and what makes a rotation of them [N, entries] and back
ROTATIONS: dict[str, tuple[int, Callable[[np.ndarray], Rotation], Callable[[Rotation], np.ndarray]]] = {
    "quaternion_xyzw": (4, Rotation.from_quat, _quaternion),
    "quaternion_wxyz": (4, lambda x: Rotation.from_quat(np.roll(x, -1, 1)), lambda r: np.roll(_quaternion(r), 1, 1)),
    "rotation_vector": (3, Rotation.from_rotvec, Rotation.as_rotvec),
    "euler_xyz": (3, lambda x: Rotation.from_euler("xyz", x), lambda r: r.as_euler("xyz")),
    "columns_6d": (6, _from_columns, lambda r: r.as_matrix()[:, :, :2].transpose(0, 2, 1).reshape(-1, 6)),
}
_ENTRIES = {  # (a, b): a x + b is the same quantity for all conventions of a group
    "grippers": {"zero_one": (2, -1), "zero_one_closed": (-2, 1), "signed": (1, 0), "signed_closed": (-1, 0)},
    "angles": {"radians": (1, 0), "degrees": (pi / 180, 0)},
    "lengths": {"metres": (1, 0), "millimetres": (1e-3, 0)},
    "actions": {"absolute": (1, 0), "relative": (1, 1)},  # b times the state
}
_GROUPS = {name: group for group, names in _ENTRIES.items() for name in names} | dict.fromkeys(ROTATIONS, "rotations")


@dataclass(frozen=True, slots=True)
class Conversion:
    """One conversion of entries first .. last."""

    first: int
    last: int
    source: str
    target: str

    @classmethod
    def parse(cls, text: str, path: str) -> Conversion:
        """Returns the conversion that a text describes; raises a ConfigError that names `path`."""
        form = "a conversion is <first>:<from>:<to> or <first>-<last>:<from>:<to>"
        match = re.fullmatch(r"(\d+)(?:-(\d+))?:(\w+):(\w+)", text)
        require(match is not None, path, text, form, "write for example 3:quaternion_xyzw:rotation_vector")
        assert match is not None
        source, target = match[3], match[4]
        for name in (source, target):
            require(name in _GROUPS, path, text, f"{name} is none of {', '.join(_GROUPS)}", "use one of these")
        rule = f"{source} is one of {_GROUPS[source]}, and {target} of {_GROUPS[target]}"
        require(_GROUPS[source] == _GROUPS[target], path, text, rule, "convert within a group")
        first = int(match[1])
        size = ROTATIONS[source][0] if source in ROTATIONS else 1
        last = first + size - 1 if match[2] is None else int(match[2])
        fits = last >= first if size == 1 else last == first + size - 1
        require(fits, path, text, f"{source} has {size} entries", "leave the last entry out")
        return cls(first, last, source, target)

    @property
    def inverse(self) -> Conversion:
        """The conversion back."""
        growth = ROTATIONS[self.target][0] - ROTATIONS[self.source][0] if self.target in ROTATIONS else 0
        return Conversion(self.first, self.last + growth, self.target, self.source)

    def apply(self, values: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Returns vectors [F, D] converted, float32 [F, D']; relative actions need the `state` [F, P]."""
        entries = slice(self.first, self.last + 1)
        part = values[:, entries].astype(np.float64)
        if self.source in ROTATIONS:
            converted = ROTATIONS[self.target][2](ROTATIONS[self.source][1](part))
        else:
            (a, b), (c, d) = (_ENTRIES[_GROUPS[name]][name] for name in (self.source, self.target))
            offset = state[:, entries].astype(np.float64) if _GROUPS[self.source] == "actions" else 1.0
            converted = (a * part + b * offset - d * offset) / c
        return np.concatenate([values[:, : self.first], converted, values[:, self.last + 1 :]], 1).astype(np.float32)


class ConvertedDataset(RecordedDataset):
    """A dataset whose action and state are converted; statistics are computed from the converted values."""

    def __init__(self, inner: RecordedDataset, actions: Sequence[str], state: Sequence[str], path: str) -> None:
        """Takes conversions as texts; `path` is the config path of the section with convert_actions.

        Raises:
            ConfigError: a conversion is invalid, or the vectors are too short for it.
        """
        self.fps, self.lengths, self.where, self._inner = inner.fps, inner.lengths, inner.where, inner
        of_feature = {STATE: (f"{path}.convert_state", state), ACTION: (f"{path}.convert_actions", actions)}
        self._conversions: dict[str, list[Conversion]] = {}
        self.features = dict(inner.features)
        for name, (named, texts) in of_feature.items():
            size = inner.size(name)
            for text in texts:
                conversion = Conversion.parse(text, named)
                rule = f"{name} has {size or 'no'} entries here"
                require(size is not None and conversion.last < size, named, text, rule, "name entries that it has")
                if _GROUPS[conversion.source] == "actions":
                    holds = name == ACTION and conversion.last < sum(self.states.values())
                    require(holds, named, text, "actions are relative to the same entries of the state", "leave it out")
                self._conversions.setdefault(name, []).append(conversion)
                size = (size or 0) + conversion.inverse.last - conversion.last
            if texts:
                self.features[name] = {"dtype": "float32", "shape": [size], "names": None}
        self.measured = {name: known for name, known in inner.measured.items() if name not in self._conversions}
        super().__init__()

    def _read_columns(self) -> dict[str, np.ndarray]:
        columns = dict(self._inner.columns)
        for name, conversions in self._conversions.items():  # the state's first: relative actions use it
            for conversion in conversions:
                is_relative = _GROUPS[conversion.source] == "actions"
                state = columns.get(STATE, self._inner.state) if is_relative else columns[name]
                columns[name] = conversion.apply(columns[name], state)
        return columns

    def _read_images(self, feature: str, rows: np.ndarray) -> np.ndarray:
        return self._inner._read_images(feature, rows)

    def task(self, row: int) -> str:
        return self._inner.task(row)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self._inner.tasks
