"""Destinations of metrics other than metrics.jsonl: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from rlinf_embodied.config import RunConfig
from rlinf_embodied.config.checks import require


class TensorBoard:
    """Event files in <run folder>/tensorboard, opened at the first step, from which on earlier ones are hidden."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # heavy: not before there is something to write

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """A run of Weights & Biases, whose environment variables (WANDB_PROJECT, WANDB_NAME, WANDB_RUN_ID ...) apply."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        """Starts the run, or continues that of WANDB_RUN_ID; `config` is what it shows as the configuration."""
        name = os.environ.get("WANDB_NAME", folder.name)
        project = os.environ.get("WANDB_PROJECT", "rlinf_embodied")
        library = importlib.import_module("wandb")
        self._run = library.init(project=project, name=name, dir=str(folder), config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


Board = TensorBoard | Wandb  # what displays the metrics of a run; a step is a global step, values are finite


def require_boards(run: RunConfig) -> None:
    """Checks that what a run logs to is installed."""
    found = not run.wandb or importlib.util.find_spec("wandb") is not None
    action = "pip install 'rlinf-embodied[wandb]', or use run.wandb=false"
    require(found, "run.wandb", run.wandb, "wandb is not installed", action)


def start_boards(folder: Path, run: RunConfig, config: Mapping[str, object]) -> list[Board]:
    """Returns the boards that a run asks for; `config` is what they show as its configuration."""
    boards: list[Board] = [TensorBoard(folder)] if run.tensorboard else []
    return [*boards, Wandb(folder, config)] if run.wandb else boards
