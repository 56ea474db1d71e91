"""Small iterations for half an hour, with a fault every 20 s: does anything grow?

python -m experiments.bench.soak [workflow=embodied] [minutes=30] [every_s=20] [seed=7] [run_dir=runs/soak]
                                 [out=docs/results/soak.json] [overrides of the training]

Faults are those of experiments/chaos.py.  Every five seconds the benchmark records the memory, file descriptors and
threads of the driver and of its workers, the objects that Ray keeps for the driver, and the size of /dev/shm.
Printed and drawn: the medians of the second sixth of the time, and of the last.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from ray._private.worker import global_worker

from experiments.bench.harness import Benchmark, Report, Run, Table
from rlinf_embodied.command_line import pin
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.tools.chaos import Chaos, Fault, configure, disturbed, schedule
from rlinf_embodied.tools.chaos import Options as ChaosOptions

_SAMPLE_S = 5.0
_MANY = 100_000  # iterations and faults: more than there is time for
_MEASURES = {
    "driver_mb": "driver, resident MB",
    "driver_fds": "driver, file descriptors",
    "driver_threads": "driver, threads",
    "workers": "worker processes",
    "worker_mb": "the largest worker, resident MB",
    "worker_fds": "the most file descriptors of a worker",
    "worker_threads": "the most threads of a worker",
    "ray_mb": "Ray's own processes, resident MB",
    "references": "objects that Ray keeps for the driver",
    "shm_mb": "/dev/shm, MB",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    workflow: str = "embodied"
    minutes: float = 30.0
    every_s: float = 20.0
    seed: int = 7
    run_dir: str = "runs/soak"
    out: str = ""


@dataclass(slots=True)
class Steady(Chaos):
    """Faults that come one after the other, and not too soon after each other."""

    every_s: float = 20.0
    began: float = field(default_factory=time.time)

    def due(self, phase: str, attempt: int) -> Fault | None:
        """Returns the next fault if its time has come, whatever phase it was meant for."""
        last = self.come[-1].at if self.come else self.began
        if time.time() - last < self.every_s or attempt == self.attempt:
            return None
        return Chaos.due(self, phase, attempt)


def sample(started: float) -> dict[str, float]:
    """Returns what the driver and the processes below it hold at this moment."""
    own, workers, others = psutil.Process(), [], 0
    for child in own.children(recursive=True):
        try:
            facts = (child.memory_info().rss, child.num_fds(), child.num_threads())
            if child.name().startswith("ray::_Worker"):
                workers.append(facts)
            else:
                others += facts[0]
        except psutil.Error:
            continue
    shm = os.statvfs("/dev/shm")
    core = getattr(global_worker, "core_worker", None)
    largest = [max((facts[k] for facts in workers), default=0) for k in range(3)]
    return {
        "s": time.time() - started,
        "driver_mb": own.memory_info().rss / 1e6,
        "driver_fds": own.num_fds(),
        "driver_threads": own.num_threads(),
        "workers": len(workers),
        "worker_mb": largest[0] / 1e6,
        "worker_fds": largest[1],
        "worker_threads": largest[2],
        "ray_mb": others / 1e6,
        "references": len(core.get_all_reference_counts()) if core is not None else 0,
        "shm_mb": (shm.f_blocks - shm.f_bfree) * shm.f_frsize / 1e6,
    }


def watch(samples: list[dict[str, float]], seconds: float) -> None:
    """Samples until the time is over, and then asks the training to end."""
    started = time.time()
    while time.time() - started < seconds:
        time.sleep(_SAMPLE_S)
        samples.append(sample(started))
    os.kill(os.getpid(), signal.SIGTERM)  # shells let programs in the background ignore Ctrl-C


def compared(samples: Sequence[Mapping[str, float]], seconds: float) -> dict[str, tuple[float, float]]:
    """Returns the median of each measure in the second sixth of the time, and in the last one."""
    sixth = seconds / 6
    early = [one for one in samples if sixth <= one["s"] < 2 * sixth]
    late = [one for one in samples if one["s"] >= 5 * sixth]
    return {
        name: (statistics.median(one[name] for one in early), statistics.median(one[name] for one in late))
        for name in _MEASURES
    }


def draw(samples: Sequence[Mapping[str, float]], faults: Sequence[float], path: Path) -> None:
    """Draws each measure over the minutes, and a line for each fault."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 11), layout="constrained")
    for panel, (name, title) in zip(figure.subplots(5, 2, sharex=True).flat, _MEASURES.items(), strict=True):
        for at in faults:
            panel.axvline(at / 60, color="0.9", linewidth=0.6)
        panel.plot([one["s"] / 60 for one in samples], [one[name] for one in samples], linewidth=1)
        panel.set_title(title, fontsize=9)
        panel.set_ylim(bottom=0)
    figure.supxlabel("minutes")
    figure.savefig(path, dpi=110)


def measure(run: Run[Options]) -> Report:
    """Trains under faults and watches."""
    own = run.options
    folder = Path(own.run_dir)
    if folder.exists():
        raise ConfigError(f"run_dir is {own.run_dir!r}, which is there already: use another one, or remove it")
    overrides = [
        *run.overrides,
        f"run.num_iterations={_MANY}",
        "recovery.max_restarts=100000",
        "eval.every=20",
        "checkpoint.every=20",
    ]
    config = configure(ChaosOptions(workflow=own.workflow), overrides, folder)
    pin(config, overrides)
    seconds, samples = 60 * own.minutes, list[dict[str, float]]()
    faults = schedule(_MANY, own.seed, ("warm start", "set-up"))
    chaos, started = Steady(faults, every_s=own.every_s), time.time()
    threading.Thread(target=watch, args=(samples, seconds), daemon=True).start()
    code = disturbed(config, chaos)
    found = compared(samples, seconds)
    rows = [(title, *(f"{value:.0f}" for value in found[name])) for name, title in _MEASURES.items()]
    table = Table(("", "early", "late"), rows)
    iterations = len((folder / "metrics.jsonl").read_text().splitlines())
    said = f"{len(chaos.come)} faults and {iterations} iterations in {own.minutes:g} minutes; exit code {code}"
    when = [fault.at - started for fault in chaos.come]
    content = {"faults": [asdict(fault) for fault in chaos.come], "iterations": iterations, "samples": samples}
    return Report(
        content=content | {"compared": found, "training_exit_code": code},
        text=f"{table}\n{said}",
        markdown=f"{table.markdown()}\n\n{said}",
        draw=lambda path: draw(samples, when, path),
        exit_code=0 if code == 143 else 1,
    )


BENCHMARK = Benchmark("soak", Options, measure, takes_overrides=True)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
