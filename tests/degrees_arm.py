"""A six-joint arm in MuJoCo as hobbyists' arms are driven and recorded: joints in degrees, a gripper from 0 to 100.

State and actions are [pan, lift, elbow, wrist flex, wrist roll, gripper]; actions are absolute targets.  The tip is to
reach a ball, with the gripper closed.  docs/pi.md takes it from a LeRobot dataset to a policy that lerobot loads;
degrees_arm.yaml is the section `env` of a run.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces

SIZE = (64, 96)  # height and width of the images
REACHED = 0.03  # m from tip to ball
CLOSED = 10.0  # of the gripper
_LOW, _HIGH = np.array([-110.0, -100, -100, -100, -170, 0]), np.array([110.0, 100, 100, 100, 170, 100])
_SUBSTEPS, _DAMPING = 50, 1e-3  # 0.1 s per step; of the inverse kinematics
_JOINTS = {"pan": "0 0 1", "lift": "0 1 0", "elbow": "0 1 0", "flex": "0 1 0", "roll": "0 0 1"}  # and their axes
_LINK = '<body pos="0 0 {height}"><joint name="{name}" axis="{axis}" damping="1"/><geom type="capsule" {form}/>'
_XML = """<mujoco><compiler angle="radian"/><option gravity="0 0 0"/>
<visual><headlight ambient=".5 .5 .5"/><quality shadowsize="0" offsamples="0"/></visual>
<default><geom contype="0" conaffinity="0" density="300" rgba=".9 .7 .1 1"/></default>
<worldbody><light pos="0 0 2"/><geom type="plane" size="1 1 .1" rgba=".3 .4 .5 1"/>
<camera name="front" pos="1.1 0 .7" xyaxes="0 1 0 -.5 0 .9"/>
<body name="ball" mocap="true"><geom type="sphere" size=".04" rgba=".9 .1 .1 1"/></body>{links}</worldbody>
<actuator>{motors}</actuator></mujoco>"""


def _model() -> mujoco.MjModel:
    links = ""
    for k, (name, axis) in enumerate(_JOINTS.items()):
        length = 0.05 if k in (0, 4) else 0.15
        height = 0.05 if k <= 1 else 0.15
        links += _LINK.format(name=name, axis=axis, height=height, form=f'size=".02" fromto="0 0 0 0 0 {length}"')
    links += '<site name="tip" pos="0 0 .05"/><body><joint name="grip" type="slide" axis="1 0 0" damping="1"/>'
    links += '<geom type="box" size=".01 .01 .03" pos="0 0 .06"/></body>' + "</body>" * len(_JOINTS)
    motors = "".join(f'<position joint="{name}" kp="20" dampratio="1"/>' for name in (*_JOINTS, "grip"))
    return mujoco.MjModel.from_xml_string(_XML.format(links=links, motors=motors))


class DegreesArm(gymnasium.Env):
    """Reach the ball: 1 per step less the distance (m)."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None) -> None:
        """Declares what is seen and what can be done."""
        self.render_mode, self._renderer = render_mode, None
        self.observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float64)
        self.action_space = spaces.Box(_LOW, _HIGH, dtype=np.float64)
        self._model = _model()
        self._data = mujoco.MjData(self._model)

    def _seen(self) -> np.ndarray:
        return np.append(np.degrees(self._data.qpos[:5]), 2000 * self._data.qpos[5])

    def _distance(self) -> float:
        return float(np.linalg.norm(self._data.site("tip").xpos - self._data.mocap_pos[0]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """All of the episode follows from the seed."""
        super().reset(seed=seed)
        mujoco.mj_resetData(self._model, self._data)
        angle, away = self.np_random.uniform(-0.8, 0.8), self.np_random.uniform(0.2, 0.3)
        self._data.mocap_pos[0] = [away * np.cos(angle), away * np.sin(angle), self.np_random.uniform(0.15, 0.3)]
        self._data.qpos[:] = [0, 0.3, 0.6, 0.6, 0, 0.04]
        mujoco.mj_forward(self._model, self._data)
        return self._seen(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Drives the joints towards their targets for 0.1 s."""
        self._data.ctrl[:] = [*np.radians(action[:5]), action[5] / 2000]
        mujoco.mj_step(self._model, self._data, _SUBSTEPS)
        mujoco.mj_forward(self._model, self._data)
        away = self._distance()
        solved = bool(away < REACHED and self._seen()[5] < CLOSED)
        return self._seen(), 1.0 - away, False, False, {"is_success": solved}

    def expert_action(self) -> np.ndarray:
        """Returns targets on the way to the ball, by damped inverse kinematics."""
        jacobian = np.zeros((3, self._model.nv))
        mujoco.mj_jacSite(self._model, self._data, jacobian, None, self._data.site("tip").id)
        arm = jacobian[:, :5]
        way = self._data.mocap_pos[0] - self._data.site("tip").xpos
        turn = arm.T @ np.linalg.solve(arm @ arm.T + _DAMPING * np.eye(3), way)
        turn *= min(1.0, 0.15 / max(np.abs(turn).max(), 1e-9))
        return np.append(np.degrees(self._data.qpos[:5] + turn), 0.0).clip(_LOW, _HIGH)

    def render(self) -> np.ndarray:
        """Returns what the camera in front sees, uint8 [64, 96, 3]."""
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self._model, *SIZE)
        self._renderer.update_scene(self._data, "front")
        return self._renderer.render()

    def close(self) -> None:
        """Frees the renderer."""
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = None


gymnasium.register("DegreesArm-v0", f"{__name__}:DegreesArm", max_episode_steps=40)
