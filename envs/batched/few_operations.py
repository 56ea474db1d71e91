"""Fewer operations while a batched env computes: small tensors cost what is called, not what is calculated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
from mani_skill.agents.controllers import pd_ee_pose
from mani_skill.envs.utils.randomization import pose as randomized
from mani_skill.utils import common, gym_utils
from mani_skill.utils.geometry import rotation_conversions
from mani_skill.utils.structs import Pose
from mani_skill.utils.structs import pose as pose_module

from envs.batched import rotations

# Tasks call these by name, make poses everywhere with `Pose.create`, and Python looks operators up in the class: so the
# faster ones have to take ManiSkill's places.
_PLACES = tuple(
    (owner, name, getattr(owner, name), rotations.with_fallback(getattr(owner, name), fast))
    for owner, name, fast in (
        (rotation_conversions, "quaternion_raw_multiply", rotations.quaternion_product),
        (rotation_conversions, "matrix_to_quaternion", rotations.matrix_to_quaternion),
        (pd_ee_pose, "quaternion_multiply", rotations.quaternion_multiply),  # imported by name, as are others here
        (pd_ee_pose, "euler_angles_to_matrix", rotations.euler_angles_to_matrix),
        (pd_ee_pose, "matrix_to_quaternion", rotations.matrix_to_quaternion),
        (randomized, "euler_angles_to_matrix", rotations.euler_angles_to_matrix),
        (randomized, "matrix_to_quaternion", rotations.matrix_to_quaternion),
        (pose_module, "quaternion_to_matrix", rotations.quaternion_to_matrix),
        (Pose, "inv", rotations.inverse),
        (Pose, "__mul__", rotations.pose_product),
        (Pose, "to_transformation_matrix", rotations.to_transformation_matrix),
        (common, "compute_angle_between", rotations.compute_angle_between),
        (gym_utils, "clip_and_scale_action", rotations.clip_and_scale_action),
    )
)
_depth = 0  # how often `few_operations` was entered and not left, in all threads
_lock = Lock()


def _enter(change: int) -> None:
    global _depth
    with _lock:
        _depth += change
        if _depth == (change == 1):  # the first one comes, or the last one goes
            for owner, name, stock, fast in _PLACES:
                setattr(owner, name, fast if _depth else stock)


@contextmanager
def few_operations() -> Iterator[None]:
    """Within it, ManiSkill computes with the functions of `rotations`, and torch's do nothing but compute.

    They keep no account of gradients, which physics would not pass on, and ask no function mode, such as the one of
    `with torch.device("cpu")`, which tasks write and which costs 5 us per operation.  It may be entered again.
    """
    _enter(1)
    try:
        with torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction():
            yield
    finally:
        _enter(-1)
