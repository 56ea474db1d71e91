"""The configuration: one typed dataclass per section, checked when built; imports neither torch, ray nor hydra.

    env.py        the section `env`
    learning.py   the sections `policy`, `algorithm`, `warm_start`
    machine.py    the sections `plan`, `cluster`
    run.py        the sections `run`, `eval`, `checkpoint`
    commands.py   what each command reads, section by section; the checks that span several
    checks.py     the form of every check

Every default lives here; the files under configs/ only say what differs.  A check names the path, the value, the rule
and what to do next.  Sections are handed to the component they belong to; nobody gets the whole but the entry points.
"""

from rlinf_embodied.config.commands import EmulationConfig, EvaluateConfig, PlanningConfig, TrainConfig
from rlinf_embodied.config.env import Backend, EnvConfig, Reward
from rlinf_embodied.config.learning import (
    AlgorithmConfig,
    AlgorithmName,
    Critic,
    Level,
    PolicyConfig,
    Reduction,
    WarmStartConfig,
)
from rlinf_embodied.config.machine import ClusterConfig, PlanConfig, TransportMode
from rlinf_embodied.config.run import CheckpointConfig, EvalConfig, RunConfig

__all__ = [
    "AlgorithmConfig",
    "AlgorithmName",
    "Backend",
    "CheckpointConfig",
    "ClusterConfig",
    "Critic",
    "EmulationConfig",
    "EnvConfig",
    "EvalConfig",
    "EvaluateConfig",
    "Level",
    "PlanConfig",
    "PlanningConfig",
    "PolicyConfig",
    "Reduction",
    "Reward",
    "RunConfig",
    "TrainConfig",
    "TransportMode",
    "WarmStartConfig",
]
