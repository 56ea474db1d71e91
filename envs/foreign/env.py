"""Envs whose simulator runs in its own virtual environment (docs/libero.md): N rows that are controlled by messages.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.batched.checks import short
from envs.episodes import EpisodeEnv
from envs.foreign.adapter import Adapter, Facts, ForeignOptions
from envs.foreign.process import Local, Process, environment_of
from envs.foreign.wire import Message
from envs.simulator import Measurement, RowTask, Simulator
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError, RlinfError, SimulatorError
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.plug_ins import load_target

_LOG = logging.getLogger(__name__)


class ForeignSimulator(Simulator):
    """The rows; each reset may give a row another task of a suite."""

    def __init__(
        self,
        config: EnvConfig,
        adapter: Adapter,
        facts: Facts,
        shares: Sequence[range],
        links: Sequence[Local | Process],
    ) -> None:
        """Takes the section env, the simulator, what its processes reported, and the rows of each link."""
        self.num_rows = shares[-1].stop
        self._config, self._adapter, self._shares, self._links = config, adapter, shares, links
        self.action_dim, self.backend, self.categorical = facts.action_dim, facts.backend, facts.categorical
        self.has_success, self.history_free = facts.has_success, facts.history_free
        self._known = [RowTask(name, config.instruction or text) for name, text in facts.tasks]
        only = adapter.only()
        self._numbers = range(len(self._known)) if only is None else [only]
        self.tasks = [self._known[self._numbers[0]]] * self.num_rows  # of each row, now
        self._films, self._begun = facts.films, set[int]()
        zeros = lambda dtype, *shape: np.zeros((self.num_rows, *shape), dtype=dtype)  # noqa: E731
        self._state = {"success": zeros(bool), "reward": zeros(np.float32)}
        self._state["proprio"] = zeros(np.float32, facts.proprio_dim)
        if facts.privileged_dim:
            self._state["privileged"] = zeros(np.float32, facts.privileged_dim)
        if facts.has_object:
            self._state["object"] = zeros(np.float32, 3)
        if facts.ends:
            self._state |= {"terminated": zeros(bool), "truncated": zeros(bool)}

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        starts = {row: self._adapter.start(int(seed), self._numbers) for row, seed in zip(rows, seeds, strict=True)}
        for row, start in starts.items():
            self.tasks[row] = self._known[start.task]
        self._begun.update(rows)
        self._take(self._ask("reset", list(starts), lambda mine: {"starts": [astuple(starts[row]) for row in mine]}))

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        chosen = actions.cpu().numpy()
        self._take(self._ask("step", list(rows), arrays=lambda mine: {"actions": chosen[mine]}))

    def measure(self, actions: Tensor) -> Measurement:
        """Returns the state of all rows, or raises SimulatorError if an observation or reward is not finite."""
        for name, value in (("observation", self._state["proprio"]), ("reward", self._state["reward"])):
            if not np.isfinite(value).all():
                rows = np.flatnonzero(~np.isfinite(value.reshape(self.num_rows, -1)).all(1)).tolist()
                raise SimulatorError(
                    f"env.task is {self._config.task!r}, whose {name} is NaN or infinite in rows {short(rows)}: a "
                    "policy would learn NaN from it; let the env end such an episode, and return finite numbers"
                )
        return Measurement(
            **{name: torch.from_numpy(value.copy()) for name, value in self._state.items() if name != "object"}
        )

    def object_positions(self) -> Tensor | None:
        """Returns the position of the object that each row's task handles, float32 [N, 3], or None."""
        return torch.from_numpy(self._state["object"].copy()) if "object" in self._state else None

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Returns what the cameras see, each uint8 [len(rows), S, S, 3]."""
        seen, size = self._shown(rows, {}), self._config.obs_size
        return {
            name: torch.stack([resized(row[k], size) for row in seen]) for k, name in enumerate(self._config.cameras)
        }

    def film(self, rows: Sequence[int], size: int) -> dict[int, Tensor]:
        """Returns an upright image of each of these rows; logs once if nothing can be rendered, and returns {}."""
        if not self._films:
            return {}
        try:
            return {
                row: resized(image, size) for row, image in zip(rows, self._shown(rows, {"film": size}), strict=True)
            }
        except SimulatorError as error:
            self._films = False
            _LOG.warning("there will be no videos: %s", error)
            return {}

    def scripted_expert(self) -> Tensor:
        """Returns the scripted policy's next action, float32 [N, A]; zeros before a row's first reset."""
        actions = np.zeros((self.num_rows, self.action_dim), dtype=np.float32)
        for mine, answer in self._ask("expert", sorted(self._begun)):
            actions[mine] = answer.arrays["actions"]
        return torch.from_numpy(actions).clamp(-1.0, 1.0)

    @property
    def pids(self) -> list[int]:
        return [link.pid for link in self._links if isinstance(link, Process)]

    def close(self) -> None:
        for link in self._links:
            link.close()

    # ------------------------------------------------------------------------------------------------------- questions
    def _shown(self, rows: Sequence[int], values: Mapping[str, object]) -> list[np.ndarray]:
        images: dict[int, np.ndarray] = {}
        for mine, answer in self._ask("images", list(rows), lambda _: values):
            images.update(zip(mine, answer.arrays["images"], strict=True))
        return [images[row] for row in rows]

    def _ask(
        self,
        kind: str,
        rows: list[int],
        values: Callable[[list[int]], Mapping[str, object]] = lambda _: {},
        arrays: Callable[[list[int]], Mapping[str, np.ndarray]] = lambda _: {},
    ) -> list[tuple[list[int], Message]]:
        """Asks all links that have some of these rows; returns their rows and answers."""
        one = len(self._links) == 1
        shares = [rows] if one else [[row for row in rows if row in own] for own in self._shares]
        asked = [(link, mine) for link, mine in zip(self._links, shares, strict=True) if mine]
        for link, mine in asked:
            link.ask(Message(kind, {"rows": mine, **values(mine)}, arrays(mine)))
        answers, problems = [], []
        for link, mine in asked:  # read all of them: an answer left unread would be taken for the next
            try:
                answers.append((mine, link.answer()))
            except RlinfError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]
        return answers

    def _take(self, answers: Sequence[tuple[list[int], Message]]) -> None:
        for mine, answer in answers:
            index = slice(None) if mine == list(range(self.num_rows)) else mine
            for name, values in answer.arrays.items():
                self._state[name][index] = values


def shares_of(num_rows: int, count: int) -> list[range]:
    """Returns consecutive rows for at most `count` links."""
    count = min(num_rows, count)
    return [range(low, high) for low, high in itertools.pairwise(num_rows * k // count for k in range(count + 1))]


def default_processes(device: str) -> int:
    """Returns the number of processes of a worker: one core on a CPU; on a GPU, that GPU's share of the cores."""
    if not device.startswith("cuda"):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))


