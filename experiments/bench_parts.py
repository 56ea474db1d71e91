"""The pieces that bench_rollout.py times, each in a process of its own: stock env, our env, our rollout, and the limit.

    record    one rollout as in training; every reset, drive target, picture and chunk of actions is kept
    rollout   the same rollout again: what a worker does, without Ray
    env       the same chunks of actions, without the policy
    limit     the same inverse kinematics, drive targets, steps, pictures and policy calls, without anything else
              (resets run too, but count for nothing)
    stock     the same actions on one env object of ManiSkill's own, rendering every step

Rollouts of one seed, iteration and weights are equal bit for bit, so that all of these do the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import cast

import gymnasium as gym
import sapien
import torch
from mani_skill.agents.controllers.pd_ee_pose import PDEEPosController
from torch import Tensor

from envs.batched import patches
from rlinf_embodied.config import Reduction, TrainConfig
from rlinf_embodied.embodied.actor_stage import ActorStage
from rlinf_embodied.embodied.batch import RolloutReport
from rlinf_embodied.embodied.env_stage import EnvStage
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.flow.graph import Workflow
from rlinf_embodied.flow.plan import resolve
from rlinf_embodied.interfaces import Observation, VectorEnv
from rlinf_embodied.learning.reduce import ExactReducer, FastReducer, SoloGroup
from rlinf_embodied.randomness import uniform
from rlinf_embodied.runtime.host import Call, Output, Receipt, StageContext, Tick, WorkerHost, WorkerSpec

TICK = Tick(0)
COLLOCATED = [{"tree": {"temporal": [
    {"loop": {"name": "rollout", "stages": {"env": "all", "policy": "all"}}},
    {"leaf": {"stage": "actor", "devices": "all"}},
]}}]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for so many env steps, and where they went."""

    seconds: float
    env_steps: int
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds by name


# --------------------------------------------------------------------------------------------------------------- stages
class WatchedEnvStage(EnvStage):
    """The env stage, whose env object can be looked at."""

    @property
    def env(self) -> VectorEnv:
        """The one env object of an unsharded rollout."""
        (part,) = self._parts.values()
        return part.env


class TimedActor(ActorStage):
    """Times the update with both reductions, each from the weights that it was set up with, and leaves these."""

    def setup(self, context: StageContext) -> None:
        """As the actor, with both reducers."""
        super().setup(context)
        self._reducers = {
            Reduction.exact: ExactReducer(context.group, context.owners),
            Reduction.fast: FastReducer(context.group, context.owners),
        }
        self._armed = False
        self._turn = 0

    def arm(self, tick: Tick, armed: bool) -> None:
        """Says whether the next calls of `run` make updates."""
        self._armed = armed

    def run(self, tick: Tick, inputs: Mapping[int, list[object]]) -> Output:
        """Reports seconds by reduction; nothing if not armed."""
        seconds: dict[str, float] = {}
        if self._armed:
            order = list(self._reducers)[:: 1 if self._turn % 2 == 0 else -1]
            self._turn += 1
            for reduction in order:
                self._reducer = self._reducers[reduction]
                seconds[reduction.value] = self._timed_update(tick, inputs)
        return Output(dict.fromkeys(inputs), seconds)

    def _timed_update(self, tick: Tick, inputs: Mapping[int, list[object]]) -> float:
        weights = {name: value.clone() for name, value in self._policy.module.state_dict().items()}
        optimizers = [o for o in (self._optimizer, self._value_optimizer) if o is not None]
        states, version = [optimizer.export_state() for optimizer in optimizers], self._shared.version
        start = time.perf_counter()
        super().run(tick, inputs)
        seconds = time.perf_counter() - start
        self._policy.module.load_state_dict(weights)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.import_state(state)
        self._shared.version = version
        return seconds


def bench_config(config: TrainConfig, chunk_steps: int) -> TrainConfig:
    """Returns the config with a rollout of this length, and updates that always do all their work."""
    return replace(
        config,
        env=replace(config.env, chunks_per_rollout=chunk_steps, carry_over=False),
        algorithm=replace(config.algorithm, critic_warmup_iterations=0, target_kl=None),
    )


