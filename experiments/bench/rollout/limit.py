"""A recorded rollout, and its replay without a framework: physics, images and policy calls."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
# ManiSkill's objects are annotated as their bases, and what is recorded lies below the protocols.

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mani_skill.agents.controllers.pd_ee_pose import PDEEPosController
from torch import Tensor

from envs.batched import controllers
from rlinf_embodied.interfaces.envs import Observation, VectorEnv


@dataclass(slots=True)
class Recording:
    """Everything that happened to an env in one rollout."""

    events: list[Callable[[], None]] = field(default_factory=list)  # of the limit, in order
    first_seeds: list[int] = field(default_factory=list)
    chunks: list[tuple[Tensor, list[int] | None]] = field(default_factory=list)
    episodes: list[tuple[int, list[Tensor]]] = field(default_factory=list)  # (seed, actions [A]) in order of their end
    observation: Observation | None = None
    end: bytes = b""  # the state of all PhysX systems
    env_steps: int = 0


class Limit:
    """Replays a recorded rollout with nothing but physics, pictures and policy calls, and times these."""

    def __init__(self, env: VectorEnv) -> None:
        """Takes an env object of the batched CPU backend (no other one gives its drives away)."""
        self._sim = env._sim  # pyright: ignore[reportAttributeAccessIssue]
        self._px = self._sim._task.scene.px
        self._cameras = self._sim._renderer._cameras
        self._reset = self._sim.reset
        self.seconds = {"kinematics": 0.0, "physics": 0.0, "pictures": 0.0}

    def state(self) -> bytes:
        """Returns the state of all PhysX systems."""
        return b"".join(system.pack() for system in self._px.systems)

    def reset(self, rows: list[int], seeds: list[int]) -> None:
        """Resets rows, untimed."""
        self._reset(rows, seeds)

    def kinematics(self, solve: Callable[[], None]) -> None:
        """Solves for the joint targets that the actions stand for."""
        start = time.perf_counter()
        solve()
        self.seconds["kinematics"] += time.perf_counter() - start

    def step(self, active: list[int], count: int, drives: list[tuple[Callable[[float], None], float]]) -> None:
        """Sets drive targets and steps the systems, nothing else."""
        start = time.perf_counter()
        for set_target, value in drives:
            set_target(value)
        for i in active:
            step = self._px.systems[i].step
            for _ in range(count):
                step()
        self.seconds["physics"] += time.perf_counter() - start
        self._px.cuda_articulation_target_qpos.forget()
        self._px._invalidate(active)

    def pictures(self, rows: list[int]) -> None:
        """Takes one picture per camera."""
        start = time.perf_counter()
        for row in rows:
            self._px.scenes[row].render_system.step()
            for camera in self._cameras[row]:
                camera.take_picture()
        for row in rows:
            for camera in self._cameras[row]:
                camera.get_picture("Color")
        self.seconds["pictures"] += time.perf_counter() - start


class Recorder:
    """Keeps what one rollout does to an env; use it as a context manager around the rollout."""

    def __init__(self, env: VectorEnv, limit: Limit) -> None:
        self._env, self._limit, self._sim, self._px = env, limit, limit._sim, limit._px
        self.recording = Recording()
        self._running: list[tuple[int, list[Tensor]]] = []

    def __enter__(self) -> Recorder:
        stock = {(o, n): getattr(o, n) for o, n in self._watched()}
        self._stock = stock
        add, limit = self.recording.events.append, self._limit

        def reset(rows: list[int], seeds: list[int]) -> None:
            rows, seeds = list(rows), [int(seed) for seed in seeds]
            add(lambda: limit.reset(rows, seeds))
            stock[self._sim, "reset"](rows, seeds)

        def pictures(rows: list[int]) -> Tensor:
            rows = list(rows)
            add(lambda: limit.pictures(rows))
            return stock[self._sim, "images"](rows)

        def advance(count: int) -> None:
            active, drives = list(self._px.active), self._drives()
            add(lambda: limit.step(active, count, drives))
            stock[self._px, "advance"](count)

        def solve(controller: PDEEPosController) -> Tensor:
            problem = self._problem(controller)
            add(lambda: limit.kinematics(problem))
            return stock[controllers, "_solve"](controller)

        self._sim.reset, self._sim.images, self._px.advance, controllers._solve = reset, pictures, advance, solve
        self._env.reset, self._env.step_chunk = self._recorded_reset, self._recorded_chunk  # type: ignore[method-assign]
        return self

    def _watched(self) -> list[tuple[object, str]]:
        inside = [(self._sim, "reset"), (self._sim, "images"), (self._px, "advance"), (controllers, "_solve")]
        return [*inside, (self._env, "reset"), (self._env, "step_chunk")]

    def __exit__(self, *error: object) -> None:
        for owner, name in self._watched():
            delattr(owner, name)  # the class's own method is seen again
        self._sim.images = self._stock[self._sim, "images"]  # these two were no methods of a class
        controllers._solve = self._stock[controllers, "_solve"]
        self.recording.end = self._limit.state()

    def _problem(self, controller: PDEEPosController) -> Callable[[], None]:
        """Returns a call that solves the active rows' inverse kinematics as they are now."""
        rows, qpos = list(self._px.active), controller.articulation.get_qpos().numpy().copy()
        poses, targets = controller._target_pose.raw_pose.numpy().copy(), controller._start_qpos.numpy().copy()
        solve = controllers.row_solver(controller.kinematics).solve
        return lambda: solve(rows, qpos, poses, targets)

    def _drives(self) -> list[tuple[Callable[[float], None], float]]:
        """Returns the setters of drive targets that this step is about to call, with their values."""
        buffer, px, active = self._px.cuda_articulation_target_qpos, self._px, set(self._px.active)
        cells = buffer.dirty.view(-1).nonzero()[:, 0].tolist() if buffer.touched else []
        values = buffer.np.reshape(-1)
        scene = px.articulation_scene
        return [(px.position_drives.setters[c], float(values[c])) for c in cells if scene[c // px.dof] in active]

    def _recorded_reset(self, seeds: list[int], rows: list[int] | None = None) -> Observation:
        self.recording.first_seeds = [int(seed) for seed in seeds]
        self._running = [(seed, []) for seed in self.recording.first_seeds]
        return self._stock[self._env, "reset"](seeds, rows)

    def _recorded_chunk(self, actions: Tensor, next_seeds: list[int] | None = None) -> object:
        result = self._stock[self._env, "step_chunk"](actions, next_seeds)
        recording = self.recording
        recording.chunks.append((actions.clone(), next_seeds))
        recording.env_steps += int(result.valid.sum())
        recording.observation = result.observation
        for row, (_, done) in enumerate(self._running):
            done.extend(actions[row][result.valid[row]].unbind(0))
        for row in result.final_rows:
            recording.episodes.append(self._running[row])
            self._running[row] = (next_seeds[row] if next_seeds else -1, [])
        return result
