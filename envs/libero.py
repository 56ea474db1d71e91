# pyright: reportMissingImports=false
"""LIBERO's suites: env=libero env.options.suite=spatial (docs/libero.md), and one task as the benchmark builds it.

An episode is a function of its start and its actions.  Robosuite and LIBERO keep these between episodes, and `begin`
resets them:

    poses of fixtures         (a cabinet, a stove) are drawn by every reset from numpy's global generator, and are not
                              part of the benchmark's initial states: the generator gets the state that it has at the
                              k-th reset after `seed(0)`, as in evaluation scripts that run the states in order
    draws of a reset          grow: each reset of LIBERO draws drawers and knobs one time more than the reset before
    the gripper               closes and opens by steps from the position of its last command
    everything else           MuJoCo's data, controller and buffers are reset by robosuite, whose model is kept (a reset
                              that rebuilds it takes seconds, and leads to the same bits)

The start of a reset seed:

    evaluation (seed < 2^30)   one task after the other, then the benchmark's 50 initial states of each: 500 consecutive
                               seeds are every pair of a suite of 10 tasks once
    training (seed >= 2^30)    a task by the seed, its objects placed by the task's rules and drawn from the seed
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from envs.foreign.adapter import FIRST_TRAINING_SEED, Adapter, Facts, ForeignOptions, Start
from envs.foreign.mujoco_scenes import Renderer
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.config.checks import require, require_numbers, require_one_of

NUM_TASKS = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
PRO = ("swap", "object", "lan", "task")  # suites of LIBERO-PRO (arXiv:2510.03827), each a variant of these four:
NUM_TASKS |= {f"libero_{suite}_{kind}": 10 for suite in ("spatial", "object", "goal", "10") for kind in PRO}
NUM_STATES = 50  # initial states of every task that the benchmark comes with
NUM_OBJECTS = 4  # of a task's goal, whose positions are in the privileged state
NUM_ACTIONS, NUM_PROPRIO = 7, 8
REST = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # stand still with an open gripper
ORDER_SEED = 0  # of the generator before an evaluation's first reset
_MOST_DRAWS = 1000  # of placements until one is valid
_PROPRIO = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_VIEW = "view"
_VIEW_FIELDS = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")


@dataclass(kw_only=True, slots=True)
class LiberoOptions(ForeignOptions):
    """The options in env.options."""

    suite: str = "spatial"  # spatial, object, goal, 10 or 90; all but 90 also with a suffix of PRO, as in spatial_swap
    max_steps: dict[str, int] = field(default_factory=dict)  # env.horizon by suite: the benchmark's limits
    task: int = -1  # the only task to run; -1: all of the suite
    settle_steps: int = 10  # steps at rest after a reset, which do not count towards the horizon
    rotate: int = 180  # of the policy's images, in degrees: 180 as in OpenVLA's data, 0 upside down as in MuJoCo
    train_on_benchmark: bool = False  # training, too, starts from the benchmark's initial states


class Libero(Adapter):
    """A suite; each reset may give a row another of its tasks."""

    key, name, packages = "libero", "LIBERO", ("libero", "mujoco", "robosuite")
    cameras = ("agentview", "robot0_eye_in_hand", "frontview", "birdview", "sideview")
    Options = LiberoOptions
    options: LiberoOptions

    def check(self, config: EnvConfig) -> None:
        super().check(config)
        options, suites = self.options, [name.removeprefix("libero_") for name in NUM_TASKS]
        require_one_of(options, "env.options", "suite", *suites)
        rule, last = f"{self.task} has tasks 0 to", NUM_TASKS[self.task] - 1
        is_known = -1 <= options.task <= last
        require(is_known, "env.options.task", options.task, f"{rule} {last}", "use -1 for all of them")
        require_one_of(options, "env.options", "rotate", 180, 0)
        require_numbers(options, "env.options", "settle_steps")
        rule = "LIBERO rewards success only"
        require(config.reward is Reward.sparse, "env.reward", config.reward.value, rule, "use sparse")

    def chosen(self, names: Sequence[str]) -> Sequence[int]:
        return range(len(names)) if self.options.task < 0 else [self.options.task]

    def start(self, seed: int, tasks: Sequence[int]) -> Start:
        turn, place = divmod(seed, len(tasks))
        drawn = seed >= FIRST_TRAINING_SEED and not self.options.train_on_benchmark
        return Start(tasks[place], None if drawn else turn % NUM_STATES, seed)

    def open(self, cameras: Sequence[str], size: int) -> Facts:
        self._tasks = tasks_of(self.task)
        named = [(task.name, task.instruction) for task in self._tasks]
        state = {"proprio": NUM_PROPRIO, "privileged": NUM_PROPRIO + 3 * NUM_OBJECTS, "object": 3}
        return Facts(named, NUM_ACTIONS, state, "libero (mujoco)")

    def scene(self, task: int) -> Scene:
        return Scene(self._tasks[task], self.options.settle_steps)

    def oriented(self, image: np.ndarray) -> np.ndarray:
        """Returns an upright image as OpenVLA's data have it (rotate=180) or upside down as MuJoCo renders it (0)."""
        return image[:, ::-1] if self.options.rotate else image[::-1]


class Task(NamedTuple):
    """A task of a suite."""

    name: str
    instruction: str
    bddl: Path
    states: Path


