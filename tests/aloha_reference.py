"""How much of a gym-aloha episode depends on what ran before it, run by gym-aloha's Python: writes counts as JSON.

aloha_reference.py <out.json> <task> <steps> <steps with pictures>

An episode runs in a row that was just made, and again in it after each of these histories: another episode, one that
ends in a simulation that explodes, an episode of another row, which leaves its cube in the variable that all rows of
the process share, and numbers in the solver's warm start.  Compared are all numbers that MuJoCo integrates, the warm
start among them, rewards, and every pixel of the pictures of 480 x 640; without pictures a step is 100 times faster.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mujoco
import numpy as np
from dm_control.mujoco import Physics
from dm_control.rl.control import PhysicsError

from envs.gym.row import Row

SEED = 2**30 + 5  # of training
STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_draw = Physics.render


def main(out: str, task: str, steps: int, shown: int) -> None:
    """Writes how many numbers and pixels differ, by name."""
    row, other = (Row(task, {"obs_type": "pixels_agent_pos"}, 64) for _ in range(2))
    told: dict[str, int] = {}
    for name, length in (("pixels", shown), ("numbers", steps)):
        Physics.render = _draw if name == "pixels" else _black
        actions = wander(0, length)
        first = episode(row, SEED, actions)
        repeats = [after() or episode(row, SEED, actions) for after in histories(row, other, length)]
        repeats.append(episode(other, SEED, actions))
        told[name] = sum(int((a != b).sum()) for again in repeats for a, b in zip(first, again, strict=True))
        told[f"{name} compared"] = len(repeats) * sum(part.size for part in first)
        told[f"{name} of another seed"] = int((first[0] != episode(row, SEED + 1, actions)[0]).sum())
    Path(out).write_text(json.dumps(told))


def histories(row: Row, other: Row, length: int):
    """Returns what happens before each repetition."""
    return (
        lambda: episode(row, 90, wander(1, length)) and None,
        lambda: explode(row),
        lambda: episode(other, 91, wander(2, length)) and None,
        lambda: physics(row).data.qacc_warmstart.fill(7.0),
    )


def episode(row: Row, seed: int, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns state [T + 1, D], rewards [T + 1] and pictures [T + 1, 480, 640, 3] (without: one pixel each)."""
    row.reset(seed)
    seen = [now(row)]
    for action in actions:
        row.step(action)
        seen.append(now(row))
    return tuple(np.array(part) for part in zip(*seen, strict=True))


def now(row: Row) -> tuple[np.ndarray, float, np.ndarray]:
    """Returns all that MuJoCo integrates, the reward, and the picture."""
    of = physics(row)
    state = np.empty(mujoco.mj_stateSize(of.model.ptr, STATE))
    mujoco.mj_getState(of.model.ptr, of.data.ptr, state, STATE)
    image = row.image()
    return state, row.reward, image if Physics.render is _draw else image[:1, :1]


def explode(row: Row) -> None:
    """Runs one step at speeds that MuJoCo refuses."""
    physics(row).data.qvel[:] = 1e12
    try:
        row.step(np.zeros(14))
    except PhysicsError:
        return
    raise AssertionError("MuJoCo took a speed of 1e12 m/s")


def physics(row: Row) -> Physics:
    """Returns the row's simulator."""
    return row.env.unwrapped._env.physics


def wander(seed: int, length: int) -> np.ndarray:
    """Returns actions [T, 14] that sweep the arms across the table."""
    random = np.random.RandomState(seed)
    drift = np.cumsum(random.normal(0.0, 0.12, (length, 14)), 0)
    return np.clip(drift + random.uniform(-1, 1, 14), -1, 1).astype(np.float32)


def _black(self: Physics, height: int, width: int, **_: object) -> np.ndarray:
    return np.zeros((height, width, 3), np.uint8)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
