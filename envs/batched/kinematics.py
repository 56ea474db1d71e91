"""Inverse kinematics of many rows at once, with the float32 joint targets of SAPIEN's solver.

SAPIEN solves one row a call: some seventy iterations of small matrices.  `clik.c` runs the same iteration, a row per
SIMD lane; it is compiled once per machine into the cache folder.  Its joint values differ from SAPIEN's in the last
bits of float64 and carry a bound of that difference: a row is taken only if its float32 targets and its success are
certain.  All other rows go to SAPIEN: in practice those without solution, on which the iteration is chaotic, and about
a percent of the others.  So does everything without a compiler, for a chain with other joints than revolute and
prismatic ones, and for a new chain whose trial does not agree with SAPIEN.
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

import numpy as np
import sapien
from mani_skill.agents.controllers.utils.kinematics import Kinematics

from envs.batched.chain import MAX_ITERATIONS, read_chain
from rlinf_embodied.cache import cached

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
        """Writes joint targets of `rows`; a row without solution is left as it is.

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
        """Returns SAPIEN's solution for one row, float64 positions of the model's joints, and whether it is one."""
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
    """Returns the library's path; compiles it where this source, compiler and instruction set are new."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise OSError(f"there is no C compiler {compiler[0]}")
    command = [*compiler, *_FLAGS, *_instruction_set()]
    named = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    digest = sha256(b"\0".join([_SOURCE.read_bytes(), " ".join(command).encode(), named])).hexdigest()[:16]

    def write(path: Path) -> None:
        order = [*command, "-o", str(path), str(_SOURCE), "-lm"]
        subprocess.run(order, capture_output=True, check=True, text=True)

    return cached(f"kinematics/{digest}.so", write)


def _instruction_set() -> list[str]:
    """Returns the compiler's option for vectors of four doubles; results are the same without them."""
    try:
        return ["-mavx2"] if "avx2" in Path("/proc/cpuinfo").read_text().split() else []
    except OSError:
        return []
