"""Trains one configuration with several seeds, one after the other, and summarises them on one page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.page import page
from rlinf_embodied.reporting.sections import over_seeds
from rlinf_embodied.telemetry.run_reader import read_run

KEY = "run.seeds="


def run_seeds(words: Sequence[str]) -> int:
    """Runs this command for each seed of run.seeds in <run.dir>/seed_<N>; returns the first exit code that is not 0.

    Raises:
        ConfigError: the seeds cannot be read, or run.dir is missing.
    """
    text = [word.removeprefix(KEY) for word in words if word.startswith(KEY)][-1]
    seeds = seeds_of(text, "run.seeds")
    roots = [word.removeprefix("run.dir=") for word in words if word.startswith("run.dir=")]
    if not roots or any(word.startswith("run.seed=") for word in words):
        raise ConfigError(f"run.seeds is {text!r}, which needs run.dir and replaces run.seed: give run.dir")
    rest, root = [word for word in words if not word.startswith((KEY, "run.dir="))], Path(roots[-1])
    folders = [root / f"seed_{seed}" for seed in seeds]
    for seed, folder in zip(seeds, folders, strict=True):
        print(f"seed {seed}: {folder}", flush=True)
        code = subprocess.run([sys.executable, sys.argv[0], *rest, f"run.seed={seed}", f"run.dir={folder}"]).returncode
        if code or "run.dry=true" in rest:
            return code if code >= 0 else 128 - code
    runs = [read_run(folder) for folder in folders]
    for name in runs[0].rates:
        print(f"{name} after, interquartile mean of seeds {text}: {over_seeds(runs, name)}")
    (root / "report.html").write_text(page(runs, 12_000_000), encoding="utf-8")
    print(f"page     {root / 'report.html'}")
    return 0


def seeds_of(text: str, key: str) -> list[int]:
    """Returns the seeds in "0-4" or "0,3,7".

    Raises:
        ConfigError: they cannot be read, or one is listed twice; the message names `key`.
    """
    try:
        seeds: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{key} is {text!r}, but it lists different seeds: use 0-4, or 0,3,7")
    return seeds
