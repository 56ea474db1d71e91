"""What moving data between stages costs, beside plain Ray and beside a copy in memory.

python -m experiments.bench.wire [rounds=7] [parts=hops,batches,granularity] [out=docs/results/wire.json]

hops          a small message and a 10 MB nested observation travel between two stages: in one process, through the
              object store inside one worker, and between two workers; beside plain Ray (the same arrays without our
              codec, between two plain actors; and torch tensors as they are) and a copy of the bytes in memory
batches       a source and a sink stage under the executor: bytes per block, blocks and workers vary; beside plain Ray
granularity   two stages that sleep stream in single blocks, then all blocks at once, then single blocks again: what an
              iteration takes under each, and what the change itself costs

Everything alternates within a round; ratios are taken round by round.  Takes about two minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import ray
import torch

from experiments.bench.harness import Benchmark, Report, Run, Spread, Table, alternate, chosen, ratios, seconds_of
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.meter import context_of, payload_bytes
from rlinf_embodied.flow.graph import Edge, StageSpec, Workflow
from rlinf_embodied.flow.plan import resolve
from rlinf_embodied.runtime.host import Call, Output, StepContext, WorkerSpec
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.runtime.tensor_wire import map_leaves, pack

HERE = "experiments.bench.wire"  # where workers find the stages
HOPS = 6  # per measurement
BATCHES = ((2, 1 << 10), (2, 64 << 10), (2, 1 << 20), (4, 1 << 10), (4, 64 << 10), (4, 1 << 20))  # workers, bytes/block
NUM_BLOCKS = 8
SLEEP_S = 0.02  # of each stage, per block


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    rounds: int = 7
    parts: str = "hops,batches,granularity"
    out: str = ""


def small() -> dict[str, object]:
    """Returns a few scalars."""
    return {"reward": torch.ones(4), "success": torch.zeros(4, dtype=torch.bool), "task": "PickCube-v1", "final": None}


def observation() -> dict[str, object]:
    """Returns 10 MB: pictures [200, 2, 91, 91, 3] uint8, states and texts, nested as a simulator gives them."""
    generator = torch.Generator().manual_seed(0)
    picture = partial(torch.randint, 0, 255, (200, 91, 91, 3), dtype=torch.uint8, generator=generator)
    state = {"qpos": torch.zeros(200, 9), "tcp": {"pose": torch.zeros(200, 7), "grasped": torch.zeros(200)}}
    cameras = {name: picture() for name in ("base", "wrist")}
    return {"images": cameras, "state": state, "instruction": ("pick up the cube",) * 200, "depth": None}


def observation_as_numpy() -> dict[str, object]:
    """Returns the same as arrays, which are read where they lie in the store; tensors are copied once."""
    given = map_leaves(observation(), lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf)
    return cast("dict[str, object]", given)


PAYLOADS = {"small": small, "observation": observation, "observation, numpy": observation_as_numpy}


# --------------------------------------------------------------------------------------------------------------- stages
@dataclass(frozen=True, slots=True)
class Load:
    """What a fake stage does per block: bytes that it makes, seconds that it sleeps."""

    num_bytes: int = 0
    sleep_s: float = 0.0


class Work:
    """A fake stage."""

    def __init__(self, load: Load | None) -> None:
        """Takes what to do."""
        self._load = load or Load()

    def setup(self, context: object) -> None:
        """Needs nothing."""

    def step(self, step_context: object, payloads: Mapping[int, object]) -> dict[int, object]:
        """Hands on what it gets, and makes a payload where it gets its name."""
        return {b: PAYLOADS[value]() if isinstance(value, str) else value for b, value in payloads.items()}

    def run(self, step_context: object, inputs: Mapping[int, Sequence[object]]) -> Output:
        """Sleeps for each of its blocks and makes new bytes."""
        time.sleep(self._load.sleep_s * len(inputs))
        return Output({b: torch.zeros(self._load.num_bytes, dtype=torch.uint8) for b in inputs}, len(inputs))


class Plain:
    """A Ray actor without anything of ours."""

    def echo(self, value: object) -> tuple[object, int]:
        """Hands on what it gets."""
        return value, 0

    def make(self, num_blocks: int, num_bytes: int) -> list[object]:
        """Returns new arrays."""
        return [np.zeros(num_bytes, dtype=np.uint8) for _ in range(num_blocks)]

    def take(self, *values: object) -> int:
        """Counts what it gets."""
        return len(values)


def plain_actors(number: int) -> list:
    """Starts plain Ray actors."""
    return [ray.remote(Plain).options(num_cpus=1).remote() for _ in range(number)]


# ----------------------------------------------------------------------------------------------------------------- hops
def measure_hops(rounds: int) -> dict[str, object]:
    """Returns, for each payload and way, milliseconds per hop, bytes per second, and ratios."""
    session, content, rows = RaySession(object_store_bytes=1 << 30), {}, []
    try:
        session.start([WorkerSpec(0, "cpu"), WorkerSpec(1, "cpu")])
        for worker in (0, 1):
            session.add_stage(StageSpec("echo", f"{HERE}.Work", None), [context_of(worker, "cpu")])
        plain = plain_actors(2)
        for name, make in PAYLOADS.items():
            value = make()
            times = alternate(hop_ways(session, plain, name, value), rounds, warm_up=1, quiet=True)
            num_bytes = payload_bytes(value)
            content[name] = {"bytes": num_bytes}
            for way, seconds in times.items():
                beside_ray = ratios(seconds, times["bare Ray, numpy"])
                beside_copy = ratios(seconds, times["copy in memory"])
                spread, speed = _ms(seconds), num_bytes / Spread.of(seconds).median
                content[name][way] = {"ms": spread, "bytes_per_s": speed, "x_ray": beside_ray, "x_copy": beside_copy}
                rate = f"{speed / 1e9:.2f}" if num_bytes > 1e6 and spread.median > 0.3 else "-"
                rows.append((f"{name}: {way}", f"{spread:.3f}", rate, f"{beside_ray:.2f}", f"{beside_copy:.1f}"))
    finally:
        session.close()
    print(Table(("hop", "ms", "GB/s", "x bare Ray", "x copy"), rows), end="\n\n")
    return content


def hop_ways(session: Session, plain: Sequence, name: str, value: object) -> dict[str, Callable[[], float]]:
    """Returns what measures a hop of each kind, in seconds."""
    arrays = map_leaves(pack(value), lambda leaf: getattr(leaf, "array", leaf))
    copied = lambda leaf: deepcopy(leaf) if isinstance(leaf, (torch.Tensor, np.ndarray)) else leaf  # noqa: E731
    return {
        "copy in memory": lambda: seconds_of(lambda: map_leaves(value, copied), HOPS),
        "in process": lambda: _ours(session, name, (0, 0), keep=True),
        "object store, same worker": lambda: _ours(session, name, (0, 0)),
        "object store, two workers": lambda: _ours(session, name, (1, 0)),
        "bare Ray, numpy": lambda: _bare(plain, arrays),
        "bare Ray, torch": lambda: _bare(plain, value),
    }


def _ours(session: Session, name: str, workers: tuple[int, int], keep: bool = False) -> float:
    """Returns seconds per hop of a payload that goes round among workers, as the executor would send it."""
    stays = frozenset({0}) if keep else frozenset()
    ((ref, done),) = session.submit([(workers[1], Call("echo", "step", StepContext(0), (0,), 1, stays), [name])])
    session.fetch([done], "bench")
    start, receipts = time.perf_counter(), []
    for hop in range(HOPS):
        call = Call("echo", "step", StepContext(0, chunk_step=hop + 1), (0,), 1, stays)
        ((ref, done),) = session.submit([(workers[hop % 2], call, [ref])])
        receipts.append(done)
    session.fetch(receipts, "bench")
    return (time.perf_counter() - start) / HOPS


def _bare(actors: Sequence, value: object) -> float:
    """Returns seconds per hop between two plain Ray actors."""
    ref, done = actors[0].echo.options(num_returns=2).remote(value)
    ray.get(done)
    start, receipts = time.perf_counter(), []
    for hop in range(HOPS):
        ref, done = actors[(hop + 1) % 2].echo.options(num_returns=2).remote(ref)
        receipts.append(done)
    ray.get(receipts)
    return (time.perf_counter() - start) / HOPS


def _ms(seconds: Sequence[float]) -> Spread:
    return Spread.of(1e3 * s for s in seconds)


# -------------------------------------------------------------------------------------------------------------- batches
def measure_batches(rounds: int) -> dict[str, object]:
    """Returns milliseconds of an iteration of source -> sink for each number of workers and block size."""
    session, content, rows = RaySession(object_store_bytes=1 << 30), {}, []
    try:
        plain = plain_actors(max(workers for workers, _ in BATCHES))

        def both(workers: int, num_bytes: int, build: Callable[[], Executor]) -> tuple[float, float]:
            executor = build()
            executor.run(StepContext(0))
            ours = seconds_of(lambda: executor.run(StepContext(1)), HOPS)
            return ours, seconds_of(lambda: _bare_pair(plain[:workers], num_bytes), HOPS)

        builds = {case: pair(session, Load(case[1]), Load(), case[0]) for case in BATCHES}
        arms = {_name(*case): partial(both, *case, build) for case, build in builds.items()}
        for key, seconds in alternate(arms, rounds, warm_up=1, quiet=True).items():
            ours, bare = zip(*seconds, strict=True)
            spread, beside, extra = _ms(ours), ratios(ours, bare), _ms([a - b for a, b in seconds])
            content[key] = {"ms": spread, "bare_ms": _ms(bare), "x_ray": beside}
            rows.append((key, f"{spread:.2f}", f"{_ms(bare).median:.2f}", f"{beside:.2f}", f"{extra:.2f}"))
    finally:
        session.close()
    print(Table(("iteration of source -> sink", "ms", "bare Ray ms", "x bare Ray", "extra ms"), rows), end="\n\n")
    return content


def _name(workers: int, num_bytes: int) -> str:
    return f"{workers} workers, {NUM_BLOCKS} blocks of {num_bytes >> 10} KiB"


def pair(session: Session, source: Load, sink: Load, num_workers: int, granularity: int = 0) -> Callable[[], Executor]:
    """Returns what builds an executor of source -> sink, each on half of the workers."""
    stages = {name: StageSpec(name, f"{HERE}.Work", load) for name, load in (("source", source), ("sink", sink))}
    edge = Edge("source", "sink", bytes_per_item=source.num_bytes, granularities=())
    workflow = Workflow("pair", NUM_BLOCKS, stages, (edge,))
    parts = [{"leaf": {"stage": "source", "devices": "0:1/2"}}, {"leaf": {"stage": "sink", "devices": "1/2:1"}}]
    tree = {"spatial": {"granularity": granularity, "parts": parts}}
    plan = resolve(f"granularity {granularity}", [{"tree": tree}], num_workers, workflow)
    return lambda: Executor(workflow, plan, session, Cluster("bench", "cpu", num_workers, num_workers, 0))


def _bare_pair(actors: Sequence, num_bytes: int) -> None:
    """Does the same with plain actors: every block is an object, every actor is called once."""
    half = len(actors) // 2
    each = NUM_BLOCKS // half
    made = [actor.make.options(num_returns=each).remote(each, num_bytes) for actor in actors[:half]]
    ray.get([actor.take.remote(*refs) for actor, refs in zip(actors[half:], made, strict=True)])


# ---------------------------------------------------------------------------------------------------------- granularity
def measure_granularity(rounds: int) -> dict[str, object]:
    """Returns seconds of an iteration in single blocks and in one chunk, and of each change between the two."""
    session = RaySession(object_store_bytes=256 << 20)
    sizes = {"single blocks": 1, "all at once": 0}
    builds = {name: pair(session, Load(1 << 16, SLEEP_S), Load(0, SLEEP_S), 2, size) for name, size in sizes.items()}
    found: dict[str, list[float]] = {name: [] for name in (*sizes, *(f"change to {name}" for name in sizes))}
    try:
        for build in builds.values():  # workers start, modules are imported
            build().run(StepContext(0))
        for number in range(rounds):  # always to the other size: a change is what is measured
            for name, build in builds.items():
                start = time.perf_counter()
                executor = build()
                executor.run(StepContext(10 * number))
                first = time.perf_counter() - start
                later = Spread.of(
                    seconds_of(partial(executor.run, StepContext(10 * number + k))) for k in (1, 2, 3)
                ).median
                found[name].append(later)
                found[f"change to {name}"].append(first - later)
    finally:
        session.close()
    rows = [(name, f"{_ms(seconds):.1f}") for name, seconds in found.items()]
    print(Table(("source -> sink, 20 ms per block and stage", "ms"), rows))
    gain = ratios(found["all at once"], found["single blocks"])
    print(f"all at once / single blocks: {gain:.2f} (ideal {2 * NUM_BLOCKS / (NUM_BLOCKS + 1):.2f})", end="\n\n")
    return {"ms": {name: _ms(seconds) for name, seconds in found.items()}, "all_over_single": gain}


PARTS = {"hops": measure_hops, "batches": measure_batches, "granularity": measure_granularity}


def measure(run: Run[Options]) -> Report:
    """Measures the parts that were asked for."""
    parts = chosen(run.options.parts, PARTS, "parts")
    return Report(content={name: part(run.options.rounds) for name, part in parts.items()})


BENCHMARK = Benchmark("wire", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
