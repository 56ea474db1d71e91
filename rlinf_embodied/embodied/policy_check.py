"""Checks whether a custom policy meets the requirements of training.

Its methods are looked at before anything is built (`require_policy_class`), what they return before anything is learned
(`check_policy`, on the first observation of its env).  Those of this project pass their own tests instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import Features, ImitationPolicy, Policy, PolicyOutput
from rlinf_embodied.learning.shared_policy import move
from rlinf_embodied.plug_ins import load_plug_in, load_target, named_when_raised

_PACKAGE = "policies."
_NEEDED = ("encode", "act", "evaluate", "value", "policy_parameters", "value_parameters", "save", "from_folder")
_SEE = "see docs/own_policy.md"
_TOLERANCE = 1e-3  # of log-probs: calls of one size differ by rounding only
_COLDER = 20.0  # a new policy is nearly uniform: what it does wrong shows at a low temperature


def is_own(config: PolicyConfig) -> bool:
    """Whether the policy is the user's, not of this project."""
    return not config._target_.startswith(_PACKAGE)


def require_policy_class(config: PolicyConfig, cloned: bool) -> None:
    """Checks that policy._target_ is a class with the methods of `Policy`, and policy.options those that it has.

    Args:
        config: the policy's section.
        cloned: whether it learns from demonstrations first.

    Raises:
        ConfigError: it cannot be imported or called, is no class, lacks a method, or has other options.
    """
    kind = load_plug_in(config._target_, "policy._target_", "config", "env", "seed")
    declared = getattr(kind, "options_type", None)  # a dataclass
    if declared is not None:
        typed(config.options, declared, "policy.options")
    if not is_own(config):
        return
    if not isinstance(kind, type):
        raise _wrong(
            config, "it is no class, and a checkpoint is read by its class method `from_folder`", "name a class"
        )
    missing = [name for name in _NEEDED if _is_left_out(kind, name)]
    if missing:
        raise _wrong(config, f"{kind.__name__} has no {', '.join(missing)}", f"write what is missing ({_SEE})")
    if cloned and _is_left_out(kind, "imitation_loss"):
        rule = f"{kind.__name__} has no imitation_loss, without which it cannot learn from demonstrations"
        action = "inherit from ImitationPolicy and write it, or start from random weights: warm_start.from_nothing=true"
        raise _wrong(config, rule, action)


def _is_left_out(kind: type, name: str) -> bool:
    """Whether a class does not override a method; the protocol's method does nothing."""
    plain = lambda owner: getattr(getattr(owner, name, None), "__func__", getattr(owner, name, None))  # noqa: E731
    return plain(kind) is None or plain(kind) is plain(ImitationPolicy)


def new_policy(config: PolicyConfig, env: EnvSpec, seed: int, device: str) -> Policy:
    """Returns a new policy on its device.

    Raises:
        ConfigError: it cannot be made for this env; names the line of the user's that raised.
    """
    make = load_target(config._target_)
    with named_when_raised(lambda error: _wrong(config, f"making it for {env.task} raised {error}\n", "Fix it there")):
        policy = make(config, env, seed)
    for name in ("spec", "module"):
        if not hasattr(policy, name):
            raise _wrong(config, f"{type(policy).__name__} has no attribute {name}", f"set it in __init__ ({_SEE})")
    made = cast(Policy, policy)
    move(made.module, device)
    return made


def check_policy(policy: Policy, config: PolicyConfig, env: EnvSpec, observation: Observation) -> None:
    """Checks what the methods of a custom policy return.

    Args:
        policy: a new one, on the device of the observation.
        config: its section.
        env: what it acts in.
        observation: B rows of that env, which differ.

    Raises:
        ConfigError: a shape, dtype, range or law is violated; names the method, what came and what is needed.
    """
    refuse = lambda rule, action: _wrong(config, f"{type(policy).__name__}{rule}", action)  # noqa: E731
    with named_when_raised(lambda raised: refuse(f" raised {raised}\n", "Fix it there")):
        _Check(policy, config, env, observation).run()


