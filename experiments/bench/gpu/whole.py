"""Whole runs on devices: an iteration of PPO under each plan, predicted and measured, and the demo's command."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.bench.auto import run_case
from experiments.bench.recipe.__main__ import RECIPES
from rlinf_embodied.compose import compose_train
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.training.trainer import Trainer

PPO = (
    "env=maniskill_pick",
    "env.chunks_per_rollout=10",
    "warm_start.num_demos=24",
    "warm_start.epochs=2",
    "warm_start.head_epochs=4",
    "algorithm.critic_warmup_iterations=0",
)
DEMO = tuple(RECIPES["pick"])


def plans(words: Sequence[str]) -> dict[str, object]:
    """Returns seconds of an iteration, predicted from a profile of these devices and measured, by plan."""
    found, _ = run_case(words, 1, least_devices=1)
    return {
        name: {"predicted_s": plan.predicted_s, "measured_s": plan.measured_s.median, "error": plan.error}
        for name, plan in found.items()
    }


def demo(words: Sequence[str]) -> dict[str, object]:
    """Runs a training to its end and returns its exit code, its seconds and its summary."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        code = Trainer(EmbodiedJob(compose_train([*words, f"run.dir={folder}"]))).run()
        summary = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
        return {"exit_code": code, "seconds": time.perf_counter() - start, "summary": summary}
