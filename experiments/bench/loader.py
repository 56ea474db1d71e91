"""Our loader of LeRobot datasets and lerobot's own on the same files: frames per second of processor time, and memory.

python -m experiments.bench.loader data=<folder>,... [rounds=5] [frames=640] [size=32] [out=docs/results/loader.json]

A frame is read with all its images (float32 in [0, 1]), its state and a chunk of 10 actions, in random order.  Both
arms have one process and one thread; ours decodes ahead in a background thread, which counts.  Processor time does not
contain other work on the machine.  Our cache has the size of two batches, so that next to nothing is kept.  lerobot is
that of `python -m experiments.setup.foreign env=lerobot`.

Memory is that of this process while it reads each dataset again and again; its cache holds a tenth of the images.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch

from envs.foreign.adapter import installed_python
from experiments.bench.harness import Benchmark, Run, Spread, Timing, alternate, names_of, ratios, table
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.frame_cache import FrameCache
from rlinf_embodied.data.recorded import ACTION, RecordedDataset
from rlinf_embodied.embodied.sources import open_dataset
from rlinf_embodied.randomness import permutation

CHUNK = 10
AHEAD = 2  # batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    data: str = ""  # folders of LeRobot v3
    rounds: int = 5
    frames: int = 640  # of each arm in a round
    size: int = 32  # of a batch
    epochs: int = 20  # in which memory is watched
    out: str = ""


def batches(dataset: RecordedDataset, size: int, cache: FrameCache) -> Iterator[dict[str, torch.Tensor]]:
    """Yields batches without end, as algorithms/imitation.py reads them."""
    every = range(0, len(dataset) - size + 1, size)
    orders = (permutation(0, "loader", epoch, size=len(dataset)) for epoch in itertools.count())
    pieces, waiting = (order[k : k + size] for order in orders for k in every), []
    for rows in pieces:
        for camera in dataset.cameras:
            cache.request(dataset, camera, rows)
        waiting.append(rows)
        if len(waiting) > AHEAD:
            yield _batch(dataset, waiting.pop(0), cache)


def _batch(dataset: RecordedDataset, rows: np.ndarray, cache: FrameCache) -> dict[str, torch.Tensor]:
    steps, is_pad = dataset.window(rows, range(CHUNK))
    found = {"action": torch.from_numpy(dataset.columns[ACTION][steps]), "is_pad": torch.from_numpy(is_pad)}
    found["state"] = torch.from_numpy(dataset.state[rows])
    for camera in dataset.cameras:
        found[camera] = torch.from_numpy(cache.get(dataset, camera, rows)).permute(0, 3, 1, 2).float() / 255
    return found


@dataclass(slots=True)
class Ours:
    """Our arm; what its background thread decodes while the other arm reads counts in its next turn."""

    stream: Iterator[dict[str, torch.Tensor]]
    counted: float = 0.0  # processor seconds of this process

    def __call__(self, frames: int) -> Timing:
        """Returns the processor seconds of so many frames; the first call counts what was before it, too."""
        done = 0
        while done < frames:
            done += len(next(self.stream)["action"])
        before, self.counted = self.counted, time.process_time()
        return Timing(self.counted - before, done)


def theirs(peer: subprocess.Popen[str], folder: str, frames: int) -> Timing:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(f"{Path(folder).absolute()} {frames}\n")
    peer.stdin.flush()
    _, seconds, done = next(line for line in peer.stdout if line.startswith("answer")).split()
    return Timing(float(seconds), int(done))


def bytes_of(dataset: RecordedDataset) -> float:
    return len(dataset) * 3.0 * sum(np.prod(dataset.image_size(camera)) for camera in dataset.cameras)


def memory(dataset: RecordedDataset, size: int, epochs: int) -> list[float]:
    """Returns the resident MB of this process after each epoch."""
    stream, process = batches(dataset, size, FrameCache(bytes_of(dataset) / 10)), psutil.Process()
    found = []
    for _ in range(epochs):
        for _ in range(len(dataset) // size):
            next(stream)
        found.append(process.memory_info().rss / 1e6)
    return found


def measure(run: Run[Options]) -> None:
    own, rows, content = run.options, [], {}
    require(bool(own.data), "data", own.data, "it names folders of LeRobot v3", "use data=runs/pick")
    program = Path(__file__).with_name("lerobot_loader.py")
    command = [str(installed_python("lerobot", "lerobot")), str(program), str(own.size), str(CHUNK)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as peer:
        for folder in names_of(own.data):
            dataset = open_dataset(Path(folder), "data")
            stream = batches(dataset, own.size, FrameCache(2 * own.size * bytes_of(dataset) / len(dataset)))
            arms = {"ours": partial(Ours(stream), own.frames), "lerobot": partial(theirs, peer, folder, own.frames)}
            timings = alternate(arms, own.rounds, warm_up=1)
            rates = {arm: [timing.rate for timing in several] for arm, several in timings.items()}
            print(f"{folder}: ours, lerobot:", *(f"{Spread.of(rates[arm]):.0f} frames/s" for arm in arms), flush=True)
            used, kind = memory(dataset, own.size, own.epochs), dataset.features[next(iter(dataset.cameras.values()))]
            content[Path(folder).name] = {
                "frames": len(dataset),
                "frames_per_s": {arm: Spread.of(values) for arm, values in rates.items()},
                "ratio": ratios(rates["ours"], rates["lerobot"]),
                "decoded_mb": bytes_of(dataset) / 1e6,
                "resident_mb": used,
            }
            size = " + ".join("x".join(map(str, dataset.image_size(camera))) for camera in dataset.cameras)
            shown = [f"{Spread.of(rates[arm]):.0f}" for arm in arms]
            watched = f"{used[1]:.0f}, {used[len(used) // 2]:.0f}, {used[-1]:.0f}"
            name = f"{Path(folder).name}: {len(dataset)} frames, {kind['dtype']}, {size}"
            shown += [f"{content[Path(folder).name]['ratio']:.2f}", f"{bytes_of(dataset) / 1e6:.0f}"]
            rows.append((name, *shown, watched))
        assert peer.stdin is not None
        peer.stdin.close()
    header = (
        "dataset",
        "ours, frames/s of a core",
        "lerobot",
        "ratio",
        "decoded, MB",
        "resident MB: epoch 2, middle, last",
    )
    print(table(header, rows))
    run.write({"datasets": content})


BENCHMARK = Benchmark("loader", Options, measure)

if __name__ == "__main__":
    BENCHMARK.main()
