# pyright: reportMissingImports=false
"""MetaWorld's tasks: env=metaworld env.task=<task or suite> (docs/metaworld.md), built as the benchmark builds them.

An episode is a function of its seed and its actions.  MetaWorld's resets do not restore these, and `begin` sets them to
their values when the task was built:

    the model      a reset moves bodies, sites and cameras of the model itself
    attributes     of the task's object, among them what rewards compare with
    the state      a reset moves the hand to its start position twice, the first time from where it was

MetaWorld's reset draws objects and goal, here from the seed.  With the restored values the episode begins as in the
benchmark.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from envs.foreign.adapter import Adapter, Facts, ForeignOptions, Start
from envs.foreign.mujoco_scenes import Renderer, Snapshot
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.config.checks import did_you_mean, require, require_one_of

UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")  # how these cameras hang
SUITES = ("mt10", "mt25", "mt50")
MOST_STEPS = 500  # of an episode: MetaWorld refuses more
NUM_STATE = 39  # what MetaWorld observes: hand, fingers and objects now and one step before, and the goal
BEST = np.float32(10.0)  # MetaWorld's reward of a solved task


@dataclass(kw_only=True, slots=True)
class MetaworldOptions(ForeignOptions):
    """The options in env.options."""

    pictures: str = "light"  # without shadows, reflections and smoothed edges; "benchmark": as MetaWorld draws them
    show_goal: bool = True  # whether images show goals and other marks; in reach tasks only the mark shows the goal
    goal_in_proprio: bool = False  # whether the proprioception holds the goal's position
    tasks: list[str] = field(default_factory=list)  # the suite's tasks to use; []: all of them
    spare_scenes: int = 20
    instructions: dict[str, str] = field(default_factory=dict)  # by task; MetaWorld itself has none

    def __post_init__(self) -> None:
        ForeignOptions.__post_init__(self)
        require_one_of(self, "env.options", "pictures", "light", "benchmark")


class Metaworld(Adapter):
    """A task, or a suite: the reset seed determines a row's task."""

    key, name, packages = "metaworld", "MetaWorld", ("metaworld", "mujoco")
    cameras = (*UPSIDE_DOWN, "topview", "gripperPOV", "behindGripper")
    Options = MetaworldOptions
    options: MetaworldOptions

    def check(self, config: EnvConfig) -> None:
        super().check(config)
        known = (*SUITES, *self.options.instructions)
        use = did_you_mean(config.task, known).strip() or f"use one of {', '.join(known[:8])}, ..."
        require(config.task in known, "env.task", config.task, "MetaWorld has no such task or suite", use)
        rule = f"MetaWorld's episodes have at most {MOST_STEPS} steps"
        require(config.horizon <= MOST_STEPS, "env.horizon", config.horizon, rule, f"use {MOST_STEPS} or less")

    def chosen(self, names: Sequence[str]) -> Sequence[int]:
        rule, use = f"{self.task} has no such task", f"use {', '.join(names)}"
        for name in self.options.tasks:
            require(name in names, "env.options.tasks", name, rule, use)
        return [names.index(name) for name in self.options.tasks] or range(len(names))

    def open(self, cameras: Sequence[str], size: int) -> Facts:
        from metaworld import env_dict

        self.film_camera = next(iter(cameras), self.cameras[0])
        suites = dict(zip(SUITES, (env_dict.MT10_V3, env_dict.MT25_V3, env_dict.MT50_V3), strict=True))
        self._names = list(suites.get(self.task, [self.task]))
        one_hot_size = len(self._names) if len(self._names) > 1 else 0
        proprio = 10 if self.options.goal_in_proprio else 4
        state = {"proprio": proprio, "privileged": NUM_STATE + one_hot_size, "object": 3}
        tasks = [(name, self.options.instructions[name]) for name in self._names]
        return Facts(tasks, 4, state, "metaworld (mujoco)", scripted=True)

    def scene(self, task: int) -> Scene:
        num_tasks = len(self._names)
        one_hot = np.eye(num_tasks, dtype=np.float32)[task] if num_tasks > 1 else np.zeros(0, np.float32)
        return Scene(self._names[task], self.options, one_hot)


