# pyright: reportMissingImports=false
"""One task as the benchmark builds it; runs in LIBERO's own environment.

An episode is a function of its start and its actions.  Robosuite and LIBERO keep these between episodes, and `begin`
sets them anew:

    where fixtures stand      (a cabinet, a stove) is drawn by every reset from numpy's global generator, and no part
                              of the benchmark's initial states: the generator is brought to where the k-th reset after
                              `seed(0)` finds it, which is what evaluation scripts do that run the states in order
    what is drawn at a reset  grows: each reset of LIBERO's draws drawers and knobs once more than the one before
    the gripper               closes and opens by steps from where its last command left it
    everything else           MuJoCo's data, controller and buffers are reset by robosuite, whose model is kept (a reset
                              that builds it anew takes seconds, and leads to the same bits)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from libero.libero import benchmark, get_libero_path
from libero.libero.envs.env_wrapper import ControlEnv
from robosuite.utils.binding_utils import MjRenderContextOffscreen
from robosuite.utils.errors import RandomizationError
from robosuite.utils.observables import Observable, sensor
from robosuite.utils.transform_utils import quat2axisangle

from envs.foreign.starts import Start
from envs.libero.starts import NUM_OBJECTS

REST = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # stand still with an open gripper
ORDER_SEED = 0  # of the generator before an evaluation's first reset
_MOST_DRAWS = 1000  # of placements until one is valid
_PROPRIO = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_VIEW = "view"
_SEEN = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a suite."""

    name: str
    instruction: str
    bddl: Path
    states: Path


def tasks_of(suite: str) -> list[Task]:
    """Returns the tasks of a suite in the benchmark's order."""
    made = benchmark.get_benchmark_dict()[suite]()
    folders = Path(get_libero_path("bddl_files")), Path(get_libero_path("init_states"))
    return [
        Task(
            task.name,
            task.language,
            folders[0] / task.problem_folder / task.bddl_file,
            folders[1] / task.problem_folder / f"{task.init_states_file}.npz",
        )
        for task in (made.get_task(i) for i in range(made.n_tasks))
    ]


class Scene:
    """A row's simulator."""

    def __init__(self, task: Task, settle_steps: int) -> None:
        """Builds it; `settle_steps` are run after each reset, so that what was set down comes to rest."""
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
        self._generators: list[tuple] = []  # numpy's before the reset of each initial state, as far as it is known
        self._observe_only(_PROPRIO)
        self._env.add_observable(Observable(_VIEW, self._view(), sampling_rate=self._env.control_freq))
        known = [self._env.obj_body_id[name] for name in self._env.obj_of_interest if name in self._env.obj_body_id]
        self._interest = known[:NUM_OBJECTS]
        self._seen: dict[str, np.ndarray] = {}
        self._success = False

    def begin(self, start: Start) -> None:
        """Brings the row to the initial state of an episode."""
        if start.state is None:
            self._env.object_property_initializers = self._drawn_once
            np.random.seed(start.seed)
            self._reset()
            state = self._wrapper.get_sim_state()
        else:
            self._reset_as_in_order(start.state)
            state = self._states[start.state]
        self._seen = self._wrapper.set_init_state(state)
        self._success = bool(self._wrapper.check_success())
        for _ in range(self._settle_steps):
            self.step(REST)

    def step(self, action: np.ndarray) -> None:
        """Runs one control step; action [7] in [-1, 1]."""
        self._seen, _, self._success, _ = self._env.step(action)

    def state(self) -> dict[str, np.ndarray]:
        """Returns what the row tells now.

        success  bool []
        proprio  float32 [8], tool position (m), its rotation as axis times angle (rad), both fingers (m)
        objects  float32 [M, 3], where the first M objects of the task's goal are, metres; zero without one
        """
        position, rotation, fingers = (self._seen[name] for name in _PROPRIO)
        objects = np.zeros((NUM_OBJECTS, 3), dtype=np.float32)
        objects[: len(self._interest)] = self._env.sim.data.body_xpos[self._interest]
        proprio = np.concatenate([position, quat2axisangle(rotation.copy()), fingers]).astype(np.float32)
        return {"success": np.bool_(self._success), "proprio": proprio, "objects": objects}

    def image(self, eye: Eye, camera: str, size: int) -> np.ndarray:
        """Returns what the benchmark's camera observation shows, uint8 [size, size, 3], upright (there: upside down).

        It is of the moment at which robosuite samples its observations, which lies within the last control step.
        """
        data, shown = self._env.sim.data._data, self._seen[_VIEW]
        now = {name: np.array(getattr(data, name)) for name in _SEEN}
        start = 0
        for name in _SEEN:
            getattr(data, name).flat[:] = shown[start : start + now[name].size]
            start += now[name].size
        try:
            return eye.image(self._env.sim, camera, size)[::-1]
        finally:
            for name, values in now.items():
                getattr(data, name)[:] = values

    def open_eye(self) -> Eye:
        """Returns a renderer for scenes of this task."""
        return Eye(self._env.sim)

    def close(self) -> None:
        self._wrapper.close()

    def _reset_as_in_order(self, number: int) -> None:
        """Resets as the benchmark does for this initial state after those before it."""
        while len(self._generators) <= number:
            if not self._generators:
                np.random.seed(ORDER_SEED)
                self._generators.append(np.random.get_state())
            else:
                self._reset_from(len(self._generators) - 1)
                self._generators.append(np.random.get_state())
        self._reset_from(number)

    def _reset_from(self, number: int) -> None:
        np.random.set_state(self._generators[number])
        self._env.object_property_initializers = self._drawn_once * (number + 2)  # built once, reset number + 1 times
        self._reset()

    def _reset(self) -> None:
        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        for _ in range(_MOST_DRAWS):
            try:
                self._env.reset()
                return
            except RandomizationError:
                continue
        raise RuntimeError(f"{self.task.name}: no valid placement of its objects in {_MOST_DRAWS} draws")

    def _observe_only(self, names: Sequence[str]) -> None:
        for name in self._env.observation_names:
            if name not in names:
                self._env.modify_observable(name, "enabled", False)

    def _view(self) -> Callable[[dict], np.ndarray]:
        """Returns a sensor of all that a camera would show, which costs nothing next to an image."""

        @sensor(modality=_VIEW)
        def view(_cache: dict) -> np.ndarray:
            return np.concatenate([np.ravel(getattr(self._env.sim.data._data, name)) for name in _SEEN])

        return view


class Eye:
    """Renders scenes of one task: a context holds the task's meshes and textures, which are large, once."""

    def __init__(self, sim: object) -> None:
        """Opens a rendering context for models such as that of `sim`."""
        self._context = MjRenderContextOffscreen(sim, device_id=-1)
        self._context.vopt.geomgroup[0], self._context.vopt.geomgroup[1] = 0, 1  # visual meshes only
        sim._render_context_offscreen = None  # pyright: ignore[reportAttributeAccessIssue]  it is no scene's own

    def image(self, sim, camera: str, size: int) -> np.ndarray:
        """Returns uint8 [size, size, 3], upside down."""
        self._context.gl_ctx.make_current()
        self._context.sim, self._context.model, self._context.data = sim, sim.model, sim.data
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context.con)
        self._context.render(size, size, sim.model.camera_name2id(camera))
        return self._context.read_pixels(size, size)

    def close(self) -> None:
        self._context.gl_ctx.make_current()
        del self._context  # frees both contexts
