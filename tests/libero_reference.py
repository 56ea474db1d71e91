"""The benchmark's own evaluation loop, run by LIBERO's Python: writes what a policy would see to a .npz file.

libero_reference.py <out.npz> <suite> <task> <episodes> <steps> <seed of the actions>

As evaluation scripts have it: the env of a task is built with its cameras on, seeded with 0, and for each initial state
in order reset as a whole (hard_reset, LIBERO's default), set to that state, left alone for ten steps, and run.
"""

from __future__ import annotations

import sys

import numpy as np
from libero.libero.envs import OffScreenRenderEnv
from robosuite.utils.transform_utils import quat2axisangle

from envs.libero import REST, tasks_of

SIZE, CAMERAS = 32, ("agentview", "robot0_eye_in_hand")


def main(out: str, suite: str, number: int, episodes: int, steps: int, seed: int) -> None:
    """Writes proprio [E, T + 1, 8], images [E, T + 1, 2, S, S, 3], success [E, T + 1] and actions [T, 7]."""
    task = tasks_of(suite)[number]
    states = np.load(task.states)["states"]
    env = OffScreenRenderEnv(bddl_file_name=str(task.bddl), camera_heights=SIZE, camera_widths=SIZE)
    env.seed(0)
    actions = np.random.RandomState(seed).uniform(-1, 1, (steps, 7)).astype(np.float32)
    told: dict[str, list] = {"proprio": [], "images": [], "success": []}
    for k in range(episodes):
        env.reset()
        env.set_init_state(states[k])
        for _ in range(10):
            seen, _, done, _ = env.step(REST)
        rows = [(seen, done)]
        for action in actions:
            seen, _, done, _ = env.step(action)
            rows.append((seen, done))
        told["proprio"].append([proprio(seen) for seen, _ in rows])
        told["images"].append([[seen[f"{name}_image"][::-1, ::-1] for name in CAMERAS] for seen, _ in rows])
        told["success"].append([done for _, done in rows])
    np.savez(out, actions=actions, **{name: np.array(values) for name, values in told.items()})


def proprio(seen: dict[str, np.ndarray]) -> np.ndarray:
    """Returns float32 [8]: position, rotation as axis times angle, fingers."""
    parts = seen["robot0_eef_pos"], quat2axisangle(seen["robot0_eef_quat"].copy()), seen["robot0_gripper_qpos"]
    return np.concatenate(parts).astype(np.float32)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]))
