"""Inverse kinematics of many rows at once, with the float32 joint targets of SAPIEN's solver.

SAPIEN solves one row a call: some seventy iterations of small matrices.  `clik.c` runs the same iteration, a row per
SIMD lane; it is compiled once per machine into the cache folder.  Its joint values differ from SAPIEN's in the last
bits of float64, and it computes a bound of that difference: a row's result is used only if its float32 targets and its
success are certain.  SAPIEN solves all other rows: in practice rows without solution, on which the iteration is
chaotic, and about a percent of the rest.  SAPIEN also solves all rows if there is no compiler, if a joint is neither
revolute nor prismatic, and if a trial of a new chain does not agree with SAPIEN.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import sapien
from mani_skill.agents.controllers.utils.kinematics import Kinematics

from rlinf_embodied.cache import cache_root, cached

MAX_ITERATIONS = 100  # ManiSkill's argument of SAPIEN's solver
MAX_JOINTS = 16  # as in clik.c

_KINDS = {"revolute": 0, "continuous": 1, "prismatic": 2}

FAILED, SOLVED, UNSURE = 0, 1, 2

_SOURCE = Path(__file__).with_name("clik.c")
# No fused operations: results then do not depend on the instruction set.  No errno: square roots become instructions.
_FLAGS = ("-std=c99", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_NUM_TRIALS = 16

logger = logging.getLogger(__name__)


class RowSolver:
    """Solves rows of one robot's chain; `num_by_sapien` counts those that SAPIEN solved."""

    def __init__(self, kinematics: Kinematics) -> None:
        self.pmodel, self.link = kinematics.pmodel, kinematics.end_link_idx
        self.columns = kinematics.pmodel_active_joint_indices.numpy()
        self.controlled = kinematics.pmodel_controlled_joint_indices.numpy()
        self.mask = kinematics.qmask.numpy()
        self.num_by_sapien = 0
        self.library, self.chain = load_library(), None
        if self.library is not None and type(self.pmodel).__module__.endswith("pysapien_pinocchio"):
            self.chain = read_chain(kinematics)
        if self.chain is not None and not self._agrees():
            logger.info(
                "inverse kinematics row by row (slow): a trial of %s differs or is undecided", kinematics.urdf_path
            )
            self.chain = None

    def solve(self, rows: Sequence[int], qpos: np.ndarray, poses: np.ndarray, targets: np.ndarray) -> None:
        """Writes joint targets of `rows`; a row without solution is not changed.

        Args:
            rows: row numbers.
            qpos: joint positions of the whole robot [N, D], float32.
            poses: poses of the link in the robot's base (x, y, z, qw, qx, qy, qz) [N, 7], float32.
            targets: positions of the controlled joints [N, J], float32, written in place.
        """
        unsure = np.asarray(rows)
        if self.chain is not None:
            unsure = unsure[self.run(unsure, qpos, poses, targets)[2] == UNSURE]
        self.num_by_sapien += len(unsure)
        for row in unsure:
            result, success = self.by_sapien(qpos[row], poses[row])
            if success:
                targets[row] = result[self.controlled]

    def run(
        self, rows: Sequence[int], qpos: np.ndarray, poses: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Solves the certain rows in C; returns joint values [R, joints], their margins [R] in rad, and status [R]."""
        assert self.chain is not None
        assert self.library is not None
        assert qpos.dtype == poses.dtype == targets.dtype == np.float32
        assert targets.flags.c_contiguous
        numbers = np.asarray(rows, np.int64)
        qpos, poses = np.ascontiguousarray(qpos), np.ascontiguousarray(poses)
        values = np.empty((len(numbers), self.chain.num_joints))
        margins, status = np.empty(len(numbers)), np.empty(len(numbers), np.uint8)
        self.library.clik_solve(
            ctypes.byref(self.chain),
            numbers.ctypes.data,
            len(numbers),
            qpos.ctypes.data,
            qpos.shape[1],
            poses.ctypes.data,
            targets.ctypes.data,
            targets.shape[1],
            values.ctypes.data,
            margins.ctypes.data,
            status.ctypes.data,
        )
        return values, margins, status

    def by_sapien(self, qpos: np.ndarray, pose: np.ndarray) -> tuple[np.ndarray, bool]:
        """Returns SAPIEN's solution for one row, float64 positions of the model's joints, and whether it succeeded."""
        result, success, _ = self.pmodel.compute_inverse_kinematics(
            self.link,
            sapien.Pose(pose[:3], pose[3:]),
            initial_qpos=qpos[self.columns],
            active_qmask=self.mask,
            max_iterations=MAX_ITERATIONS,
        )
        return result, success

    def _agrees(self) -> bool:
        """Compares with SAPIEN on targets near random poses and, in every fourth trial, out of reach."""
        rng = np.random.default_rng(0)
        qpos = rng.uniform(-1, 1, (_NUM_TRIALS, self.columns.max() + 1)).astype(np.float32)
        poses = np.empty((_NUM_TRIALS, 7), np.float32)
        for trial in range(_NUM_TRIALS):
            self.pmodel.compute_forward_kinematics(qpos[trial, self.columns])
            pose = self.pmodel.get_link_pose(self.link)
            poses[trial] = [*pose.p + rng.uniform(-0.05, 0.05, 3), *pose.q + rng.uniform(-0.02, 0.02, 4)]
            poses[trial, 3:] /= np.linalg.norm(poses[trial, 3:])
        poses[::4, :3] += 10
        values, margins, status = self.run(
            range(_NUM_TRIALS), qpos, poses, np.empty((_NUM_TRIALS, len(self.controlled)), np.float32)
        )
        for trial in np.flatnonzero(status != UNSURE):
            result, success = self.by_sapien(qpos[trial], poses[trial])
            column = {int(source): i for i, source in enumerate(self.columns)}
            expected = result[[column[source] for source in self.chain.source[: self.chain.num_joints]]]
            if success != (status[trial] == SOLVED):
                return False
            if success and np.abs(values[trial] - expected).max() > margins[trial]:
                return False
        return bool((status == SOLVED).any())


@cache
def load_library() -> ctypes.CDLL | None:
    """Returns the compiled `clik.c`; None, with one log entry, if it cannot be compiled or loaded."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        logger.info("inverse kinematics row by row (slow): clik.c cannot be compiled or loaded: %s", reason)
        return None
    library.clik_solve.restype = None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.clik_solve.argtypes = [pointer, pointer, number, pointer, number, pointer, pointer, number, *[pointer] * 3]
    return library


def _compiled() -> Path:
    """Returns the library's path; compiles it once per source, compiler and instruction set."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise OSError(f"there is no C compiler {compiler[0]}")
    command = [*compiler, *_FLAGS, *_instruction_set()]
    compiler_version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    digest = sha256(b"\0".join([_SOURCE.read_bytes(), " ".join(command).encode(), compiler_version])).hexdigest()[:16]

    def write(path: Path) -> None:
        order = [*command, "-o", str(path), str(_SOURCE), "-lm"]
        subprocess.run(order, capture_output=True, check=True, text=True)

    return cached(cache_root() / f"kinematics/{digest}.so", write)


def _instruction_set() -> list[str]:
    """Returns the compiler's option for vectors of four doubles; results are the same without them."""
    try:
        return ["-mavx2"] if "avx2" in Path("/proc/cpuinfo").read_text().split() else []
    except OSError:
        return []


# ---------------------------------------------------------------------------------------------------------------- chain
class Chain(ctypes.Structure):
    """The joints from the robot's root to the controlled link, as `clik.c` reads them."""

    _fields_ = (
        ("num_joints", ctypes.c_int32),
        ("max_iterations", ctypes.c_int32),
        ("eps", ctypes.c_double),
        ("dt", ctypes.c_double),
        ("damp", ctypes.c_double),
        ("rounding", ctypes.c_double),
        ("kind", ctypes.c_int32 * MAX_JOINTS),
        ("source", ctypes.c_int32 * MAX_JOINTS),
        ("slot", ctypes.c_int32 * MAX_JOINTS),
        ("rotation", ctypes.c_double * 9 * MAX_JOINTS),
        ("offset", ctypes.c_double * 3 * MAX_JOINTS),
        ("tool_rotation", ctypes.c_double * 9),
        ("tool_offset", ctypes.c_double * 3),
    )


def read_chain(kinematics: Kinematics) -> Chain | None:
    """Returns the chain to the controlled link, from the URDF that SAPIEN's model was made of.

    Frames are rotated so that each joint moves about or along its z axis.  None: a joint has another type, a controlled
    joint is not between the root and the link, or there are too many joints.
    """
    urdf = ElementTree.fromstring(Path(kinematics.urdf_path).read_bytes())
    above = {str(joint.find("child").get("link")): joint for joint in urdf.findall("joint")}
    joints, link = [], kinematics.end_link.name
    while link in above:
        joints.insert(0, above[link])
        link = str(above[link].find("parent").get("link"))
    moving = [joint for joint in joints if joint.get("type") != "fixed"]
    names = [str(joint.get("name")) for joint in moving]
    active = [joint.name for joint in kinematics.articulation.active_joints]
    controlled = [active[i] for i in kinematics.active_joint_indices]
    if not 0 < len(moving) <= MAX_JOINTS or not set(controlled) <= set(names) <= set(active):
        return None
    if any(joint.get("type") not in _KINDS for joint in moving):
        return None
    # SAPIEN keeps a continuous joint as cosine and sine, which rounds more than an angle.
    rounding = 8.0 if any(joint.get("type") == "continuous" for joint in moving) else 1.0
    chain = Chain(num_joints=len(moving), max_iterations=MAX_ITERATIONS, eps=1e-4, dt=0.1, damp=1e-6, rounding=rounding)
    for i, (joint, name) in enumerate(zip(moving, names, strict=True)):
        chain.kind[i] = _KINDS[str(joint.get("type"))]
        chain.source[i] = active.index(name)
        chain.slot[i] = controlled.index(name) if name in controlled else -1
    _place(chain, joints)
    return chain


def _place(chain: Chain, joints: list[ElementTree.Element]) -> None:
    """Writes the frames of the moving joints, and the last one's in the frame of the link at the end."""
    rotation, offset, index = np.eye(3), np.zeros(3), 0
    for joint in joints:
        origin = joint.find("origin")
        offset = offset + rotation @ _numbers(origin, "xyz", "0 0 0")
        rotation = rotation @ _turned(*_numbers(origin, "rpy", "0 0 0"))
        if joint.get("type") == "fixed":
            continue
        turn = _frame_of_axis(_numbers(joint.find("axis"), "xyz", "1 0 0"))
        chain.rotation[index][:] = (rotation @ turn).ravel()
        chain.offset[index][:] = offset
        rotation, offset, index = turn.T, np.zeros(3), index + 1
    chain.tool_rotation[:] = rotation.T.ravel()
    chain.tool_offset[:] = -rotation.T @ offset


def _numbers(element: ElementTree.Element | None, name: str, default: str) -> np.ndarray:
    text = default if element is None else element.get(name, default)
    return np.array([float(part) for part in text.split()])


def _turned(roll: float, pitch: float, yaw: float) -> np.ndarray:
    """Returns the rotation matrix [3, 3] of URDF's angles, computed by a quaternion as in URDF's reader."""
    (sr, sp, sy), (cr, cp, cy) = np.sin([roll / 2, pitch / 2, yaw / 2]), np.cos([roll / 2, pitch / 2, yaw / 2])
    q = np.array(
        [
            cr * cp * cy + sr * sp * sy,
            sr * cp * cy - cr * sp * sy,
            cr * sp * cy + sr * cp * sy,
            cr * cp * sy - sr * sp * cy,
        ]
    )
    w, x, y, z = q / np.sqrt((q * q).sum())
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def _frame_of_axis(axis: np.ndarray) -> np.ndarray:
    """Returns a rotation matrix [3, 3] whose third column is the axis; the identity for z."""
    z = axis / np.linalg.norm(axis)
    if z[2] == 1:
        return np.eye(3)
    x = np.cross(np.eye(3)[np.abs(z).argmin()], z)
    x /= np.linalg.norm(x)
    return np.stack([x, np.cross(z, x), z], 1)
