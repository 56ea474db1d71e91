"""Resets a batched simulator over and over, and watches its memory and its scenes.

python experiments/soak_sim.py [task=PickCube-v1] [num_envs=64] [resets=100000] [minutes=30] [out=FILE.json]

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
from pathlib import Path
from typing import TYPE_CHECKING

from bench_report import machine, split_arguments, use_one_thread_per_process, write_results

from rlinf_embodied.errors import ConfigError, RlinfError

if TYPE_CHECKING:
    import sapien

OWN = {"task": "PickCube-v1", "num_envs": 64, "resets": 100_000, "minutes": 30, "out": ""}
SAMPLES = 200
GROWTH = 0.02


def resident_mb() -> float:
    """Returns this process's resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


class Scenes:
    """Counts the SAPIEN scenes of a batched simulator that are still alive."""

    def __init__(self) -> None:
        from envs.batched import physics

        self._seen: list[weakref.ref] = []
        renewed = physics.renewed

        def watched(old: sapien.Scene, rendering: bool) -> sapien.Scene:
            scene = renewed(old, rendering)
            self._seen.append(weakref.ref(scene))
            return scene

        physics.renewed = watched

    def alive(self) -> int:
        """Returns how many scenes of those made by renewal are alive."""
        gc.collect()
        self._seen = [reference for reference in self._seen if reference() is not None]
        return len(self._seen)


def soak(task: str, num_envs: int, resets: int, minutes: float) -> list[dict[str, float]]:
    """Returns samples of (resets so far, seconds, resident_mb, scenes)."""
    import torch

    from envs.maniskill import make_env
    from rlinf_embodied.config import EnvConfig
    from rlinf_embodied.randomness import uniform

    torch.set_num_threads(1)
    scenes = Scenes()
    config = EnvConfig(task=task)
    env = make_env(config, num_envs)
    env.reset(range(num_envs))
    shape = (num_envs, env.spec.chunk, env.spec.action_dim)
    done, samples, start = num_envs, [], time.monotonic()
    every = max(1, resets // SAMPLES)
    while done < resets and time.monotonic() - start < 60 * minutes:
        draws = torch.from_numpy(uniform(0, "soak", done, shape=(num_envs,)))
        rows = (draws < draws[0]).nonzero()[:, 0].tolist() or [done % num_envs]  # from one row to all
        env.reset([done + k for k in range(len(rows))], rows)
        env.step_chunk(torch.from_numpy(uniform(1, "soak", done, shape=shape)).float() * 2 - 1)
        if done // every != (done + len(rows)) // every:
            alive = scenes.alive()
            samples.append(
                {"resets": done, "s": time.monotonic() - start, "resident_mb": resident_mb(), "scenes": alive}
            )
            if len(samples) % 20 == 0:
                print(json.dumps(samples[-1]), flush=True)
        done += len(rows)
    env.close()
    return samples


def verdict(samples: Sequence[dict[str, float]], num_envs: int) -> tuple[float, int]:
    """Returns the growth of memory from the first fifth to the last (0.01 is 1 %), and the most scenes alive."""
    fifth = max(1, len(samples) // 5)
    memory = [sample["resident_mb"] for sample in samples]
    growth = statistics.median(memory[-fifth:]) / statistics.median(memory[:fifth]) - 1
    return growth, int(max(sample["scenes"] for sample in samples))


def main(arguments: Sequence[str]) -> int:
    try:
        own, unknown = split_arguments(arguments, OWN)
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no argument of this script: use {', '.join(OWN)}")
        use_one_thread_per_process()
        num_envs = int(str(own["num_envs"]))
        samples = soak(str(own["task"]), num_envs, int(str(own["resets"])), float(str(own["minutes"])))
        if not samples:
            raise ConfigError("the run ended before the first sample: use more resets= or minutes=")
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    growth, scenes = verdict(samples, num_envs)
    last = samples[-1]
    print(f"{last['resets']:.0f} resets of a row in {last['s']:.0f} s, {last['resident_mb']:.0f} MB resident")
    print(f"memory grew by {growth:.2%} from the first fifth to the last; at most {scenes} scenes for {num_envs} rows")
    content = {"arguments": list(arguments), "machine": machine(), "growth": growth, "scenes": scenes}
    write_results(str(own["out"]), {**content, "samples": samples})
    return 0 if growth <= GROWTH and scenes <= num_envs else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
