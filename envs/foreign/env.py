"""Envs whose simulator runs in its own virtual environment: env=libero, env=metaworld (docs/libero.md)."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envs.episodes import EpisodeEnv
from envs.foreign.adapter import Adapter, Facts, ForeignOptions
from envs.foreign.process import Process, environment_of
from envs.foreign.simulator import ForeignSimulator, default_processes, shares_of
from envs.foreign.wire import Message
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.plug_ins import load_target

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