class _Check:
    def __init__(self, policy: Policy, config: PolicyConfig, env: EnvSpec, observation: Observation) -> None:
        self.policy, self.config, self.env, self.observation = policy, config, env, observation
        self.temperature = config.temperature / _COLDER
        self.chunk = (len(observation), env.chunk)

    def run(self) -> None:
        self._spec()
        with torch.no_grad():
            features = self.policy.encode(self.observation)
            output = self._acts(features)
        self._evaluates(features, output)
        if self.policy.value_parameters():
            self._values(features)

    def _refuse(self, rule: str, action: str) -> ConfigError:
        return _wrong(self.config, f"{type(self.policy).__name__}{rule}", action)

    def _spec(self) -> None:
        spec = self.policy.spec
        for name in ("chunk", "action_dim"):
            ours = getattr(self.env, name)
            if getattr(spec, name) != ours:
                rule = f".spec.{name} is {getattr(spec, name)}, but that of the env is {ours}"
                raise self._refuse(rule, f"take it from the EnvSpec that __init__ is given (env.{name})")
        inside = {id(p) for p in self.policy.module.parameters()}
        trained = [*self.policy.policy_parameters(), *self.policy.value_parameters()]
        if not {id(p) for p in trained} <= inside:
            rule = " trains a parameter that is not in .module"
            raise self._refuse(rule, "checkpoints and weights that travel hold .module: put it there")

    def _acts(self, features: Features) -> PolicyOutput:
        """Returns what it samples."""
        rows, spec = len(self.observation), self.policy.spec
        noise = spec.noise.draw(0, "policy check", np.arange(rows)).to(self.observation.proprio.device)
        output, again = (self.policy.act(features, noise, self.temperature) for _ in range(2))
        self._is("act", "actions", output.actions, (*self.chunk, self.env.action_dim))
        self._is("act", "log_probs", output.log_probs, (*self.chunk, spec.choices))
        if float(output.actions.abs().max()) > 1:
            rule = f".act returned actions up to {float(output.actions.abs().max()):g}"
            raise self._refuse(rule, "return them in [-1, 1]; the env scales them")
        for name, value in {**features, **output.record}.items():
            if len(value) != rows:
                rule = f" has {len(value)} rows of {name!r} in what encode or act returned for {rows} observations"
                raise self._refuse(rule, "return tensors with a row for each of them")
        if any(not torch.equal(value, again.record[name]) for name, value in output.record.items()):
            rule = ".act chose otherwise for the same noise"
            raise self._refuse(rule, "draw nothing in it (no dropout, no torch.multinomial): use `noise`")
        return output

    def _evaluates(self, features: Features, output: PolicyOutput) -> None:
        found = self.policy.evaluate(features, output.record, self.temperature, entropy_gradient=False).log_probs
        self._is("evaluate", "log_probs", found, (*self.chunk, self.policy.spec.choices))
        difference = float((found - output.log_probs).detach().abs().max())
        if difference > _TOLERANCE:
            rule = f".evaluate gives other log-probs than act for its choices: they differ by {difference:.2g}"
            raise self._refuse(rule, "divide logits by the temperature in both")
        if not found.requires_grad:
            raise self._refuse(".evaluate returned log_probs without a gradient", "leave out no_grad and detach in it")

    def _values(self, features: Features) -> None:
        """A critic on privileged state is asked without features, as at the end of a rollout."""
        privileged = self.observation.privileged
        repeated = None if privileged is None else privileged[:, None].expand(-1, self.env.chunk, -1)
        given, is_privileged = features, self.config.critic is Critic.privileged
        hint = (
            "policy.critic is privileged, so it may read `privileged` only, and features may be {}: set "
            "policy.critic=observation for a critic that reads features, or fix it there"
        )
        with named_when_raised(
            lambda raised: self._refuse(f".value raised {raised}\n", hint if is_privileged else "Fix it there")
        ):
            value = self.policy.value({} if is_privileged else given, repeated)
        self._is("value", "V", value, self.chunk)

    def _is(self, method: str, name: str, value: Tensor, shape: Sequence[int]) -> None:
        if value.dtype is not torch.float32 or tuple(value.shape) != tuple(shape):
            came = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            raise self._refuse(f".{method} returned {name} as {came}", f"return float32 {list(shape)}")
        if not bool(torch.isfinite(value).all()):
            raise self._refuse(f".{method} returned {name} that are NaN or infinite", "look for what is not finite")


def _wrong(config: PolicyConfig, rule: str, action: str) -> ConfigError:
    return ConfigError(
        f"policy._target_ is {config._target_!r}, but {rule}{'' if rule.endswith(chr(10)) else ': '}{action}"
    )
