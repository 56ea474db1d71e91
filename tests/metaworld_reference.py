"""MetaWorld's own episodes beside ours, run by MetaWorld's Python: writes both to a .npz file.

metaworld_reference.py <out.npz> <steps> <task> ...

Theirs: an env of the task's class that was just built, set by `set_task` to what our episode drew, reset and stepped.
Ours: the episode of a seed, in a scene in which an episode of another seed ran before.  `other` is that one.
"""

from __future__ import annotations

import pickle
import sys

import numpy as np
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.types import Task

from envs.foreign.adapter import Start
from envs.metaworld import BEST, MetaworldOptions, Scene


def main(out: str, steps: int, tasks: list[str]) -> None:
    """Writes rows of state, reward and success [T + 1, 41] of each task; the actions are the expert's, disturbed."""
    told = {}
    for name in tasks:
        scene = Scene(name, MetaworldOptions(), np.zeros(0, dtype=np.float32))
        noise = np.random.RandomState(3).uniform(-0.3, 0.3, (steps, 4)).astype(np.float32)
        told[f"{name} other"], _ = ours(scene, 8, noise)
        told[f"{name} ours"], actions = ours(scene, 7, noise)
        cls = ALL_V3_ENVIRONMENTS[name]
        env = cls()
        data = {"rand_vec": scene.drawn, "env_cls": cls, "partially_observable": False}
        env.set_task(Task(name, pickle.dumps(data)))
        seen, _ = env.reset()
        rows = [[*seen.astype(np.float32), 0.0, 0.0]]
        for action in actions:
            seen, reward, _, _, info = env.step(action)
            rows.append([*seen.astype(np.float32), np.float32(reward) / BEST, info["success"]])
        told[f"{name} theirs"] = np.array(rows, dtype=np.float32)
    np.savez(out, **told)


def ours(scene: Scene, seed: int, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of an episode and its actions [T, 4]."""
    scene.begin(Start(0, None, seed))
    rows, actions = [row(scene)], []
    for disturbed in noise:
        actions.append(np.clip(scene.expert() + disturbed, -1, 1))
        scene.step(actions[-1])
        rows.append(row(scene))
    return np.array(rows, dtype=np.float32), np.array(actions)


def row(scene: Scene) -> list:
    """Returns what a row tells, as one list."""
    state = scene.state()
    return [*state["privileged"], state["reward"], state["success"]]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
