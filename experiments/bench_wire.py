"""What moving data between stages costs, beside bare Ray and beside a copy in memory.

python experiments/bench_wire.py [rounds=7] [parts=hops,batches,granularity] [out=docs/results/wire.json]

hops          a small message and a 10 MB nested observation travel between two stages: in one process, through the
              object store inside one worker, and between two workers; beside bare Ray (the same arrays without our
              codec, between two plain actors; and torch tensors as they are) and a copy of the bytes in memory
batches       a source and a sink stage under the executor: bytes per block, blocks and workers vary; beside bare Ray
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
from typing import cast

from bench_report import Spread, machine, ratios, split_arguments, table, use_one_thread_per_process, write_results

from rlinf_embodied.errors import ConfigError, RlinfError

OWN = {"rounds": 7, "parts": "hops,batches,granularity", "out": ""}
HOPS = 6  # per measurement
BATCHES = ((2, 1 << 10), (2, 64 << 10), (2, 1 << 20), (4, 1 << 10), (4, 64 << 10), (4, 1 << 20))  # workers, bytes/block
NUM_BLOCKS = 8
SLEEP_S = 0.02  # of each stage, per block


def small() -> dict[str, object]:
    """Returns a few scalars."""
    import torch

    return {"reward": torch.ones(4), "success": torch.zeros(4, dtype=torch.bool), "task": "PickCube-v1", "final": None}


def observation() -> dict[str, object]:
    """Returns 10 MB: pictures [200, 2, 91, 91, 3] uint8, states and texts, nested as a simulator gives them."""
    import torch

    generator = torch.Generator().manual_seed(0)
    cameras = {
        name: torch.randint(0, 255, (200, 91, 91, 3), dtype=torch.uint8, generator=generator)
        for name in ("base", "wrist")
    }
    state = {"qpos": torch.zeros(200, 9), "tcp": {"pose": torch.zeros(200, 7), "grasped": torch.zeros(200)}}
    return {"images": cameras, "state": state, "instruction": ("pick up the cube",) * 200, "depth": None}


def observation_as_numpy() -> dict[str, object]:
    """Returns the same as arrays, which are read where they lie in the store; tensors are copied once."""
    import torch

    from rlinf_embodied.runtime.tensor_wire import map_leaves

    given = map_leaves(observation(), lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf)
    return cast("dict[str, object]", given)


PAYLOADS = {"small": small, "observation": observation, "observation, numpy": observation_as_numpy}


# --------------------------------------------------------------------------------------------------------------- stages
class Echo:
    """Makes a payload by its name, and hands on what it gets."""

    def __init__(self, config: None) -> None:
        """Needs nothing."""

    def setup(self, context: object) -> None:
        """Needs nothing."""

    def step(self, tick: object, payloads: Mapping[int, object]) -> dict[int, object]:
        """Returns what came."""
        return {b: PAYLOADS[value]() if isinstance(value, str) else value for b, value in payloads.items()}


@dataclass(frozen=True, slots=True)
class Load:
    """What a fake stage does per block: bytes that it makes, seconds that it sleeps."""

    num_bytes: int = 0
    sleep_s: float = 0.0


class Work:
    """A fake stage: sleeps for each of its blocks and makes new bytes."""

    def __init__(self, load: Load) -> None:
        """Takes what to do."""
        self._load = load

    def setup(self, context: object) -> None:
        """Needs nothing."""

    def run(self, tick: object, inputs: Mapping[int, Sequence[object]]):
        """Returns new bytes for each block."""
        import torch

        from rlinf_embodied.runtime.host import Output

        time.sleep(self._load.sleep_s * len(inputs))
        return Output({b: torch.zeros(self._load.num_bytes, dtype=torch.uint8) for b in inputs}, len(inputs))


# ----------------------------------------------------------------------------------------------------------------- hops
def measure_hops(rounds: int) -> dict[str, object]:
    """Returns, for each payload and way, milliseconds per hop, bytes per second, and ratios."""
    from rlinf_embodied.execution.meter import context_of, payload_bytes
    from rlinf_embodied.flow.graph import StageSpec
    from rlinf_embodied.runtime.host import WorkerSpec
    from rlinf_embodied.runtime.ray_session import RaySession

    session, content, rows = RaySession(object_store_bytes=1 << 30), {}, []
    try:
        session.start([WorkerSpec(0, "cpu"), WorkerSpec(1, "cpu")])
        for worker in (0, 1):
            session.add_stage(StageSpec("echo", "bench_wire.Echo", None), [context_of(worker, "cpu")])
        plain = [_plain_actor() for _ in (0, 1)]
        for name, make in PAYLOADS.items():
            value, times = make(), {}
            ways = hop_ways(session, plain, name, value)
            for number in range(rounds + 1):
                for way, hop in ways.items():
                    seconds = hop()
                    if number:  # the first round warms up
                        times.setdefault(way, []).append(seconds)
            num_bytes = payload_bytes(value)
            content[name] = {"bytes": num_bytes}
            for way, seconds in times.items():
                beside_ray = ratios(seconds, times["bare Ray, numpy"])
                beside_copy = ratios(seconds, times["copy in memory"])
                spread, speed = Spread.of(1e3 * s for s in seconds), num_bytes / Spread.of(seconds).median
                content[name][way] = {"ms": spread, "bytes_per_s": speed, "x_ray": beside_ray, "x_copy": beside_copy}
                rate = f"{speed / 1e9:.2f}" if num_bytes > 1e6 and spread.median > 0.3 else "-"
                rows.append((f"{name}: {way}", f"{spread:.3f}", rate, f"{beside_ray:.2f}", f"{beside_copy:.1f}"))
    finally:
        session.close()
    print(table(("hop", "ms", "GB/s", "x bare Ray", "x copy"), rows))
    return content


def hop_ways(session, plain: Sequence, name: str, value: object) -> dict[str, Callable[[], float]]:
    """Returns what measures a hop of each kind, in seconds."""
    import numpy as np
    import torch

    from rlinf_embodied.runtime.tensor_wire import map_leaves, pack

    arrays = map_leaves(pack(value), lambda leaf: getattr(leaf, "array", leaf))
    copied = lambda leaf: deepcopy(leaf) if isinstance(leaf, (torch.Tensor, np.ndarray)) else leaf  # noqa: E731
    return {
        "copy in memory": lambda: _timed(lambda: map_leaves(value, copied)),
        "in process": lambda: _ours(session, name, (0, 0), keep=True),
        "object store, same worker": lambda: _ours(session, name, (0, 0)),
        "object store, two workers": lambda: _ours(session, name, (1, 0)),
        "bare Ray, numpy": lambda: _bare(plain, arrays),
        "bare Ray, torch": lambda: _bare(plain, value),
    }


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(HOPS):
        work()
    return (time.perf_counter() - start) / HOPS


def _ours(session, name: str, workers: tuple[int, int], keep: bool = False) -> float:
    """Returns seconds per hop of a payload that goes round among workers, as the executor would send it."""
    from rlinf_embodied.runtime.host import Call, Tick

    stays = frozenset({0}) if keep else frozenset()
    ((ref, done),) = session.submit([(workers[1], Call("echo", "step", Tick(0), (0,), 1, stays), [name])])
    session.fetch([done], "bench")
    start, receipts = time.perf_counter(), []
    for hop in range(HOPS):
        call = Call("echo", "step", Tick(0, chunk_step=hop + 1), (0,), 1, stays)
        ((ref, done),) = session.submit([(workers[hop % 2], call, [ref])])
        receipts.append(done)
    session.fetch(receipts, "bench")
    return (time.perf_counter() - start) / HOPS


def _plain_actor():
    import ray

    class Plain:
        def echo(self, value: object) -> tuple[object, int]:
            return value, 0

        def make(self, num_blocks: int, num_bytes: int) -> list[object]:
            import numpy as np

            return [np.zeros(num_bytes, dtype=np.uint8) for _ in range(num_blocks)]

        def take(self, *values: object) -> int:
            return len(values)

    return ray.remote(Plain).options(num_cpus=1).remote()


def _bare(actors: Sequence, value: object) -> float:
    """Returns seconds per hop between two plain Ray actors."""
    import ray

    ref, done = actors[0].echo.options(num_returns=2).remote(value)
    ray.get(done)
    start, receipts = time.perf_counter(), []
    for hop in range(HOPS):
        ref, done = actors[(hop + 1) % 2].echo.options(num_returns=2).remote(ref)
        receipts.append(done)
    ray.get(receipts)
    return (time.perf_counter() - start) / HOPS


# -------------------------------------------------------------------------------------------------------------- batches
def measure_batches(rounds: int) -> dict[str, object]:
    """Returns milliseconds of an iteration of source -> sink for each number of workers and block size."""
    from rlinf_embodied.runtime.ray_session import RaySession

    session, content, rows, times = RaySession(object_store_bytes=1 << 30), {}, [], {}
    try:
        executors = {case: _pair(session, Load(case[1]), Load(), case[0]) for case in BATCHES}
        plain = [_plain_actor() for _ in range(max(workers for workers, _ in BATCHES))]
        for number in range(rounds + 1):
            for case, build in executors.items():
                executor, seconds = build(), {}
                executor.run(_tick(0))
                seconds["ours"] = _timed(lambda executor=executor: executor.run(_tick(1)))
                seconds["bare"] = _timed(lambda case=case: _bare_pair(plain[: case[0]], case[1]))
                for way in seconds if number else ():
                    times.setdefault((case, way), []).append(seconds[way])
        for workers, num_bytes in BATCHES:
            ours, bare = (times[(workers, num_bytes), way] for way in ("ours", "bare"))
            spread, beside = Spread.of(1e3 * s for s in ours), ratios(ours, bare)
            extra = Spread.of(1e3 * (a - b) for a, b in zip(ours, bare, strict=True))
            key = f"{workers} workers, {NUM_BLOCKS} blocks of {num_bytes >> 10} KiB"
            content[key] = {"ms": spread, "bare_ms": Spread.of(1e3 * s for s in bare), "x_ray": beside}
            rows.append((key, f"{spread:.2f}", f"{1e3 * Spread.of(bare).median:.2f}", f"{beside:.2f}", f"{extra:.2f}"))
    finally:
        session.close()
    print(table(("iteration of source -> sink", "ms", "bare Ray ms", "x bare Ray", "extra ms"), rows))
    return content


def _tick(iteration: int):
    from rlinf_embodied.runtime.host import Tick

    return Tick(iteration)


def _pair(session, source: Load, sink: Load, num_workers: int, granularity: int = 0) -> Callable:
    """Returns what builds an executor of source -> sink, each on half of the workers."""
    from rlinf_embodied.cluster.hardware import Cluster
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.flow.graph import Edge, StageSpec, Workflow
    from rlinf_embodied.flow.plan import resolve

    stages = {
        "source": StageSpec("source", "bench_wire.Work", source),
        "sink": StageSpec("sink", "bench_wire.Work", sink),
    }
    edge = Edge("source", "sink", bytes_per_item=source.num_bytes, granularities=())
    workflow = Workflow("pair", NUM_BLOCKS, stages, (edge,))
    parts = [{"leaf": {"stage": "source", "devices": "0:1/2"}}, {"leaf": {"stage": "sink", "devices": "1/2:1"}}]
    tree = {"spatial": {"granularity": granularity, "parts": parts}}
    plan = resolve(f"granularity {granularity}", [{"tree": tree}], num_workers, workflow)
    cluster = Cluster("bench", "cpu", num_workers, num_workers, 0)
    return lambda: Executor(workflow, plan, session, cluster)


def _bare_pair(actors: Sequence, num_bytes: int) -> None:
    """Does the same with plain actors: every block is an object, every actor is called once."""
    import ray

    half = len(actors) // 2
    each = NUM_BLOCKS // half
    made = [actor.make.options(num_returns=each).remote(each, num_bytes) for actor in actors[:half]]
    ray.get([actor.take.remote(*refs) for actor, refs in zip(actors[half:], made, strict=True)])


# ---------------------------------------------------------------------------------------------------------- granularity
def measure_granularity(rounds: int) -> dict[str, object]:
    """Returns seconds of an iteration in single blocks and in one chunk, and of each change between the two."""
    from rlinf_embodied.runtime.ray_session import RaySession

    session, steady, changes = RaySession(object_store_bytes=256 << 20), {}, {}
    sizes = {"single blocks": 1, "all at once": 0}
    builds = {
        name: _pair(session, Load(1 << 16, SLEEP_S), Load(0, SLEEP_S), 2, granularity)
        for name, granularity in sizes.items()
    }
    try:
        for name in sizes:  # workers start, modules are imported
            builds[name]().run(_tick(0))
        for number in range(rounds):
            for name in sizes:
                start = time.perf_counter()
                executor = builds[name]()
                executor.run(_tick(10 * number))
                first = time.perf_counter() - start
                later = [_once(executor, 10 * number + k) for k in (1, 2, 3)]
                steady.setdefault(name, []).append(Spread.of(later).median)
                changes.setdefault(f"change to {name}", []).append(first - Spread.of(later).median)
    finally:
        session.close()
    rows = [(name, f"{Spread.of(1e3 * s for s in seconds):.1f}") for name, seconds in (steady | changes).items()]
    print(table(("source -> sink, 20 ms per block and stage", "ms"), rows))
    gain = ratios(steady["all at once"], steady["single blocks"])
    print(f"all at once / single blocks: {gain:.2f} (ideal {2 * NUM_BLOCKS / (NUM_BLOCKS + 1):.2f})")
    found = {name: Spread.of(1e3 * s for s in seconds) for name, seconds in (steady | changes).items()}
    return {"ms": found, "all_over_single": gain}


def _once(executor, iteration: int) -> float:
    start = time.perf_counter()
    executor.run(_tick(iteration))
    return time.perf_counter() - start


PARTS = {"hops": measure_hops, "batches": measure_batches, "granularity": measure_granularity}


def main(arguments: Sequence[str]) -> int:
    try:
        own, unknown = split_arguments(arguments, OWN)
        parts = [part for part in str(own["parts"]).split(",") if part]
        for name in (*unknown, *(part for part in parts if part not in PARTS)):
            raise ConfigError(f"{name!r} is unknown: the arguments are {', '.join(OWN)}, the parts {', '.join(PARTS)}")
        use_one_thread_per_process()
        content = {"benchmark": "wire", "arguments": list(arguments), "machine": machine()}
        for part in parts:
            content[part] = PARTS[part](int(str(own["rounds"])))
            print()
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_results(str(own["out"]), content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
