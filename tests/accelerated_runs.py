"""Small runs on the simulated accelerator (simulated_accelerator.py), and what its memory holds between them."""

from __future__ import annotations

from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.warm_start import starting_policy
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.session import SerialSession, Session

MODULE = "simulated_accelerator"
ROOM = 4 << 30


def overrides(devices: int = 1) -> list[str]:
    """Returns what a command line says to run on so many devices."""
    return ["cluster.torch_device=sim", f"cluster.device_module={MODULE}", f"cluster.num_devices={devices}"]


def accelerators(devices: int) -> Cluster:
    """Returns so many of them as a cluster."""
    return Cluster("test", "sim", devices, devices, ROOM, device_module=MODULE)


def clone_on_sim(config: TrainConfig, devices: int = 1, session: Session | None = None) -> Path:
    """Returns the folder of the clone that `config` starts from, made on the accelerators now or found in the cache."""
    return starting_policy(config, session or SerialSession(), accelerators(devices), lambda *progress: None)


def executor_on_sim(
    config: TrainConfig, plan: list[dict], devices: int, folder: Path, session: Session | None = None
) -> Executor:
    """Returns the training workflow of `config` under a plan, started from a policy folder."""
    workflow = training_workflow(config, str(folder))
    return Executor(
        workflow, resolve("test", plan, devices, workflow), session or SerialSession(), accelerators(devices)
    )
