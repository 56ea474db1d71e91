"""Envs whose simulator runs in a separate virtual environment (docs/libero.md): N rows controlled by messages.

    simulator (this process)  --- questions: reset, step, images --->  process 0: rows 0 .. 3, one after the other
                              <-- state, images --------------------   process 1: rows 4 .. 7

A question goes to all processes before the first answer is awaited, so that they work at the same time.  If a process
dies or does not answer in time, an error with its name ends the run (envs/foreign/process.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.foreign.adapter import Adapter, Facts, ForeignOptions
from envs.foreign.process import Process, environment_of
from envs.foreign.wire import Link, Message
from envs.simulator import Measurement, RowTask, Simulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError, RlinfError, SimulatorError
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.plug_ins import load_target

_LOG = logging.getLogger(__name__)


_FLAGS = ("success", "fail", "terminated", "truncated")  # bool in `Scene.state`; the rest is float32


class ForeignSimulator(Simulator):
    """The rows; each reset may give a row another task of a suite."""

    def __init__(
        self,
        config: EnvConfig,
        adapter: Adapter,
        facts: Facts,
        shares: Sequence[range],
        links: Sequence[Link],
    ) -> None:
        """Takes the section env, the simulator, the facts that its processes reported, and the rows of each link."""
        self.num_rows = shares[-1].stop
        self._config, self._adapter, self._shares, self._links = config, adapter, shares, links
        self.action_dim, self.backend, self.categorical = facts.action_dim, facts.backend, facts.categorical
        self.has_success, self.history_free, self._films = facts.has_success, facts.history_free, facts.films
        self.state_vectors, self.control_hz = facts.vectors, facts.control_hz
        self._all_tasks = [RowTask(name, config.instruction or text) for name, text in facts.tasks]
        self._task_indices = adapter.chosen([name for name, _ in facts.tasks])
        self.tasks = [self._all_tasks[self._task_indices[0]]] * self.num_rows  # the current task of each row
        self._begun = set[int]()
        shapes = {"success": None, "reward": None, **facts.state}
        self._state = {
            name: np.zeros([self.num_rows, *([] if size is None else [size])], bool if name in _FLAGS else np.float32)
            for name, size in shapes.items()
        }
        self.image_sizes = dict.fromkeys(config.cameras, adapter.image_size(config.obs_size))
        if facts.scripted:
            self.expert = self._scripted_expert

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        starts = {
            row: self._adapter.start(int(seed), self._task_indices) for row, seed in zip(rows, seeds, strict=True)
        }
        for row, start in starts.items():
            self.tasks[row] = self._all_tasks[start.task]
        self._begun.update(rows)
        self._store(self._ask(list(starts), "reset", lambda part: {"starts": [astuple(starts[row]) for row in part]}))

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        chosen = actions.cpu().numpy()
        self._store(self._ask(rows, "step", lambda part: {"actions": chosen[part]}))

    def measure(self, actions: Tensor) -> Measurement:
        columns = {name: torch.from_numpy(value.copy()) for name, value in self._state.items() if name != "object"}
        return Measurement(**columns)

    def object_positions(self) -> Tensor | None:
        """Returns the position of the object that each row's task handles, float32 [N, 3], or None."""
        return torch.from_numpy(self._state["object"].copy()) if "object" in self._state else None

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Returns the cameras' images, each uint8 [len(rows), S, S, 3]."""
        images = self._request_images(rows)
        return {
            name: torch.stack([resized(row[k], size) for row in images])
            for k, (name, size) in enumerate(self.image_sizes.items())
        }

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Returns an upright image of each of these rows; logs once if nothing can be rendered, and returns {}."""
        if not self._films:
            return {}
        try:
            images = self._request_images(rows, size)
            return {row: resized(image, (size, size)) for row, image in zip(rows, images, strict=True)}
        except SimulatorError as error:
            self._films = False
            _LOG.warning("there will be no videos: %s", error)
            return {}

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _scripted_expert(self) -> Tensor:
        """Returns the scripted policy's next action, float32 [N, A]; zeros before a row's first reset."""
        actions = np.zeros((self.num_rows, self.action_dim), dtype=np.float32)
        for part, answer in self._ask(sorted(self._begun), "expert"):
            actions[part] = answer["actions"]
        return torch.from_numpy(actions)

    # ------------------------------------------------------------------------------------------------------- questions
    def _request_images(self, rows: Sequence[int], film: int = 0) -> list[np.ndarray]:
        images: dict[int, np.ndarray] = {}
        for part, answer in self._ask(rows, "images", lambda part: {"film": film}):
            images.update(zip(part, answer["images"], strict=True))
        return [images[row] for row in rows]

    def _ask(
        self, rows: Sequence[int], kind: str, more: Callable[[list[int]], Message] = lambda part: {}
    ) -> list[tuple[list[int], Message]]:
        """Asks every link that has some of these rows; returns its part of the rows and its answer.

        `more` returns the values of a question for a part of the rows.
        """
        parts = [[row for row in rows if row in share] for share in self._shares]
        requests = [(link, part) for link, part in zip(self._links, parts, strict=True) if part]
        for link, part in requests:
            link.ask({"kind": kind, "rows": part, **more(part)})
        answers, problems = [], []
        for link, part in requests:  # read them all: an unread answer would be mistaken for that of the next question
            try:
                answers.append((part, link.answer()))
            except RlinfError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]
        return answers

    def _store(self, answers: Sequence[tuple[list[int], Message]]) -> None:
        for part, answer in answers:
            for name in self._state.keys() & answer.keys():
                self._state[name][part] = answer[name]
            for row, task in zip(part, answer.get("tasks", ()), strict=False):
                self.tasks[row] = RowTask(task[0], self._config.instruction or task[1])


def resized(image: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Returns an image [H, W], [H, W, 1] or [H, W, 3] as uint8 [*size, 3]; each pixel is the mean of its area."""
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3)):
        raise SimulatorError(
            f"an image is {image.dtype} {list(image.shape)}, but policies see uint8 [height, width], or 1 or 3 "
            "channels behind these: wrap the env so that its images have one of these forms, and register that"
        )
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if tuple(pixels.shape[:2]) != size:
        scaled = torch.nn.functional.interpolate(pixels.permute(2, 0, 1)[None].float(), size, mode="area")
        pixels = scaled[0].permute(1, 2, 0).round().to(torch.uint8)
    return pixels.expand(*size, 3).contiguous()


