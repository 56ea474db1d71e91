"""Checks whether a custom policy can be used, before anything is built.

What its methods return is looked at by tests/policies/test_policy_contract.py (docs/own_policy.md).
"""

from __future__ import annotations

from typing import cast

from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import ImitationPolicy, Policy
from rlinf_embodied.learning.shared_policy import move
from rlinf_embodied.plug_ins import load_plug_in, load_target, named_when_raised

_PACKAGE = "policies."
_NEEDED = ("encode", "act", "evaluate", "value", "policy_parameters", "value_parameters", "save", "from_folder")
_CLONED = ("imitation_loss",)
_SEE = "see docs/own_policy.md"


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
    if config._target_.startswith(_PACKAGE):
        return
    if not isinstance(kind, type):
        raise _wrong(config, "it is no class, by whose `from_folder` checkpoints are read", "name a class")
    plain = lambda owner, name: getattr(getattr(owner, name, None), "__func__", getattr(owner, name, None))  # noqa: E731
    # a method of the protocol that a class does not override does nothing
    missing = [n for n in (*_NEEDED, *_CLONED[: int(cloned)]) if plain(kind, n) in (None, plain(ImitationPolicy, n))]
    if missing:
        action = f"write what is missing ({_SEE})"
        if missing == [*_CLONED]:
            action += ", inheriting from ImitationPolicy, or start from random weights: warm_start.from_nothing=true"
        raise _wrong(config, f"{kind.__name__} has no {', '.join(missing)}", action)


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


def _wrong(config: PolicyConfig, rule: str, action: str) -> ConfigError:
    return ConfigError(
        f"policy._target_ is {config._target_!r}, but {rule}{'' if rule.endswith(chr(10)) else ': '}{action}"
    )
