"""Env steps per second of ManiSkill's own env, our env, our rollout with the policy, and the bare costs it cannot beat.

python experiments/bench_rollout.py [rounds=4] [chunks=20] [stock_steps=60] [out=docs/results/rollout.json] [overrides]

One run, alternating rounds, all on the same recorded rollout (see bench_parts.py):

    (a) stock   ManiSkill's env: same robot, cameras and resolution, rendering every step, meshes as they are
    (b) env     our env alone: one observation per chunk, partial resets
    (c) rollout env and policy in the loop of training, in one process and one call
    (d) limit   inverse kinematics, steps of PhysX, per chunk one picture per camera and one policy call; no resets

and with two workers: two Ray workers under the executor against two plain processes.  The policy is the clone that
training starts from (made first if it is not in the cache).  Overrides are those of train_vla.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from bench_report import (
    Goal,
    Spread,
    machine,
    ratios,
    split_arguments,
    table,
    use_one_thread_per_process,
    write_results,
)

from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.errors import RlinfError, WorkerError

if TYPE_CHECKING:
    from bench_parts import Timing

OWN = {"rounds": 4, "chunks": 20, "stock_steps": 60, "out": ""}
NUM_WORKERS = 2
LABELS = {
    "stock": "(a) stock ManiSkill, 1 core",
    "env": "(b) our env alone, 1 core",
    "rollout": "(c) our rollout, 1 worker",
    "limit": "(d) limit, 1 core",
    "rollout x2": "(c) our rollout, 2 plain processes",
    "limit x2": "(d) limit, 2 plain processes",
    "ray x2": "(c) our rollout, 2 Ray workers",
}
Rounds = dict[str, list["Timing"]]


class Processes:
    """Plain processes, one per core, each with all pieces of bench_parts.Bench."""

    def __init__(self, config: TrainConfig, folder: str, stock_steps: int) -> None:
        from bench_parts import serve

        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for worker in range(NUM_WORKERS):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, config, folder, worker, NUM_WORKERS, stock_steps)
            process = spawn.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a process that dies ends the wait for its answer
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            _answer(pipe)

    def alone(self, name: str) -> Timing:
        """Returns a measurement of the first process while the others rest."""
        self._pipes[0].send(name)
        return _answer(self._pipes[0])

    def together(self, name: str) -> Timing:
        """Returns a measurement of all processes at once: the steps of all in the time of the slowest."""
        from bench_parts import Timing

        for pipe in self._pipes:
            pipe.send(name)
        answers = [_answer(pipe) for pipe in self._pipes]
        return Timing(max(a.seconds for a in answers), sum(a.env_steps for a in answers))

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with contextlib.suppress(BrokenPipeError):  # it has died, and has said why
                pipe.send(None)
            process.join()


def _answer(pipe: Connection) -> Timing:
    try:
        return pipe.recv()
    except EOFError:
        raise WorkerError("a process of the benchmark died: its error stands above") from None


class RayWorkers:
    """The same rollout under the executor on Ray, followed by updates with both reductions where asked."""

    def __init__(self, config: TrainConfig, folder: str) -> None:
        from bench_parts import COLLOCATED, bench_workflow

        from rlinf_embodied.cluster.hardware import Cluster, num_cores
        from rlinf_embodied.execution.executor import Executor
        from rlinf_embodied.flow.plan import resolve
        from rlinf_embodied.runtime.ray_session import RaySession

        self._session = RaySession(config.cluster.call_timeout_s)
        workflow = bench_workflow(config, folder)
        cluster = Cluster("bench", "cpu", NUM_WORKERS, num_cores(), 0)
        plan = resolve("bench", COLLOCATED, NUM_WORKERS, workflow)
        self._executor = Executor(workflow, plan, self._session, cluster)
        self.rollout(update=False)

    def rollout(self, update: bool) -> tuple[Timing, dict[str, float]]:
        """Returns the rollout's timing as the driver sees it, and the slowest worker's seconds per update."""
        from bench_parts import TICK, Timing

        from rlinf_embodied.embodied.batch import RolloutReport

        self._executor.call("actor", "arm", TICK, update)
        start = time.perf_counter()
        result = self._executor.run(TICK)
        seconds = time.perf_counter() - start
        actor = [span.duration_s for span in result.spans if span.stage == "actor"]
        env_steps = sum(report.env_steps for report in result.all_of("env", RolloutReport))
        updates = result.all_of("actor", dict)
        slowest = {name: max(part[name] for part in updates) for name in updates[0]}
        return Timing(seconds - max(actor), env_steps), slowest

    def close(self) -> None:
        """Ends Ray."""
        self._session.close()


def clone_of(config: TrainConfig) -> str:
    """Returns the folder of the policy that training would start from."""
    from rlinf_embodied.cluster.hardware import cluster_at_hand
    from rlinf_embodied.embodied.warm_start import WarmStartStageConfig, cache_folder, warm_start
    from rlinf_embodied.runtime.sessions import make_session

    if config.warm_start.checkpoint is not None:
        return config.warm_start.checkpoint
    stage = WarmStartStageConfig((config.env,), config.policy, config.warm_start, config.run.seed)
    cluster = cluster_at_hand(config.cluster)
    cached = cache_folder(stage, cluster.kind == "cpu")
    if (cached / "config.json").exists():
        return str(cached)
    session = make_session(config.cluster)
    try:
        print("no clone in the cache: making it first")
        return str(warm_start(stage, session, cluster, lambda *progress: None))
    finally:
        session.close()


def measure(config: TrainConfig, folder: str, rounds: int, stock_steps: int) -> tuple[Rounds, list[dict[str, float]]]:
    """Returns the timings of every piece by round, and the seconds of each round's updates."""
    workers = RayWorkers(config, folder)
    processes = Processes(config, folder, stock_steps)
    timings: Rounds = {name: [] for name in LABELS}
    updates = []
    try:
        processes.alone("stock")  # builds it
        for number in range(rounds):
            for name in ("stock", "env", "rollout", "limit"):
                timings[name].append(processes.alone(name))
            for name in ("rollout", "limit"):
                timings[f"{name} x2"].append(processes.together(name))
            timing, update = workers.rollout(update=True)
            timings["ray x2"].append(timing)
            updates.append(update)
            print(f"round {number + 1}/{rounds}", flush=True)
    finally:
        workers.close()
        processes.close()
    return timings, updates


