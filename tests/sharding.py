"""A learner's work that tests do in one process and in several: a net with layers, tied weights, and uneven blocks.

`python -m sharding <rank> <size> <folder>` is one of the processes: it does all of folder/jobs.pt, one after the other.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_embodied.learning.gradients import LossSums, Pass, Passes
from rlinf_embodied.learning.groups import Group, SoloGroup
from rlinf_embodied.learning.learner import AdamSettings, Learner, Step
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.sharded import ShardedLearner
from rlinf_embodied.runtime.process_group import TorchGroup

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS = (7, 3, 0, 1)  # of each block: workers make unequal numbers of passes
PER_PASS = 2
STATISTICS = ("loss", "rows")


class Net(nn.Module):
    """Reads tokens, says one number per token; embedding and head are one matrix, and a part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.frozen(self.head(hidden))

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


def net(seed: int = 0) -> Net:
    """Returns a net, a function of the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def passes_of(model: Net, scale: float = 1.0) -> Passes:
    """Returns passes over rows of `ROWS`, two rows each; row r weighs 1 + r % 2, and those of row 4 do not train."""
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 5, (rows, 4), generator=draw) for rows in ROWS]
    targets = [torch.randn(rows, 4, 5, generator=draw) for rows in ROWS]

    def passes(rows: Mapping[int, Tensor]) -> list[Pass]:
        return [one(block, part) for block, index in rows.items() for part in index.split(PER_PASS) if len(part)]

    def one(block: int, index: Tensor) -> Pass:
        weights = 1.0 + index % 2

        def run() -> LossSums:
            errors = (model(tokens[block][index]) - targets[block][index]).square().mean((1, 2))
            loss = scale * (weights * errors).sum()
            return LossSums(loss, weights.sum(), torch.stack([loss.detach(), torch.tensor(float(len(index)))]))

        return Pass(float(weights.sum()), run, trains=4 not in index.tolist())

    return passes


@dataclass(kw_only=True)
class Job:
    """What a process does; a step is given as its learning rate."""

    owners: tuple[int, ...]
    steps: tuple[float, ...] = (0.1, 0.05, 0.02)
    early_stop: tuple[int, ...] = ()  # steps that stop the update
    max_grad_norm: float = 1.3  # the first steps are clipped, the last ones are not
    scale: float = 1.0  # of the loss; inf: no gradient is finite
    restart: int | None = None  # the step before which everything is built anew from a checkpoint
    start: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # "weights" and "moments" to start from


def replicated(model: Net, job: Job) -> Learner:
    """Returns the learner that nothing is sharded by, alone."""
    settings = AdamSettings(0.0, (0.9, 0.99), job.max_grad_norm)
    reducer = Reducer(SoloGroup(), [0] * len(job.owners))
    return Learner(model.trained(), settings, STATISTICS, reducer)


def take_steps(learner: Learner, model: Net, job: Job, rank: int, steps: range) -> list[Step]:
    """Takes steps of a job with the blocks that a rank owns."""
    passes, found = passes_of(model, job.scale), []
    rows = {block: torch.arange(ROWS[block]) for block, owner in enumerate(job.owners) if owner == rank}
    for number in steps:
        learner.start()
        learner.lr = job.steps[number]
        found.append(learner.step(rows, passes, lambda step, n=number: n in job.early_stop))
        learner.publish()
    return found


def alone(job: Job) -> tuple[dict[str, Tensor], list[Step], dict[str, Tensor]]:
    """Returns weights, what each step said, and the optimizer's state, from one process that shards nothing."""
    model = net()
    model.load_state_dict(job.start.get("weights", model.state_dict()))
    learner = replicated(model, job)
    if "moments" in job.start:
        learner.import_state(job.start["moments"])
    found = take_steps(learner, model, Job(**(vars(job) | {"owners": (0,) * 4})), 0, range(len(job.steps)))
    return model.state_dict(), found, learner.export_state()


class Worker:
    """One worker's view and learner."""

    def __init__(self, job: Job, rank: int, group: Group) -> None:
        self.job, self.rank = job, rank
        self.view = net()
        self.view.load_state_dict(job.start.get("weights", self.view.state_dict()))
        self.model = copy.deepcopy(self.view)
        self.learner = ShardedLearner(
            *(self.model, self.model.trained, self.view),
            *(AdamSettings(0.0, (0.9, 0.99), job.max_grad_norm), STATISTICS),
            zero_loss=lambda: self.model(torch.zeros(1, 1, dtype=torch.long)).sum() * 0.0,
            group=group,
            device="cpu",
        )
        if "moments" in job.start:
            self.learner.import_state(job.start["moments"])


def main(rank: int, size: int, folder: Path) -> None:
    """Does all jobs and writes what came of them to folder/<rank>.pt."""
    torch.set_num_threads(1)
    jobs: dict[str, Job] = torch.load(folder / "jobs.pt", weights_only=False)
    torch.save({name: _do(name, job, rank, size, folder) for name, job in jobs.items()}, folder / f"{rank}.pt")


def _do(name: str, job: Job, rank: int, size: int, folder: Path) -> dict:
    places = (f"file://{folder}/{name}-{part}" for part in ("first", "second"))
    first, second = (TorchGroup(rank, size, place) for place in places)
    worker = Worker(job, rank, first)
    middle = len(job.steps) if job.restart is None else job.restart
    found = take_steps(worker.learner, worker.model, job, rank, range(middle))
    if job.restart is not None:
        checkpoint = folder / f"{name}-checkpoint.pt"
        state = {"moments": worker.learner.export_state(), "weights": worker.view.state_dict()}
        if rank == 0:
            torch.save(state, checkpoint)
        first.all_reduce(torch.zeros(1))  # it is written
        job.start = torch.load(checkpoint)
        worker = Worker(job, rank, second)
        found += take_steps(worker.learner, worker.model, job, rank, range(middle, len(job.steps)))
    slices = {name: parameter.to_local() for name, parameter in worker.model.named_parameters()}
    moments, part = worker.learner.export_state(), worker.learner.export_part()
    return {"weights": worker.view.state_dict(), "found": found, "moments": moments, "slices": slices, "part": part}


def together(jobs: dict[str, Job], size: int, folder: Path, timeout_s: float = 120) -> list[dict[str, dict]]:
    """Does jobs in `size` processes and returns what came of each, by rank."""
    torch.save(jobs, folder / "jobs.pt")
    command = [sys.executable, "-m", "sharding"]
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    processes = [
        subprocess.Popen([*command, str(r), str(size), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for r in range(size)
    ]
    try:
        said = [process.communicate(timeout=timeout_s)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(size)]


if __name__ == "__main__":
    from sharding import main as run  # the module of that name: what is pickled must be found there again

    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
