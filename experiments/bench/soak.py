"""Resets a batched simulator over and over, and watches its memory and its scenes.

python -m experiments.bench.soak [task=PickCube-v1] [num_envs=64] [resets=100000] [minutes=30] [out=FILE.json]

Rows are reset in random parts, between resets there are a few steps and pictures.  It stops after so many resets of a
row or so many minutes, whichever comes first, and fails if the resident memory grew by more than 2 % between the first
fifth of the run and the last, or if more scenes are alive than rows.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import sapien
import torch

from envs.batched import physics
from envs.maniskill import make_env
from experiments.bench.harness import Benchmark, Report, Run
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.randomness import uniform

SAMPLES = 200
GROWTH = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    task: str = "PickCube-v1"
    num_envs: int = 64
    resets: int = 100_000
    minutes: float = 30.0
    out: str = ""


class Scenes:
    """Counts the SAPIEN scenes of a batched simulator that are still alive."""

    def __init__(self) -> None:
        """Watches those that are made from now on."""
        self._seen: list[weakref.ref] = []
        recreated_scene = physics.recreated_scene

        def watched(old: sapien.Scene, rendering: bool) -> sapien.Scene:
            scene = recreated_scene(old, rendering)
            self._seen.append(weakref.ref(scene))
            return scene

        physics.recreated_scene = watched

    def alive(self) -> int:
        """Returns how many scenes of those made by recreation are alive."""
        gc.collect()
        self._seen = [reference for reference in self._seen if reference() is not None]
        return len(self._seen)


def soak(own: Options) -> list[dict[str, float]]:
    """Returns samples of (resets so far, seconds, resident_mb, scenes)."""
    scenes, process, num_envs = Scenes(), psutil.Process(), own.num_envs
    env = make_env(EnvConfig(task=own.task), num_envs)
    env.reset(range(num_envs))
    shape = (num_envs, env.spec.chunk, env.spec.action_dim)
    done, samples, start = num_envs, [], time.monotonic()
    every = max(1, own.resets // SAMPLES)
    while done < own.resets and time.monotonic() - start < 60 * own.minutes:
        draws = torch.from_numpy(uniform(0, "soak", done, shape=(num_envs,)))
        rows = (draws < draws[0]).nonzero()[:, 0].tolist() or [done % num_envs]  # from one row to all
        env.reset([done + k for k in range(len(rows))], rows)
        env.step_chunk(torch.from_numpy(uniform(1, "soak", done, shape=shape)).float() * 2 - 1)
        if done // every != (done + len(rows)) // every:
            resident_mb, alive = process.memory_info().rss / 1e6, scenes.alive()
            samples.append({"resets": done, "s": time.monotonic() - start, "resident_mb": resident_mb, "scenes": alive})
            if len(samples) % 20 == 0:
                print(json.dumps(samples[-1]), flush=True)
        done += len(rows)
    env.close()
    return samples


def verdict(samples: Sequence[dict[str, float]]) -> tuple[float, int]:
    """Returns the growth of memory from the first fifth to the last (0.01 is 1 %), and the most scenes alive."""
    fifth = max(1, len(samples) // 5)
    memory = [sample["resident_mb"] for sample in samples]
    growth = statistics.median(memory[-fifth:]) / statistics.median(memory[:fifth]) - 1
    return growth, int(max(sample["scenes"] for sample in samples))


def measure(run: Run[Options]) -> Report:
    """Soaks, and says whether anything grew."""
    samples, num_envs = soak(run.options), run.options.num_envs
    if not samples:
        raise ConfigError("the run ended before the first sample: use more resets= or minutes=")
    (growth, scenes), last = verdict(samples), samples[-1]
    return Report(
        content={"growth": growth, "scenes": scenes, "samples": samples},
        text=f"{last['resets']:.0f} resets of a row in {last['s']:.0f} s, {last['resident_mb']:.0f} MB resident\n"
        f"memory grew by {growth:.2%} from the first fifth to the last; at most {scenes} scenes for {num_envs} rows",
        exit_code=0 if growth <= GROWTH and scenes <= num_envs else 1,
    )


BENCHMARK = Benchmark("soak", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