def goals(timings: Rounds) -> list[Goal]:
    """Returns what the speed of the rollout should reach, and whether it does."""
    speed = {name: [t.env_steps / t.seconds for t in several] for name, several in timings.items()}
    return [
        Goal("(b) / (a), per core", ratios(speed["env"], speed["stock"]), 20.0, floor=8.0),
        Goal("(c) / (d), 1 worker", ratios(speed["rollout"], speed["limit"]), 0.9),
        Goal("(c) / (d), 2 plain processes", ratios(speed["rollout x2"], speed["limit x2"]), 0.9),
        Goal("2 Ray workers / 2 plain processes", ratios(speed["ray x2"], speed["rollout x2"]), 0.95),
    ]


def parts_per_step(timings: Sequence[Timing]) -> dict[str, Spread]:
    """Returns milliseconds per env step by part."""
    return {part: Spread.of(1e3 * t.parts[part] / t.env_steps for t in timings) for part in timings[0].parts}


def report(timings: Rounds, updates: Sequence[dict[str, float]]) -> dict[str, object]:
    """Prints what was measured and returns it."""
    speed = {name: Spread.of(t.env_steps / t.seconds for t in several) for name, several in timings.items()}
    rows = [(LABELS[name], f"{s.median:.0f}", f"{s.low:.0f}-{s.high:.0f}") for name, s in speed.items()]
    print(table(("env steps/s", "median", "min-max"), rows), end="\n\n")
    parts = {name: parts_per_step(timings[name]) for name in ("rollout", "limit")}
    rows = [(f"{name}: {part}", f"{s:.3f}") for name, several in parts.items() for part, s in several.items()]
    print(table(("ms per env step, 1 worker", "median (min-max)"), rows), end="\n\n")
    update = {name: Spread.of(u[name] for u in updates) for name in updates[0]}
    rows = [(f"update, {name} reduction, 2 Ray workers", f"{s:.2f}") for name, s in update.items()]
    print(table(("seconds", "median (min-max)"), rows), end="\n\n")
    reached = goals(timings)
    print("\n".join(str(goal) for goal in reached))
    return {"env_steps_per_s": speed, "ms_per_env_step": parts, "update_s": update, "goals": reached}


def main(arguments: Sequence[str]) -> int:
    try:
        own, overrides = split_arguments(arguments, OWN)
        config = compose_train(overrides)
        use_one_thread_per_process()
        from bench_parts import bench_config

        folder = clone_of(config)
        config = bench_config(config, int(str(own["chunks"])))
        before = machine()
        timings, updates = measure(config, folder, int(str(own["rounds"])), int(str(own["stock_steps"])))
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    content = {"benchmark": "rollout", "arguments": list(arguments), "machine": before} | report(timings, updates)
    write_results(str(own["out"]), content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
