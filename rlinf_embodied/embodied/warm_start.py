"""The policy that RL starts from, made once and cached; docs/warm_start.md describes the ways to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.imitation import SFTConfig
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EnvConfig, HierarchyConfig, PerturbConfig, PolicyConfig, Source, TrainConfig
from rlinf_embodied.config.checks import require, within
from rlinf_embodied.config.learning import FineTuningPhases
from rlinf_embodied.embodied.demonstrations import ROWS, for_demonstrations
from rlinf_embodied.embodied.env_stage import make_env, require_success
from rlinf_embodied.embodied.fine_tuning import demonstrate, fine_tuning_stage, fine_tuning_workflow
from rlinf_embodied.embodied.hierarchy import choice_spec
from rlinf_embodied.embodied.policy_folder import is_published, load_policy, new_policy, save_policy
from rlinf_embodied.embodied.rollout_stage import require_acting
from rlinf_embodied.embodied.sources import DemonstrationSource, sources_of, statistics_of
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.envs import OBSERVATION_VERSION, EnvSpec, VectorEnv
from rlinf_embodied.interfaces.policies import ImitationPolicy, Policy
from rlinf_embodied.plug_ins import env_options, source_digest, targets_of
from rlinf_embodied.randomness import reset_seed, uniform
from rlinf_embodied.runtime.host import StageContext, StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.training import warm_start as common
from rlinf_embodied.workflow.graph import StageSpec, Workflow

_VERSION = 7  # of what a cached checkpoint depends on in addition to its key
_STAGE = "new policy"
_PLACES = ("cache_dir", "checkpoint", "demonstrations")  # where files lie; what is in them counts
_OF_LOADING = ("cache_gb", "decoders")  # of the section warm_start: memory and speed
_OF_TRAINING = (  # of the env's section: scale, reward and speed
    *("num_envs", "block_size", "chunks_per_rollout", "auto_reset", "carry_over"),
    *("hold_steps", "reward", "success_bonus", "bonus_at_timeout", "control_hz", "rows_per_call", "perturb", "rtc"),
)
_OF_SAMPLING = ("temperature", "noise_repeat")  # of the policy's section
_MIN_STD = 0.1  # random actions see little of what training will see: an object that they never lift, for example


def starting_policy(config: TrainConfig, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
    """Returns the checkpoint that a training starts from: the given one, a behaviour-cloned policy, or a new one.

    A published folder is made one of this project first, which says what it acts in.  env.perturb is RL's alone.

    Raises:
        ConfigError: the cache cannot be written.
    """
    config = replace(config, env=replace(config.env, perturb=PerturbConfig()))
    given = config.warm_start.checkpoint
    published = given is not None and is_published(given, config.policy)
    if given is not None and not published:
        return Path(given)
    cloned = not (config.warm_start.from_scratch or published)
    if cloned and config.algorithm.learns_from is not Source.demonstrations:
        make = lambda folder: _make_cloned(folder, config, session, cluster, progress)  # noqa: E731
        return common.made_once(clone_folder(config, cluster.kind), make)
    needs = config.algorithm.needs_success
    settings = {"measures": not cloned, "needs_success": needs, "sources": _measured(config, published)}
    new = NewPolicyConfig(config.env, config.policy, config.run.seed, given, **settings)
    return _new(new, config.warm_start.cache_dir, session, cluster)


def starting_high_level(config: TrainConfig, session: Session, cluster: Cluster) -> Path:
    """Returns the folder of a new high-level policy; arguments as `starting_policy`."""
    new = NewPolicyConfig(config.env, config.hierarchy.policy, config.run.seed, hierarchy=config.hierarchy)
    return _new(new, config.warm_start.cache_dir, session, cluster)


def _measured(config: TrainConfig, published: bool = False) -> tuple[DemonstrationSource, ...]:
    """Returns the files by whose statistics a new policy normalises, if it does; a published one takes its data's."""
    learns = published and bool(config.files) and config.algorithm.learns_from is Source.demonstrations
    policy = config.policy
    asked = policy.normalise_actions is not None or policy.normalise_state is not None
    return sources_of(config) if learns or asked else ()