def resized(image: np.ndarray, size: int) -> Tensor:
    """Returns an image [H, W], [H, W, 1] or [H, W, 3] as uint8 [size, size, 3]; each pixel is the mean of its area."""
    pixels = torch.from_numpy(np.array(image))
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise SimulatorError(
            f"an image has shape {list(image.shape)}, but policies see [height, width], or 1 or 3 channels behind "
            "these: wrap the env so that its images have one of these shapes, and register that"
        )
    if tuple(pixels.shape[:2]) != (size, size):
        scaled = torch.nn.functional.interpolate(pixels.permute(2, 0, 1)[None].float(), (size, size), mode="area")
        pixels = scaled[0].permute(1, 2, 0).round().to(torch.uint8)
    return pixels.to(torch.uint8).expand(size, size, 3).contiguous()


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
    options = adapter.options
    shares = shares_of(num_rows, options.processes or default_processes(device))
    cls = type(adapter)
    environment = environment_of(_root_of(cls.__module__))
    command = (str(adapter.python()), *WORKER)
    links: list[Process] = []
    try:
        for k, rows in enumerate(shares):
            name = f"{adapter.title()} process {k} (rows {rows.start}-{rows.stop - 1})"
            links.append(Process(name, command, environment, options.timeout_s))
            links[-1].ask(
                Message(
                    "open",
                    {
                        "adapter": f"{cls.__module__}.{cls.__qualname__}",
                        "name": adapter.name,
                        "packages": list(adapter.packages),
                        "task": adapter.task,
                        "options": asdict(options),
                        "cameras": list(config.cameras),
                        "size": config.obs_size,
                    },
                )
            )
        values: list[Any] = [link.answer().values for link in links]
    except Exception:
        for link in links:
            link.close()
        raise
    simulator = ForeignSimulator(config, adapter, Facts(**values[0]), shares, links)
    if cls.scripted:
        simulator.expert = simulator.scripted_expert
    return simulator


def _root_of(module: str) -> Path:
    """Returns the folder from which a module is imported."""
    file = sys.modules[module].__file__
    assert file is not None
    return Path(file).resolve().parents[module.count(".")]