WORKER = ("-P", "-m", "envs.foreign.worker")


def make_env(config: EnvConfig, num_envs: int, device: str = "cpu", render_final: bool = False) -> EpisodeEnv:
    """Returns `num_envs` rows of the simulator in env.options.adapter; arguments as envs.maniskill.make_env.

    Raises:
        ConfigError: an unknown option, or something that the simulator does not support.
        SimulatorError: its virtual environment is missing or broken.
    """
    simulator = start_processes(config, adapter_of(config), num_envs, device)
    return EpisodeEnv(config, simulator, lambda: simulator.tasks, render_final)


def read_options(config: EnvConfig) -> ForeignOptions:
    """Returns the checked options of a section."""
    return adapter_of(config).options


def adapter_of(config: EnvConfig) -> Adapter:
    """Returns the simulator in env.options.adapter."""
    name = config.options.get("adapter")
    if not name:
        raise ConfigError(
            "env.options.adapter is missing: give the import path of the simulator's Adapter, for example "
            "envs.libero.Libero"
        )
    cls: Any = load_target(str(name))
    adapter = cls(config.task, typed(config.options, cls.Options, "env.options"))
    adapter.check(config)
    return adapter


def start_processes(config: EnvConfig, adapter: Adapter, num_rows: int, device: str) -> ForeignSimulator:
    """Starts the processes and opens the simulator in each of them, or raises SimulatorError."""
    options, cls = adapter.options, type(adapter)
    cores = len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()) if device.startswith("cuda") else 1
    count = min(num_rows, options.processes or max(1, cores))
    shares = [range(low, high) for low, high in itertools.pairwise(num_rows * k // count for k in range(count + 1))]
    root = Path(str(sys.modules[cls.__module__].__file__)).resolve().parents[cls.__module__.count(".")]
    command, environment = (str(adapter.python()), *WORKER), environment_of(root)
    opening: Message = {
        "kind": "open",
        "adapter": f"{cls.__module__}.{cls.__qualname__}",
        "name": adapter.name,
        "task": adapter.task,
        "options": asdict(options),
        "cameras": list(config.cameras),
        "size": config.obs_size,
    }
    links: list[Process] = []
    try:
        for k, rows in enumerate(shares):
            name = f"{adapter.name} process {k} (rows {rows.start}-{rows.stop - 1})"
            links.append(Process(name, command, environment, options.timeout_s))
            links[-1].ask(opening)
        facts = [Facts.of(link.answer()) for link in links]
    except Exception:
        for link in links:
            link.close()
        raise
    return ForeignSimulator(config, adapter, facts[0], shares, links)
