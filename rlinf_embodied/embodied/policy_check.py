"""Checks whether a custom policy meets the requirements of training.

Its methods are looked at before anything is built (`require_policy_class`), what they return before anything is learned
(`check_policy`, on the first observation of its env).  Those of this project pass their own tests instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import Evaluation, Features, ImitationPolicy, Policy, PolicyOutput
from rlinf_embodied.learning.shared_policy import move
from rlinf_embodied.plug_ins import load_plug_in, load_target, named_when_raised

_Answer = TypeVar("_Answer")
_PACKAGE = "policies."
_CLONING = (
    *("imitation_parameters", "encode_trainable", "encode_frozen", "pooled", "set_statistics", "imitation_loss"),
)
_NEEDED = ("encode", "act", "evaluate", "value", "policy_parameters", "value_parameters", "save", "from_folder")
_SEE = "see docs/own_policy.md"
_BY_NAME = ("entropy_gradient", "env", "config")
_TOLERANCE = 1e-3  # of log-probs: calls of one size differ by rounding only
_COLDER = 20.0  # a new policy is nearly uniform: what it does wrong shows at a low temperature


def is_own(config: PolicyConfig) -> bool:
    """Whether the policy is the user's, not of this project."""
    return not config._target_.startswith(_PACKAGE)


# --------------------------------------------------------------------------------------------------- before it is built
def require_policy_class(config: PolicyConfig, cloned: bool) -> None:
    """Checks that policy._target_ is a class with the methods of `Policy`.

    Args:
        config: the policy's section.
        cloned: whether it learns from demonstrations first.

    Raises:
        ConfigError: it cannot be imported or called, is no class, or lacks a method.
    """
    kind = load_plug_in(config._target_, "policy._target_", "config", "env", "seed")
    if not is_own(config):
        return
    if not isinstance(kind, type):
        raise _wrong(
            config, "it is no class, and a checkpoint is read by its class method `from_folder`", "name a class"
        )
    missing = [name for name in _NEEDED if _is_left_out(kind, name)]
    if missing:
        raise _wrong(config, f"{kind.__name__} has no {', '.join(missing)}", f"write what is missing ({_SEE})")
    for name in (*_NEEDED, *(name for name in _CLONING if hasattr(kind, name))):
        _require_parameters(config, kind, name)
    if cloned and (_is_left_out(kind, "imitation_loss") or any(not hasattr(kind, name) for name in _CLONING)):
        rule = f"{kind.__name__} has no imitation_loss, without which it cannot learn from demonstrations"
        action = "inherit from ImitationPolicy and write it, or start from random weights: warm_start.from_nothing=true"
        raise _wrong(config, rule, action)


def require_options(config: PolicyConfig) -> None:
    """Checks policy.options of a class that says what they are, as `options_type`, a dataclass.

    Raises:
        ConfigError: a name is unknown, or a value of another type or refused; names its path.
    """
    declared = getattr(load_target(config._target_), "options_type", None)
    if declared is not None:
        typed(config.options, declared, "policy.options")


def _is_left_out(kind: type, name: str) -> bool:
    """Whether a class does not override a method; the protocol's method does nothing."""
    plain = lambda owner: getattr(getattr(owner, name, None), "__func__", getattr(owner, name, None))  # noqa: E731
    return plain(kind) is None or plain(kind) is plain(ImitationPolicy)


def _require_parameters(config: PolicyConfig, kind: type, name: str) -> None:
    names = list(inspect.signature(getattr(ImitationPolicy, name)).parameters)
    by_position = [n for n in names if n not in ("self", *_BY_NAME)]
    by_name = {n: None for n in names if n in _BY_NAME}
    bound = isinstance(inspect.getattr_static(kind, name), classmethod | staticmethod)
    try:
        inspect.signature(getattr(kind, name)).bind(*([] if bound else [None]), *by_position, **by_name)
    except TypeError as error:
        asked = ", ".join(n for n in names if n != "self")
        rule = f"{kind.__name__}.{name} is called with ({asked}), which it does not take ({error})"
        raise _wrong(config, rule, "change its parameters") from error


