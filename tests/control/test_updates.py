"""Updates from recorded transitions, on problems whose answers are known."""

from __future__ import annotations

import pytest
import torch
from control_runs import learning, small

from policies.soft_actor import SoftActor
from rlinf_embodied.algorithms.critics import Ensemble
from rlinf_embodied.algorithms.imitation import Imitation
from rlinf_embodied.algorithms.iql import IQL
from rlinf_embodied.algorithms.sac import SAC
from rlinf_embodied.algorithms.transitions import Columns
from rlinf_embodied.runtime.host import StepContext
from tests.observations import env_spec, observed

SPEC = env_spec("Bandit-v0", 8, 1, 10, 1, 2, 4, 64, ())
UPDATES, ROWS = 400, 32


def bandit() -> Columns:
    """One step: half of the actions are 0.5 and pay 1, the others are -0.5 and pay nothing."""
    generator, size = torch.Generator().manual_seed(0), (UPDATES, ROWS)
    good = (torch.rand(size, generator=generator) < 0.5).float()
    state = torch.randn(*size, 2, generator=generator)
    return {
        "state": state,
        "action": (good - 0.5)[..., None],
        "reward": good,
        "next_state": state,
        "terminated": torch.ones(size),
    }


CRITICS = ("algorithm.value_lr=3e-3", "algorithm.tau=0.1")


def greedy(policy: SoftActor) -> float:
    seen = observed(torch.zeros(1, 2), ("",))
    return float(policy.act(policy.encode(seen), None, 1.0).actions)


def learned(kind: type, *words: str) -> tuple[SoftActor, object, dict[str, float]]:
    config = small("algorithm.lr=3e-3", *words)
    policy = SoftActor(config.policy, SPEC, seed=1)
    updates = learning(kind, policy, config.algorithm, 2, seed=1)
    columns = bandit()
    halves = {b: {name: c[:, b * ROWS // 2 : (b + 1) * ROWS // 2] for name, c in columns.items()} for b in (0, 1)}
    return policy, updates, updates.update(StepContext(0), halves)


@pytest.mark.slow
def test_iql_does_what_paid_and_cloning_what_was_done() -> None:
    policy, updates, metrics = learned(
        IQL, *CRITICS, "algorithm=iql", "data=recorded", "algorithm.expectile=0.9", "algorithm.advantage_scale=5"
    )
    assert greedy(policy) > 0.4
    value = updates.modules["value"](torch.zeros(1, 2)).detach()
    assert 0.7 < float(value) < 1.0  # the expectile 0.9 of 0 and 1 is 0.9
    assert metrics["losses/critic_loss"] < 0.1
    clone, _, metrics = learned(Imitation, "algorithm=bc", "data=recorded")
    assert abs(greedy(clone)) < 0.15  # the mean of both actions
    assert 0.2 < metrics["losses/imitation_loss"] < 0.35


@pytest.mark.slow
def test_rlpd_leaves_the_uniform_policy_where_rewards_are_sparse() -> None:
    words = (
        *CRITICS,
        "algorithm=rlpd",
        "algorithm.updates_per_step=0.1",
        "algorithm.num_critics=3",
        "algorithm.policy_period=2",
    )
    policy, _, metrics = learned(SAC, *words)
    assert greedy(policy) > 0.3  # towards what paid
    assert metrics["losses/entropy"] < 0.6  # that of the uniform policy is log 2 = 0.69


def test_an_ensemble_is_networks_side_by_side_and_a_part_of_it_some_of_them() -> None:
    ensemble, rows = Ensemble(4, (3, 8, 8, 1), layer_norm=True, seed=2), torch.randn(6, 3)
    values = ensemble(rows)
    assert values.shape == (4, 6)
    torch.testing.assert_close(ensemble(rows, torch.tensor([3, 1])), values[[3, 1]])
    for e in range(4):
        hidden = rows
        for k in range(2):
            hidden = hidden @ ensemble.weights[k][e] + ensemble.biases[k][e]
            hidden = torch.nn.functional.layer_norm(hidden, (8,), ensemble.scales[k][e, 0], ensemble.shifts[k][e, 0])
            hidden = hidden.relu()
        torch.testing.assert_close((hidden @ ensemble.weights[2][e] + ensemble.biases[2][e])[:, 0], values[e])
    assert len({float(w.detach().sum()) for w in ensemble.weights[0]}) == 4