def tasks_of(suite: str) -> list[Task]:
    """Returns the tasks of a suite in the benchmark's order.

    An instruction is part of its task's name.  Where LIBERO-PRO changes it, only the task's file has it.
    """
    from libero.libero import benchmark, get_libero_path

    benchmark_suite, tasks = benchmark.get_benchmark_dict()[suite](), []
    for task in (benchmark_suite.get_task(i) for i in range(benchmark_suite.n_tasks)):
        bddl = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
        states = Path(get_libero_path("init_states")) / task.problem_folder / f"{task.init_states_file}.npz"
        words = re.search(r"\(:language ([^)]*)\)", bddl.read_text()) if suite.endswith(("_lan", "_task")) else None
        instruction = task.language if words is None else words[1].strip().lower().replace("\u2019", "'")
        tasks.append(Task(task.name, instruction, bddl, states))
    return tasks


class Scene:
    """A row's simulator."""

    def __init__(self, task: Task, settle_steps: int) -> None:
        """Builds it; `settle_steps` are run after each reset, so that objects come to rest."""
        from libero.libero.envs.env_wrapper import ControlEnv
        from robosuite.utils.observables import Observable
        from robosuite.utils.transform_utils import quat2axisangle

        self._rotation_vector = quat2axisangle
        self.task, self._settle_steps = task, settle_steps
        self._states = np.load(task.states, allow_pickle=False)["states"]
        self._wrapper = ControlEnv(
            bddl_file_name=str(task.bddl),
            use_camera_obs=False,
            has_offscreen_renderer=False,
            hard_reset=False,
            ignore_done=True,
        )
        self._env = self._wrapper.env
        self._drawn_once = list(self._env.object_property_initializers)
        np.random.seed(ORDER_SEED)
        self._generators = [np.random.get_state()]  # state before the reset of each initial state, as far as computed
        for name in set(self._env.observation_names) - set(_PROPRIO):
            self._env.modify_observable(name, "enabled", False)
        self._env.add_observable(Observable(_VIEW, self._view(), sampling_rate=self._env.control_freq))
        known = [self._env.obj_body_id[name] for name in self._env.obj_of_interest if name in self._env.obj_body_id]
        self._interest = known[:NUM_OBJECTS]
        self._observation: dict[str, np.ndarray] = {}
        self._success = False

    def begin(self, start: Start) -> None:
        if start.state is None:
            self._env.object_property_initializers = self._drawn_once
            np.random.seed(start.seed)
            self._reset()
            state = self._wrapper.get_sim_state()
        else:
            self._reset_as_in_order(start.state)
            state = self._states[start.state]
        self._observation = self._wrapper.set_init_state(state)
        self._success = bool(self._wrapper.check_success())
        for _ in range(self._settle_steps):
            self.step(REST)

    def step(self, action: np.ndarray) -> None:
        """Runs one control step; action [7] in [-1, 1]."""
        self._observation, _, self._success, _ = self._env.step(np.clip(action, -1.0, 1.0))

    def state(self) -> dict[str, np.ndarray]:
        """Returns the row's state; `privileged` is proprioception and the positions (m) of the goal's first objects.

        proprio  float32 [8], tool position (m), its rotation as axis times angle (rad), both fingers (m)
        """
        position, rotation, fingers = (self._observation[name] for name in _PROPRIO)
        objects = np.zeros((NUM_OBJECTS, 3), dtype=np.float32)
        objects[: len(self._interest)] = self._env.sim.data.body_xpos[self._interest]
        proprio = np.concatenate([position, self._rotation_vector(rotation.copy()), fingers]).astype(np.float32)
        return {
            "success": np.bool_(self._success),
            "reward": np.float32(self._success),
            "proprio": proprio,
            "privileged": np.concatenate([proprio, objects.ravel()]),
            "object": objects[0],
        }

    def image(self, renderer: Renderer, camera: str, size: int) -> np.ndarray:
        """Returns the benchmark's camera observation, uint8 [size, size, 3], upright (the benchmark's is upside down).

        It shows the moment at which robosuite samples its observations, within the last control step.
        """
        data, sampled = self._env.sim.data._data, self._observation[_VIEW]
        now = {name: np.array(getattr(data, name)) for name in _VIEW_FIELDS}
        start = 0
        for name in _VIEW_FIELDS:
            getattr(data, name).flat[:] = sampled[start : start + now[name].size]
            start += now[name].size
        try:
            return renderer.image(self._env.sim.model._model, data, camera, size)
        finally:
            for name, values in now.items():
                getattr(data, name)[:] = values

    def open_renderer(self) -> Renderer:
        renderer = Renderer(self._env.sim.model._model)
        renderer.options.geomgroup[:2] = 0, 1  # visual meshes only
        return renderer

    def close(self) -> None:
        self._wrapper.close()

    def _reset_as_in_order(self, number: int) -> None:
        """Resets as the benchmark does when it runs its initial states in order up to this one."""
        known = len(self._generators)
        for k in range(min(number, known - 1), number + 1):
            np.random.set_state(self._generators[k])
            self._env.object_property_initializers = self._drawn_once * (k + 2)  # built once, reset k + 1 times
            self._reset()
            if k + 1 >= known:
                self._generators.append(np.random.get_state())

    def _reset(self) -> None:
        from robosuite.utils.errors import RandomizationError

        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        for _ in range(_MOST_DRAWS):
            try:
                self._env.reset()
                return
            except RandomizationError:
                continue
        raise RuntimeError(f"{self.task.name}: no valid placement of its objects in {_MOST_DRAWS} draws")

    def _view(self) -> Callable[[dict], np.ndarray]:
        """Returns a sensor that records what an image depends on, which is far cheaper than an image."""
        from robosuite.utils.observables import sensor

        @sensor(modality=_VIEW)
        def view(_cache: dict) -> np.ndarray:
            return np.concatenate([np.ravel(getattr(self._env.sim.data._data, name)) for name in _VIEW_FIELDS])

        return view
