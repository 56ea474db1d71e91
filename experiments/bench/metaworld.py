"""What MetaWorld's env steps and images cost on one core, as this project draws them and as the benchmark does.

python -m experiments.bench.metaworld [task=reach-v3] [rounds=5] [steps=50] [out=docs/results/metaworld.json]

One row and one camera for each way, each in a process of its own, in turn.  Seconds are the process's own CPU time.
`python -m experiments.setup.foreign metaworld` comes first.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace

import torch

from envs.foreign.env import adapter_of, start_processes
from envs.metaworld.scene import Pictures
from experiments.bench.harness import Benchmark, Report, Run, Spread, Table, alternate
from experiments.bench.libero import Row
from rlinf_embodied.compose import compose_evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    task: str = "reach-v3"
    rounds: int = 5
    steps: int = 50  # env steps, images and resets of a measurement
    out: str = ""


def opened(task: str, pictures: Pictures) -> Row:
    """Returns a row of the task whose scene and renderer are built."""
    section = compose_evaluate(["env=metaworld", f"env.task={task}", "policy=random"]).env
    options = {**section.options, "pictures": pictures.value, "timeout_s": 3600}
    config = replace(section, num_envs=1, block_size=1, cameras=["corner"], options=options)
    row = Row(start_processes(config, adapter_of(config), 1, "cpu"))
    row.simulator.reset([0], [0])
    row.simulator.images([0])
    return row


def costs(row: Row, count: int) -> dict[str, float]:
    """Returns CPU milliseconds of one reset, env step and image, by name; of `count` each."""
    generator = torch.Generator().manual_seed(0)

    def resets() -> None:
        for seed in range(count):
            row.simulator.reset([0], [seed])

    def steps() -> None:
        for _ in range(count):
            row.simulator.step(torch.rand(1, 4, generator=generator) * 2 - 1, [0])

    def images() -> None:
        for _ in range(count):
            row.simulator.images([0])

    work = {"reset": resets, "env step": steps, "image": images}
    return {name: 1e3 * row.cost(what, count).cpu_s for name, what in work.items()}


def measure(run: Run[Options]) -> Report:
    """Lets both ways take turns."""
    own = run.options
    rows = {pictures.value: opened(own.task, pictures) for pictures in Pictures}
    try:
        arms = {name: lambda row=row: costs(row, own.steps) for name, row in rows.items()}
        found = alternate(arms, own.rounds, warm_up=1)
    finally:
        for row in rows.values():
            row.simulator.close()
    names = list(found[Pictures.light][0])
    spreads = {way: {name: Spread.of(one[name] for one in every) for name in names} for way, every in found.items()}
    table = Table(
        ("pictures", *(f"{name}, CPU ms" for name in names)),
        [(way, *(f"{spread:.2f}" for spread in by_name.values())) for way, by_name in spreads.items()],
    )
    content = {way: {name: asdict(spread) for name, spread in by_name.items()} for way, by_name in spreads.items()}
    return Report(content={"cpu_ms": content}, text=str(table), markdown=table.markdown())


BENCHMARK = Benchmark("metaworld", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