def _new(config: NewPolicyConfig, cache_dir: str, session: Session, cluster: Cluster) -> Path:
    """Returns the folder of a policy that has learned nothing here."""
    key: dict[str, object] = {"seed": config.seed, "measures": config.measures}
    if config.published is not None:  # its bytes are many: names, sizes and times stand for them
        files = [(path.name, path.stat()) for path in sorted(Path(config.published).iterdir()) if path.is_file()]
        key["published"] = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    if config.hierarchy is not None:
        key["choices"] = [getattr(config.hierarchy, name) for name in ("instructions", "columns", "way_columns")]
    if config.sources:
        key["sources"] = [(source.kind, source.digest) for source in config.sources]
    cached = _cache_folder(cache_dir, config.env, config.policy, cluster.kind, key)
    return common.made_once(cached, lambda folder: _make_new(folder, config, session, cluster))


def _make_new(folder: Path, config: NewPolicyConfig, session: Session, cluster: Cluster) -> None:
    workflow = Workflow(_STAGE, 1, {_STAGE: StageSpec(_STAGE, f"{__name__}.NewPolicyStage", config)})
    common.make_policy(workflow, session, cluster, 0, lambda *_: None, folder)


@dataclass(frozen=True, slots=True)
class NewPolicyConfig:
    """What the stage needs to know."""

    env: EnvConfig
    policy: PolicyConfig
    seed: int
    published: str | None = None  # a folder that others wrote, with the weights
    measures: bool = True  # whether inputs are standardised with what random actions see; demonstrations may say better
    hierarchy: HierarchyConfig | None = None  # of a high-level policy: its actions are choices
    needs_success: bool = False  # of the algorithm that will train it
    sources: tuple[DemonstrationSource, ...] = ()  # files by whose statistics it normalises