def bench_workflow(config: TrainConfig, folder: str) -> Workflow:
    """Returns the training workflow with stages that can be watched; weights stay as they are in the folder."""
    workflow = training_workflow(config, folder)
    targets = {"env": f"{__name__}.WatchedEnvStage", "actor": f"{__name__}.TimedActor"}
    stages = {n: replace(s, target=targets.get(n, s.target)) for n, s in workflow.stages.items()}
    return replace(workflow, stages=stages, weight_edges=())


# --------------------------------------------------------------------------------------------------------------- record
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

    def kinematics(self, solve: Callable[..., object], problems: list[tuple]) -> None:
        """Solves for the joint targets that the actions stand for."""
        start = time.perf_counter()
        for problem in problems:
            solve(*problem)
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
            return stock[self._sim, "pictures"](rows)

        def step(count: int = 1) -> None:
            active, drives = list(self._px.active), self._drives()
            add(lambda: limit.step(active, count, drives))
            stock[self._px, "step"](count)

        def solve(controller: PDEEPosController) -> Tensor:
            model, problems = controller.kinematics.pmodel, self._problems(controller)
            add(lambda: limit.kinematics(model.compute_inverse_kinematics, problems))
            return stock[patches, "_solve"](controller)

        self._sim.reset, self._sim.pictures, self._px.step, patches._solve = reset, pictures, step, solve
        self._env.reset, self._env.step_chunk = self._recorded_reset, self._recorded_chunk  # type: ignore[method-assign]
        return self

    def _watched(self) -> list[tuple[object, str]]:
        inside = [(self._sim, "reset"), (self._sim, "pictures"), (self._px, "step"), (patches, "_solve")]
        return [*inside, (self._env, "reset"), (self._env, "step_chunk")]

    def __exit__(self, *error: object) -> None:
        for owner, name in self._watched():
            delattr(owner, name)  # the class's own method is seen again
        self._sim.pictures = self._stock[self._sim, "pictures"]  # these two were no methods of a class
        patches._solve = self._stock[patches, "_solve"]
        self.recording.end = self._limit.state()

    def _problems(self, controller: PDEEPosController) -> list[tuple]:
        """Returns the arguments of each active row's inverse kinematics."""
        solver = controller.kinematics
        joints = controller.articulation.get_qpos()[:, solver.pmodel_active_joint_indices].numpy().copy()
        poses, mask = controller._target_pose.raw_pose.numpy(), solver.qmask.numpy()
        return [
            (solver.end_link_idx, sapien.Pose(poses[row, :3], poses[row, 3:]), joints[row], mask, 1e-4, 100)
            for row in self._px.active
        ]

    def _drives(self) -> list[tuple[Callable[[float], None], float]]:
        """Returns the setters of drive targets that this step is about to call, with their values."""
        buffer, px, active = self._px.cuda_articulation_target_qpos, self._px, set(self._px.active)
        cells = buffer.dirty.view(-1).nonzero()[:, 0].tolist() if buffer.touched else []
        values = buffer.np.reshape(-1)
        scene = px.articulation_scene
        return [(px._set_position[c], float(values[c])) for c in cells if scene[c // px.dof] in active]

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


# -------------------------------------------------------------------------------------------------------------- process
class Bench:
    """One process with every piece; each method does one measurement."""

    def __init__(self, config: TrainConfig, folder: str, worker: int, num_workers: int, stock_steps: int) -> None:
        """Builds what worker `worker` of `num_workers` would have, and records the rollout."""
        torch.set_num_threads(1)
        self._config, self._stock_steps = config, stock_steps
        workflow = bench_workflow(config, folder)
        owners = resolve("bench", COLLOCATED, num_workers, workflow).owners("env", workflow.num_blocks)
        self._blocks = tuple(block for block, owner in enumerate(owners) if owner == worker)
        self._host = WorkerHost(WorkerSpec(worker, "cpu"))
        for name in ("env", "policy"):
            context = StageContext(
                worker, "cpu", self._blocks, (self._blocks,), workflow.num_blocks, owners, SoloGroup(), {}
            )
            self._host.add_stage(workflow.stages[name], context)
        self._env = cast(WatchedEnvStage, self._host.stages["env"]).env
        self._limit = Limit(self._env)
        with Recorder(self._env, self._limit) as recorder:
            self.rollout()
        self._recording = recorder.recording
        self._stock = None

    def rollout(self) -> Timing:
        """Runs the rollout as a worker does: env and policy in one process, the loop in one call."""
        chunk_steps = self._config.env.chunks_per_rollout
        call = Call("env", "loop", TICK, self._blocks, keep=True, partner="policy", chunk_steps=chunk_steps)
        start = time.perf_counter()
        receipt = cast(Receipt, self._host.invoke(call, [])[-1])
        seconds = time.perf_counter() - start
        parts: dict[str, float] = {}
        for span in receipt.spans:
            parts[span.name] = parts.get(span.name, 0.0) + span.duration_s
        return Timing(seconds, cast(RolloutReport, receipt.report).env_steps, parts)

    def env(self) -> Timing:
        """Runs the rollout's chunks of actions without the policy."""
        start = time.perf_counter()
        self._env.reset(self._recording.first_seeds)
        for actions, seeds in self._recording.chunks:
            self._env.step_chunk(actions, seeds)
        return Timing(time.perf_counter() - start, self._recording.env_steps)

    def limit(self) -> Timing:
        """Sums the bare costs of the rollout."""
        limit = self._limit
        limit.seconds = dict.fromkeys(limit.seconds, 0.0)
        for event in self._recording.events:
            event()
        assert limit.state() == self._recording.end, "the replay is another rollout than the recorded one"
        parts = limit.seconds | {"policy": sum(self._policy_call() for _ in self._recording.chunks)}
        return Timing(sum(parts.values()), self._recording.env_steps, parts)

    @torch.no_grad()
    def _policy_call(self) -> float:
        policy, seen = self._host.stages["policy"]._shared.policy, self._recording.observation
        shape = (len(seen), policy.spec.chunk, policy.spec.action_dim)
        noise = torch.from_numpy(uniform(0, "bench", 0, shape=shape))
        start = time.perf_counter()
        policy.act(policy.encode(seen), noise, self._config.policy.temperature)
        return time.perf_counter() - start

    def stock(self) -> Timing:
        """Plays the recorded episodes on ManiSkill's own env, resets included, until enough steps are made."""
        if self._stock is None:
            self._stock = _stock_env(self._config)
        steps, start = 0, time.perf_counter()
        for seed, actions in self._recording.episodes:
            self._stock.reset(seed=seed)
            for action in actions[: self._stock_steps - steps]:
                self._stock.step(action)
                steps += 1
            if steps >= self._stock_steps:
                break
        return Timing(time.perf_counter() - start, steps)


def _stock_env(config: TrainConfig) -> gym.Env:
    env = config.env
    sensors: dict[str, object] = {"width": env.obs_size, "height": env.obs_size}
    if env.camera_fov is not None:
        sensors[env.cameras[0]] = {"fov": env.camera_fov}
    robot = {} if env.robot is None else {"robot_uids": env.robot}
    stock = gym.make(
        env.task,
        obs_mode="rgb",
        sim_backend="physx_cpu",
        render_backend="cpu",
        control_mode=env.control_mode,
        reward_mode="normalized_dense",
        sensor_configs=sensors,
        max_episode_steps=env.horizon,
        **robot,
    )
    stock.reset(seed=0)
    stock.step(None)  # the first picture of a process compiles the shaders
    return stock


def serve(pipe: Connection, config: TrainConfig, folder: str, worker: int, num_workers: int, stock_steps: int) -> None:
    """Answers the names of measurements with their timings until None comes; the loop of a benchmark process."""
    bench = Bench(config, folder, worker, num_workers, stock_steps)
    pipe.send("ready")
    while (name := pipe.recv()) is not None:
        pipe.send(getattr(bench, name)())
