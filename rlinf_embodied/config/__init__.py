"""The configuration: one typed dataclass per section, checked when built; imports neither torch, ray nor omegaconf.

    env.py        the section `env`
    learning.py   the sections `policy` and `warm_start`
    algorithm.py  the common part of the section `algorithm`; each algorithm has a dataclass in algorithms/
    hierarchy.py  the section `hierarchy` of training in simulators
    language.py   the sections `data`, `policy` of the reasoning workflow
    reasoning.py  the sections `generation`, `reward`, `algorithm`, `warm_start`, `eval`, `samples` of that workflow
    machine.py    the sections `plan`, `cluster`, `recovery`
    run.py        the sections `run`, `eval`, `checkpoint`
    commands.py   the config of each command, and the checks that span several sections
    checks.py     the functions that all checks use

All defaults are here; the files under configs/ contain only what differs from them.  Errors name the path, the value,
the rule and the next action.  A component receives its own section; only the entry points receive the whole config.
"""

from rlinf_embodied.config.algorithm import (
    LOSSES,
    AlgorithmConfig,
    Level,
    PolicyLoss,
    RatioLevel,
    Reduction,
    Sharding,
    Source,
)
from rlinf_embodied.config.commands import (
    FREE_ON_RESUME,
    KEPT_ON_RESUME,
    EmulationConfig,
    EvaluateAnswersConfig,
    EvaluateConfig,
    ExportConfig,
    MathConfig,
    MemoryConfig,
    PlanningConfig,
    ProfiledConfig,
    RemoteConfig,
    ServeConfig,
    ServeEnvConfig,
    TrainConfig,
)
from rlinf_embodied.config.env import EnvConfig, EnvOptions, PerturbConfig, PrefixSchedule, Reward
from rlinf_embodied.config.hierarchy import HierarchyConfig
from rlinf_embodied.config.language import DataConfig, LanguagePolicyConfig, LoraSettings, Precision
from rlinf_embodied.config.learning import Critic, ImageAugmentation, NormMode, PolicyConfig, WarmStartConfig
from rlinf_embodied.config.machine import MAX_STALENESS, ClusterConfig, PlanConfig, RecoveryConfig
from rlinf_embodied.config.reasoning import (
    AgentConfig,
    EpisodesConfig,
    EvalSetConfig,
    LanguageAlgorithmConfig,
    LanguageSFTConfig,
    LossLevel,
    ReasoningAlgorithmConfig,
    ReasoningName,
    RewardConfig,
    ToolConfig,
)
from rlinf_embodied.config.run import EvalConfig, Exactness, RunConfig