# --------------------------------------------------------------------------------------------------------- when it is
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
    _Check(policy, config, env, observation).run()


class _Check:
    def __init__(self, policy: Policy, config: PolicyConfig, env: EnvSpec, observation: Observation) -> None:
        self.policy, self.config, self.env, self.observation = policy, config, env, observation
        self.rows = len(observation)
        self.chunk = (self.rows, env.chunk)
        self.actions = (*self.chunk, env.action_dim)

    def run(self) -> None:
        self._spec()
        self._parameters()
        with torch.no_grad():
            features = self._features(self.observation)
        for temperature in (self.config.temperature, self.config.temperature / _COLDER):
            with torch.no_grad():
                output = self._acts(features, temperature)
            self._evaluates(features, output, temperature)
            with torch.no_grad():
                self._rows_are_apart(output, temperature)
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
        self.shape = (*self.chunk, spec.choices)

    def _parameters(self) -> None:
        inside = {id(p) for p in self.policy.module.parameters()}
        trained: dict[str, set[int]] = {}
        for name in ("policy_parameters", "value_parameters"):
            found = list(getattr(self.policy, name)())
            trained[name] = {id(p) for p in found}
            if len(trained[name]) != len(found) or not trained[name] <= inside:
                rule = f".{name}() holds a parameter twice, or one that is not in .module"
                raise self._refuse(rule, "checkpoints and weights that travel hold .module: put it there")
        if not trained["policy_parameters"]:
            raise self._refuse(".policy_parameters() is empty: nothing would be trained", "return what acts")

    def _features(self, observation: Observation) -> Features:
        features = self._call("encode", lambda: self.policy.encode(observation))
        self._has_rows("encode", "", features, len(observation))
        return features

    def _has_rows(self, method: str, name: str, found: object, rows: int) -> None:
        if not isinstance(found, dict) or not found or not all(_is_tensor_of(rows, v) for v in found.values()):
            came = {n: _form(v) for n, v in found.items()} if isinstance(found, dict) else type(found).__name__
            rule = f".{method} returned {name}{came}"
            raise self._refuse(rule, f"return a dict of tensors with a row for each of the {rows} observed")

    def _acts(self, features: Features, temperature: float) -> PolicyOutput:
        """Returns what it samples."""
        noise = self.policy.spec.noise.draw(0, "policy check", np.arange(self.rows)).to(self.observation.proprio.device)
        for given in (None, noise):
            output = self._call("act", lambda given=given: self.policy.act(features, given, temperature))
            self._is("act", "actions", getattr(output, "actions", None), torch.float32, self.actions)
            self._has_rows("act", "record ", getattr(output, "record", None), self.rows)
            self._is("act", "log_probs", getattr(output, "log_probs", None), torch.float32, self.shape)
            for name, dtype, shape in (("values", torch.float32, self.chunk), ("mask", torch.bool, self.shape)):
                if getattr(output, name) is not None:
                    self._is("act", name, getattr(output, name), dtype, shape)
            if output.mask is not None and not bool(output.mask.any(-1).all()):
                rule = ".act returned a mask that leaves log-probs of no choice for some actions"
                raise self._refuse(rule, "let every action have one choice at least")
            if float(output.actions.abs().max()) > 1:
                rule = f".act returned actions up to {float(output.actions.abs().max()):g}"
                raise self._refuse(rule, "return them in [-1, 1]; the env scales them")
        again = self.policy.act(features, noise, temperature)
        if any(not torch.equal(value, again.record[name]) for name, value in output.record.items()):
            rule = ".act chose otherwise for the same noise"
            raise self._refuse(rule, "draw nothing in it (no dropout, no torch.multinomial): use `noise`")
        return output

    def _evaluates(self, features: Features, output: PolicyOutput, temperature: float) -> None:
        found = self._call("evaluate", lambda: self.policy.evaluate(features, output.record, temperature))
        if not isinstance(found, Evaluation):
            raise self._refuse(f".evaluate returned {_form(found)}", "return Evaluation(log_probs, entropy)")
        self._is("evaluate", "log_probs", found.log_probs, torch.float32, self.shape)
        if found.entropy is not None:
            self._is("evaluate", "entropy", found.entropy, torch.float32, self.shape)
        if found.values is not None:
            self._is("evaluate", "values", found.values, torch.float32, self.chunk)
        rule = "evaluate gives other log-probs than act for its choices"
        self._same(rule, _made(found.log_probs, output), _made(output.log_probs, output))
        if not found.log_probs.requires_grad:
            raise self._refuse(".evaluate returned log_probs without a gradient", "leave out no_grad and detach in it")

    def _rows_are_apart(self, output: PolicyOutput, temperature: float) -> None:
        alone = [0] * self.rows
        features = self._features(self.observation.rows(alone))
        record = {name: value[alone] for name, value in output.record.items()}
        found = self._call("evaluate", lambda: self.policy.evaluate(features, record, temperature)).log_probs
        rule = "evaluate answers for a row by its neighbours"
        self._same(rule, _made(found, output, alone), _made(output.log_probs[alone], output, alone))

    def _values(self, features: Features) -> None:
        """A critic on privileged state is asked without features, as at the end of a rollout."""
        privileged = self.observation.privileged
        repeated = None if privileged is None else privileged[:, None].expand(-1, self.env.chunk, -1)
        given = features if self.config.critic is Critic.observation else {}
        hint = (
            "policy.critic is privileged, so it may read `privileged` only, and features may be {}: set "
            "policy.critic=observation for a critic that reads features, or fix it there"
        )
        hint = hint if self.config.critic is Critic.privileged else ""
        value = self._call("value", lambda: self.policy.value(given, repeated), hint)
        self._is("value", "V", value, torch.float32, self.chunk)

    # ------------------------------------------------------------------------------------------------------- one thing
    def _call(self, name: str, ask: Callable[[], _Answer], hint: str = "") -> _Answer:
        with named_when_raised(lambda raised: self._refuse(f".{name} raised {raised}\n", hint or "Fix it there")):
            return ask()

    def _is(self, method: str, name: str, value: object, dtype: torch.dtype, shape: Sequence[int]) -> None:
        wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        if not isinstance(value, Tensor) or value.dtype is not dtype or tuple(value.shape) != tuple(shape):
            raise self._refuse(f".{method} returned {name} as {_form(value)}", f"return {wanted} {_axes(shape)}")
        if not bool(torch.isfinite(value).all()):
            raise self._refuse(f".{method} returned {name} that are NaN or infinite", "look for what is not finite")

    def _same(self, rule: str, found: Tensor, expected: Tensor) -> None:
        difference = float((found - expected).detach().abs().max())
        if difference > _TOLERANCE:
            action = "divide logits by the temperature in both, and let no row see another (no batch statistics)"
            raise self._refuse(f".{rule}: they differ by {difference:.2g}", action)


def _made(log_probs: Tensor, output: PolicyOutput, rows: Sequence[int] | slice = slice(None)) -> Tensor:
    """Returns log-probs [B, C, K] with 0 for choices that were not made."""
    return log_probs if output.mask is None else torch.where(output.mask[rows], log_probs, 0.0)


def _axes(shape: Sequence[int]) -> str:
    return "(rows, env.chunk, action dimensions or choices)" if len(shape) == 3 else "(rows, env.chunk)"


def _is_tensor_of(rows: int, value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 1 and len(value) == rows


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"


def _wrong(config: PolicyConfig, rule: str, action: str) -> ConfigError:
    return ConfigError(
        f"policy._target_ is {config._target_!r}, but {rule}{'' if rule.endswith(chr(10)) else ': '}{action}"
    )