class Scene:
    """A row's simulator."""

    def __init__(self, task: str, options: MetaworldOptions, one_hot: np.ndarray) -> None:
        """Builds it; `one_hot` is the index of the task in its suite, empty for a single task."""
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
        from metaworld.policies import ENV_POLICY_MAP

        warnings.filterwarnings("ignore", message="Constant")  # from scripted policies whose actions are clipped
        self._options, self._one_hot, self._reaches = options, one_hot, task.startswith("reach")
        cls = ALL_V3_ENVIRONMENTS[task]
        self._env = type(cls.__name__, (cls,), {"_initialize_simulation": _simulation})()
        self._env._partially_observable = False  # the goal is part of the observation, as in MT1, MT10 and MT50
        self._env.__dict__.pop("sawyer_observation_space", None)
        self._env._set_task_called = True
        self._env._set_task_inner()
        self._policy = ENV_POLICY_MAP[task]()
        self._first = Snapshot(self._env, ignored=("sawyer_observation_space",))
        self.drawn = np.zeros(0)  # positions of this episode's objects and goal, as MetaWorld encodes them

    def begin(self, start: Start) -> None:
        env = self._env
        self._first.restore()
        env.np_random = np.random.default_rng(start.seed)
        env.seeded_rand_vec, env._freeze_rand_vec = True, False
        env.reset_model()
        self.drawn = np.array(env._last_rand_vec)
        self._first.restore()
        env._last_rand_vec, env._freeze_rand_vec = self.drawn.copy(), True
        self._observation, _ = env.reset()
        self._reward, self._success = 0.0, False

    def step(self, action: np.ndarray) -> None:
        """Runs one control step of 12.5 ms; action [4] in [-1, 1]."""
        self._observation, reward, _, _, info = self._env.step(np.clip(action, -1.0, 1.0))
        self._reward, self._success = float(reward), bool(info["success"])

    def state(self) -> dict[str, Any]:
        """Returns the row's state.

        reward      MetaWorld's, divided by that of a solved task (10)
        proprio     the hand's position (m) and how far its fingers are open (0 to 1), float32 [4]; with
                    env.options.goal_in_proprio also the goal's position and its offset from the hand
        privileged  what MetaWorld observes: hand (m), fingers, up to two objects (m, quaternion), the same one step
                    before, goal, float32 [39]; for a suite of T tasks also the task's index, one-hot [T]
        object      the task's first object; of a reach, the goal
        """
        state = self._observation.astype(np.float32)
        hand, goal = state[:4], state[-3:]
        proprio = np.concatenate([hand, goal, goal - hand[:3]]) if self._options.goal_in_proprio else hand
        return {
            "success": np.bool_(self._success),
            "reward": np.float32(self._reward) / BEST,
            "proprio": proprio,
            "privileged": np.concatenate([state, self._one_hot]),
            "object": goal if self._reaches else state[4:7],
        }

    def expert(self) -> np.ndarray:
        """Returns the scripted policy's next action in [-1, 1], float32 [4], for the present observation."""
        return np.asarray(self._policy.get_action(self._observation), dtype=np.float32).clip(-1.0, 1.0)

    def open_renderer(self) -> Renderer:
        renderer = Renderer(self._env.model, light=self._options.pictures == "light")
        if not self._options.show_goal:
            renderer.options.sitegroup[:] = 0
        return renderer

    def image(self, renderer: Renderer, camera: str, size: int) -> np.ndarray:
        """Returns uint8 [size, size, 3], upright."""
        image = renderer.image(self._env.model, self._env.data, camera, size)
        return image[::-1, ::-1] if camera in UPSIDE_DOWN else image

    def close(self) -> None:
        self._env.close()


def _simulation(env: Any) -> tuple[Any, Any]:
    """Returns an env's model and data; compiles the model's file only once, where Gymnasium does so every time."""
    import mujoco

    model = copy.copy(_compiled(env.fullpath))
    return model, mujoco.MjData(model)


@cache
def _compiled(path: str) -> Any:
    import mujoco

    return mujoco.MjModel.from_xml_path(path)
