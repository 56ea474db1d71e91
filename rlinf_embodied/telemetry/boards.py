"""Destinations of metrics other than metrics.jsonl: TensorBoard, Weights & Biases and trackio, behind one protocol."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rlinf_embodied.config import RunConfig, TrackioConfig, WandbConfig
from rlinf_embodied.errors import ConfigError

_TRACKIO_NAME = "trackio_run.txt"  # in the run folder: what its run is called there


class Board(Protocol):
    """What displays the metrics of a run; a step is a global step, values are finite."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Takes the metrics of an iteration."""

    def close(self) -> None:
        """Writes what is left."""


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


class _Tracked:
    """A run of a library with W&B's interface."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Wandb(_Tracked):
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in <run folder>/wandb, for `wandb sync`."""

    def __init__(self, folder: Path, names: WandbConfig, config: Mapping[str, object]) -> None:
        """Starts or continues the run."""
        settings = {"project": names.project, "name": names.name or folder.name, "id": names.id, "resume": names.resume}
        super().__init__(_library("wandb").init(**settings, dir=str(folder), config=dict(config)))


class Trackio(_Tracked):
    """A run of trackio, in its local database (TRACKIO_DIR moves it); `trackio show` serves it.

    trackio knows runs by their names, which have to be new: its name stays in the run folder, so that a run
    that resumes continues its curves and no other run gets mixed with them.
    """

    def __init__(self, folder: Path, names: TrackioConfig, config: Mapping[str, object]) -> None:
        """Starts or continues the run."""
        library, given = _library("trackio"), folder / _TRACKIO_NAME
        resumes = given.exists()
        name = given.read_text(encoding="utf-8") if resumes else names.name or folder.name
        resume = "allow" if resumes else "never"
        run = library.init(project=names.project, name=name, resume=resume, config=dict(config), embed=False)
        given.write_text(run.name, encoding="utf-8")
        super().__init__(run)


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"run.{name} is true, but {name} is not installed: pip install 'rlinf-embodied[{name}]', or use "
            f"run.{name}=false"
        ) from error


def require_boards(run: RunConfig) -> None:
    """Checks that what a run logs to is installed."""
    for name, is_asked in (("wandb", run.wandb), ("trackio", run.trackio)):
        if is_asked:
            _library(name)


def start_boards(
    folder: Path, run: RunConfig, wandb: WandbConfig, trackio: TrackioConfig, config: Mapping[str, object]
) -> list[Board]:
    """Returns the boards that a run asks for.

    Args:
        folder: of the run.
        run: says which ones.
        wandb: names there.
        trackio: names there.
        config: what they show as the run's configuration.

    Raises:
        ConfigError: one is asked for and not installed.
    """
    require_boards(run)  # all of them, before the first is started
    boards: list[Board] = [TensorBoard(folder)] if run.tensorboard else []
    boards += [Wandb(folder, wandb, config)] if run.wandb else []
    return boards + ([Trackio(folder, trackio, config)] if run.trackio else [])