class NewPolicyStage:
    """Makes a policy and saves it."""

    def __init__(self, config: NewPolicyConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        self._device = context.device

    def save_policy(self, step_context: StepContext, folder: str) -> None:
        config = self._config
        try:
            env = make_env(for_demonstrations(config.env), ROWS if config.measures else 1, self._device)
        except SimulatorError as error:  # of a simulator that cannot be built, not of one that fails during a call
            raise ConfigError(str(error)) from error
        try:
            require_success(env.spec, config.needs_success)
            policy = self._policy(replace(env.spec, chunk=config.env.chunk))
            require_acting(policy, config.policy, config.env, trained=True)
            if config.sources:
                self._normalise(policy)
            if config.measures and isinstance(policy, ImitationPolicy):
                for name, column in self._seen(env, policy).items():
                    mean, std = column.double().mean(0), column.double().std(0, correction=0)
                    policy.set_statistics(name, mean.float(), std.float().clamp(min=_MIN_STD))
            save_policy(policy, Path(folder), config.env, config.policy, self._device)
        finally:
            env.close()

    def _normalise(self, policy: Policy) -> None:
        settings, relative = self._config.policy, policy.relative_actions if isinstance(policy, ImitationPolicy) else ()
        statistics = statistics_of(self._config.sources, relative, policy.spec.chunk)
        if isinstance(policy, ImitationPolicy) and statistics:
            policy.normalise_by(statistics)
        for name in ("normalise_actions", "normalise_state"):
            mode, holds = getattr(settings, name), bool(getattr(policy, "normalisation", None))
            rule = f"policy.name={settings.name} does not normalise, or nothing but the expert demonstrates"
            action = "leave it out, or clone policy=tiny_vla or flow_vla from files"
            require(mode is None or holds, f"policy.{name}", getattr(mode, "name", None), rule, action)

    def _policy(self, env: EnvSpec) -> Policy:
        config = self._config
        if config.hierarchy is not None:
            with within("hierarchy"):
                return new_policy(config.policy, choice_spec(env, config.hierarchy), config.seed, self._device)
        if config.published is None:
            return new_policy(config.policy, env, config.seed, self._device)
        return load_policy(config.policy, config.published, self._device, env).policy

    @torch.no_grad()
    def _seen(self, env: VectorEnv, policy: ImitationPolicy) -> Mapping[str, Tensor]:
        """Returns columns [M, D]: what ROWS episodes of random actions show at the beginning of each chunk."""
        seed, spec = self._config.seed, env.spec
        observation = env.reset(reset_seed(seed, -1, np.arange(ROWS)).tolist()).to(self._device)
        columns: dict[str, list[Tensor]] = {"proprio": [], "vision": [], "privileged": []}
        for step in range(spec.chunks_per_episode):
            columns["proprio"].append(observation.proprio)
            columns["vision"].append(policy.pooled(policy.encode_frozen(observation)))
            if observation.privileged is not None:
                columns["privileged"].append(observation.privileged)
            drawn = uniform(seed, "random", np.arange(ROWS), step, shape=(spec.chunk, spec.action_dim))
            observation = env.step_chunk(torch.from_numpy(drawn * 2 - 1)).observation.to(self._device)
        return {name: torch.cat(parts) for name, parts in columns.items() if parts and parts[0].shape[1] > 0}


def fine_tuning_of(config: TrainConfig) -> TrainConfig:
    """Returns the SFT run that is the warm start: nothing is held out, and the last weights stay."""
    phases = {entry.name: getattr(config.warm_start, entry.name) for entry in fields(FineTuningPhases)}
    algorithm = SFTConfig(**phases, held_out=0.0, reduction=config.algorithm.reduction)
    run = replace(config.run, num_iterations=algorithm.num_epochs, until_success=None, patience=0)
    cluster = replace(config.cluster, cpu_devices=0)
    return replace(config, algorithm=algorithm, data=None, hierarchy=HierarchyConfig(), run=run, cluster=cluster)


def _make_cloned(folder: Path, config: TrainConfig, session: Session, cluster: Cluster, progress: ShowProgress) -> None:
    with TemporaryDirectory(prefix="rlinf_embodied-") as place:
        needs, config = config.algorithm.needs_success, fine_tuning_of(config)
        new = NewPolicyConfig(config.env, config.policy, config.run.seed, measures=False, needs_success=needs)
        new = replace(new, sources=_measured(config))
        _make_new(Path(place) / "new", new, session, cluster)
        stage = fine_tuning_stage(config, sources_of(config), f"{place}/new")
        prepare = lambda executor: demonstrate(executor, stage.sources, progress)  # noqa: E731
        number = config.run.num_iterations
        common.make_policy(fine_tuning_workflow(stage), session, cluster, number, progress, folder, prepare)


def clone_folder(config: TrainConfig, kind: str) -> Path:
    """Returns where the behaviour-cloned policy of a training is cached: keyed by all that it is a function of.

    `kind` is torch's name of the devices: on other kinds than "cpu" bits differ, on some the simulation too.
    """
    start = config.warm_start
    unused = () if start.augment else ("augment", "max_augmentations")
    unused += tuple(name for name in ("convert_actions", "convert_state") if not getattr(start, name))
    key = {
        "warm_start": {k: v for k, v in asdict(start).items() if k not in (*_PLACES, *_OF_LOADING, *unused)},
        "sources": [
            (source.kind, source.num_episodes, source.digest) for source in sources_of(replace(config, data=None))
        ],
        "seed": config.run.seed,
    }
    return _cache_folder(start.cache_dir, config.env, config.policy, kind, key)


def _cache_folder(root: str, env: EnvConfig, policy: PolicyConfig, kind: str, more: Mapping[str, object]) -> Path:
    own = [t for t in targets_of([asdict(policy), asdict(env)]) if not t.startswith(("policies.", "envs."))]
    key = {
        "version": _VERSION,
        "observations": OBSERVATION_VERSION,
        "env": {name: value for name, value in asdict(env).items() if name not in _OF_TRAINING},
        "policy": {k: v for k, v in asdict(policy).items() if k not in _OF_SAMPLING and v not in ({}, None)},
        "cpu": kind == "cpu",
        "backend": "physx_cuda" if env_options(env).on_accelerator(kind) else None,
        "code": source_digest(sorted({*own})) if own else None,  # where custom code is edited, training starts anew
        **more,
    }
    return common.cache_folder(root, env.task, key, ("torch", "mani_skill", "sapien", "transformers"))
