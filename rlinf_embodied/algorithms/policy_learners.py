"""The learners of a policy and its critic: whole in every worker, or the policy in slices over the workers.

               trained by                      passes read            other stages read
replicated     one learner each, or one of     the worker's copy      the worker's copy
               both: see `joint`
fsdp2          POLICY: a second copy, sliced   the sliced copy        the worker's copy, which each update renews
               VALUE: as replicated            the worker's copy      the worker's copy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from rlinf_embodied.algorithms.algorithm import Training
from rlinf_embodied.config import OnPolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Evaluation, Features, HasRunningStatistics, Policy, Record
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.optimizer import AdamSettings, ParameterGroup
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import POLICY_STATISTICS, VALUE_STATISTICS

POLICY, VALUE = "policy_optimizer", "value_optimizer"  # in a checkpoint
VALUE_GROUP = "value"  # of the parameters that only the critic has, in an optimizer that trains both
VALUE_LOSS = "value_loss"  # a statistic of passes that train both


class Scored(nn.Module):
    """Scoring as a module's forward pass, which is when sliced weights are gathered."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.module = policy.module
        self._policy = policy

    def forward(self, features: Features, record: Record, temperature: float, entropy_gradient: bool) -> Evaluation:
        return self._policy.evaluate(features, record, temperature, entropy_gradient=entropy_gradient)


@dataclass(frozen=True, slots=True)
class Learners:
    """What trains, and how the passes of the policy's loss score choices."""

    by_name: dict[str, Learner]
    joint: bool  # whether POLICY trains the critic as well: the two share parameters, or algorithm.one_optimizer
    evaluate: Callable[[Features, Record, float, bool], Evaluation]


def replicated(policy: Policy, algorithm: OnPolicyConfig, reducer: Reducer) -> Learners:
    """Returns learners of the policy that other stages read."""
    actor, critic, compile = policy.policy_parameters(), _critic(policy, algorithm), algorithm.compile
    shared = {id(p) for p in actor}
    head = [p for p in critic if id(p) not in shared]
    joint = len(head) < len(critic) or algorithm.one_optimizer
    main, value = _settings(algorithm)
    more = {VALUE_GROUP: ParameterGroup(head, main if algorithm.one_optimizer else value)} if joint and head else {}
    statistics = (*POLICY_STATISTICS, VALUE_LOSS) if joint else POLICY_STATISTICS
    made = {POLICY: Learner(actor, main, statistics, reducer, group="policy", more=more, compile=compile)}
    if critic and not joint:
        made[VALUE] = Learner(critic, value, VALUE_STATISTICS, reducer, compile=compile)
    return Learners(made, joint, lambda f, r, t, entropy: policy.evaluate(f, r, t, entropy_gradient=entropy))


def sharded(training: Training, zero_loss: Callable[[Scored], Tensor]) -> Learners:
    """Returns learners of which that of the policy holds slices of a second copy.

    Args:
        training: of the policy that other stages read.
        zero_loss: a loss of 0 from a forward pass: a worker takes part in every pass of the others.

    Raises:
        ConfigError: several workers whose bits are to be equal; or the policy cannot be trained in slices.
    """
    from rlinf_embodied.learning.sharded import ShardedLearner  # slow to import, and few need FSDP2

    algorithm, context, view = training.algorithm, training.context, training.policy
    critic = _critic(view, algorithm)
    disjoint = {id(p) for p in view.policy_parameters()}.isdisjoint(id(p) for p in critic)
    path, keeps = "algorithm.sharding", isinstance(view, HasRunningStatistics)
    require(not keeps, path, "fsdp2", "the policy's running statistics would miss the sliced copy", "use none")
    rule = "the critic shares parameters with the policy, and is trained whole"
    require(disjoint, path, "fsdp2", rule, "set policy.critic=privileged")
    policy, (main, value) = training.copy(), _settings(algorithm)
    root = Scored(policy)
    learner = ShardedLearner(
        *(root, policy.policy_parameters, Scored(view), main, POLICY_STATISTICS),
        zero_loss=lambda: zero_loss(root),
        precision=algorithm.precision,
        group=context.group,
        device=context.device,
        exact=training.exact,
    )
    made: dict[str, Learner] = {POLICY: learner}
    if critic:
        made[VALUE] = Learner(critic, value, VALUE_STATISTICS, training.reducer)
    return Learners(made, joint=False, evaluate=cast("Callable[..., Evaluation]", root))


def _critic(policy: Policy, algorithm: OnPolicyConfig) -> Sequence[nn.Parameter]:
    """Returns the parameters that the value loss trains; empty without a value loss."""
    found = policy.value_parameters() if algorithm.has_critic else []
    if algorithm.has_critic and not found:
        raise ConfigError(
            f"algorithm is {algorithm.name}, but value_parameters() of the policy {policy.spec.name} is empty: it "
            "trains a critic, use algorithm=grpo without one"
        )
    return found


def _settings(algorithm: OnPolicyConfig) -> tuple[AdamSettings, AdamSettings]:
    """Returns Adam's constants of the policy, and of the critic."""
    main = AdamSettings(algorithm.lr, (0.9, 0.999), algorithm.max_grad_norm, eps=1e-5)
    return main, replace(main, lr=algorithm.value_lr, max_grad_norm=algorithm.value_max_grad_norm)
