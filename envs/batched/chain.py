"""The joints from a robot's root to the link that is controlled, read from its URDF."""

from __future__ import annotations

import ctypes
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from mani_skill.agents.controllers.utils.kinematics import Kinematics

MAX_ITERATIONS = 100  # what ManiSkill asks of SAPIEN
MAX_JOINTS = 16  # as in clik.c

_KINDS = {"revolute": 0, "continuous": 1, "prismatic": 2}


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

    Frames are turned so that each joint moves about or along its z axis.  None: there is a joint of another type, a
    controlled joint is not on the way to the link, or there are too many.
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
    """Returns the rotation matrix [3, 3] of URDF's angles, by way of a quaternion as URDF's own reader does."""
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
