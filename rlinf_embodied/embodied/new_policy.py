"""A policy that has learned nothing here, as a stage: random weights, or those of a published folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.config import EnvConfig, PolicyConfig
from rlinf_embodied.embodied.demonstrations import ROWS, for_demonstrations
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_check import check_policy, is_own, new_policy
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.interfaces.envs import EnvSpec, VectorEnv
from rlinf_embodied.interfaces.policies import ImitationPolicy, Policy
from rlinf_embodied.learning.shared_policy import move
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.randomness import reset_seed, uniform
from rlinf_embodied.runtime.host import StageContext, StepContext

_MIN_STD = 0.1  # random actions see little of what training will see: an object that they never lift, for example


@dataclass(frozen=True, slots=True)
class NewPolicyConfig:
    """What the stage needs to know."""

    env: EnvConfig
    policy: PolicyConfig
    seed: int
    published: str | None = None  # a folder that others wrote, with the weights
    measures: bool = True  # whether inputs are standardised with what random actions see; demonstrations may say better


class NewPolicyStage:
    """Makes a policy and saves it."""

    def __init__(self, config: NewPolicyConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        self._device = context.device

    def save_policy(self, step_context: StepContext, folder: str) -> None:
        """Writes the new policy."""
        config, own = self._config, is_own(self._config.policy)
        rows = ROWS if config.measures or own else 1
        try:
            env = make_env(for_demonstrations(config.env), rows, self._device)
        except SimulatorError as error:  # of a simulator that cannot be built, not of one that fails during a call
            raise ConfigError(str(error)) from error
        try:
            policy = self._policy(env.spec)
            if own:
                seen = env.reset(range(rows)).to(self._device)
                check_policy(policy, config.policy, self._acts_in(env.spec), seen)
            if config.measures and isinstance(policy, ImitationPolicy):
                self._set_statistics(env, policy)
            save_policy(policy, Path(folder), config.env, config.policy, self._device)
        finally:
            env.close()

    def _acts_in(self, env: EnvSpec) -> EnvSpec:
        """Returns what the policy is made for."""
        return env

    def _policy(self, env: EnvSpec) -> Policy:
        config = self._config
        if config.published is None:
            return new_policy(config.policy, env, config.seed, self._device)
        kind = cast(type[Policy], load_target(config.policy._target_))
        policy = kind.from_folder(Path(config.published), env, config.policy)
        move(policy.module, self._device)
        return policy

    def _set_statistics(self, env: VectorEnv, policy: ImitationPolicy) -> None:
        for name, column in self._seen(env, policy).items():
            mean, std = column.double().mean(0), column.double().std(0, correction=0)
            policy.set_statistics(name, mean.float(), std.float().clamp(min=_MIN_STD))

    @torch.no_grad()
    def _seen(self, env: VectorEnv, policy: ImitationPolicy) -> Mapping[str, Tensor]:
        """Returns columns [M, D]: what ROWS episodes of random actions show at the beginning of each chunk."""
        seed, spec = self._config.seed, env.spec
        observation = env.reset(reset_seed(seed, -1, np.arange(ROWS)).tolist()).to(self._device)
        columns: dict[str, list[Tensor]] = {}
        for step in range(spec.chunks_per_episode):
            columns.setdefault("proprio", []).append(observation.proprio)
            columns.setdefault("vision", []).append(policy.pooled(policy.encode_frozen(observation)))
            if observation.privileged is not None:
                columns.setdefault("privileged", []).append(observation.privileged)
            drawn = uniform(seed, "random", np.arange(ROWS), step, shape=(spec.chunk, spec.action_dim))
            observation = env.step_chunk(torch.from_numpy(drawn * 2 - 1)).observation.to(self._device)
        joined = {name: torch.cat(parts) for name, parts in columns.items()}
        return {name: column for name, column in joined.items() if column.shape[1] > 0}
