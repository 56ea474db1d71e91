"""A policy that computes in bfloat16 and answers in float32."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import Tensor

from rlinf_embodied.config import Critic, PolicyConfig, Precision
from rlinf_embodied.interfaces.policies import Evaluation, Policy, PolicyOutput
from rlinf_embodied.learning.precision import computing

_Policy = TypeVar("_Policy", bound=Policy)
_COMPUTES = (
    *("encode", "act", "evaluate", "value"),
    *("encode_trainable", "encode_frozen", "pooled", "imitation_loss"),  # of a policy that can imitate
)


def computed_in(precision: Precision, policy: _Policy, config: PolicyConfig, device: str) -> _Policy:
    """Returns the policy itself, or in bfloat16 one that has its weights and computes on `device` by autocast.

    Features stay as they come out, which halves what is kept of a frozen part.  A critic on privileged state is small,
    and stays in float32.
    """
    if precision is Precision.float32:
        return policy
    kind = type(policy)
    methods = {name: _autocast(getattr(kind, name), precision, device) for name in _COMPUTES if hasattr(kind, name)}
    if config.critic is Critic.privileged:
        del methods["value"]
    made = copy.copy(policy)  # of the same module
    made.__class__ = type(kind.__name__, (kind,), methods)  # pyright: ignore[reportAttributeAccessIssue]
    return cast(_Policy, made)


def _autocast(method: Callable[..., Any], precision: Precision, device: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        with computing(precision, device):
            return _in_float32(method(*arguments, **named))

    return run


def _in_float32(found: Any) -> Any:
    if isinstance(found, PolicyOutput):
        values = _in_float32(found.values)
        return replace(found, actions=found.actions.float(), log_probs=found.log_probs.float(), values=values)
    if isinstance(found, Evaluation):
        return Evaluation(found.log_probs.float(), _in_float32(found.entropy), _in_float32(found.values))
    return found.float() if isinstance(found, Tensor) else found
