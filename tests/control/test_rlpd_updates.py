"""RLPD's updates are those of its paper, written out with torch's own layers, autograd and Adam (arXiv 2302.02948).

Algorithm 1, critic by critic: E networks Linear - LayerNorm - ReLU; for each of G critic updates a random subset Z of
the targets, y = r + gamma (1 - d) min_{i in Z} Q'_i(s', a'), without the entropy where rewards are sparse; one policy
update per G on the mean of all critics; alpha towards its target entropy.
"""

from __future__ import annotations

import copy

import pytest
import torch
from control_runs import learning, small
from torch import Tensor, nn

from policies.soft_actor import SoftActor
from rlinf_embodied.algorithms.sac import SAC, SACConfig
from rlinf_embodied.algorithms.transitions import Columns, ReplaySchedule
from rlinf_embodied.embodied.replay_stage import DEMONSTRATIONS, REPLAY, ReplayStage, ReplayStageConfig
from rlinf_embodied.randomness import normal, permutation
from rlinf_embodied.runtime.host import StepContext, solo_context
from tests.observations import env_spec

STATE, ACTION, ROWS, UPDATES, CRITICS, SUBSET, PERIOD, SEED = 3, 2, 32, 6, 5, 2, 3, 5
SPEC = env_spec("Some-v0", 8, 1, 10, ACTION, STATE, 5, 64, ())
WORDS = [
    *("algorithm=rlpd", "algorithm.expert_steps=0", "algorithm.updates_per_step=1", "algorithm.gamma=0.9"),
    *(f"algorithm.num_critics={CRITICS}", f"algorithm.target_critics={SUBSET}", f"algorithm.policy_period={PERIOD}"),
    *("algorithm.tau=0.1", "algorithm.lr=1e-3", "algorithm.value_lr=2e-3", "algorithm.initial_entropy_coef=0.3"),
]


def transitions() -> Columns:
    """Sparse rewards, each at the end of its episode."""
    generator, size = torch.Generator().manual_seed(0), (UPDATES, ROWS)
    solved = (torch.rand(size, generator=generator) < 0.3).float()
    return {
        "state": torch.randn(*size, STATE, generator=generator),
        "action": torch.rand(*size, ACTION, generator=generator) * 2 - 1,
        "reward": solved,
        "next_state": torch.randn(*size, STATE, generator=generator),
        "terminated": solved,
    }


class Oracle:
    """The algorithm in a loop over critics, on one batch per update."""

    def __init__(self, policy: SoftActor, ours: SAC, algorithm: SACConfig) -> None:
        self.algorithm = algorithm
        self.actor = copy.deepcopy(policy.module)
        self.critics = [critic_of(ours.modules["critics"], member) for member in range(CRITICS)]
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.tensor(algorithm.initial_entropy_coef).log())
        weights = [p for critic in self.critics for p in critic.parameters()]
        self.adam = torch.optim.Adam(weights, algorithm.value_lr)
        self.policy_adam = torch.optim.Adam([*self.actor.parameters(), self.log_alpha], algorithm.lr)

    def act(self, states: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = (part[:, 0] for part in self.actor(states))
        squashed = torch.distributions.TransformedDistribution(
            torch.distributions.Normal(mean, log_std.exp()), torch.distributions.TanhTransform(cache_size=1)
        )
        actions = torch.tanh(mean + noise * log_std.exp())
        return actions, squashed.log_prob(actions.clamp(-1 + 1e-6, 1 - 1e-6)).sum(-1)

    def update(self, k: int, batch: Columns, noise: Tensor, subset: list[int]) -> None:
        a = self.algorithm
        with torch.no_grad():
            after = torch.cat([batch["next_state"], self.act(batch["next_state"], noise[0])[0]], 1)
            lowest = torch.stack([self.targets[i](after)[:, 0] for i in subset]).min(0).values
            target = batch["reward"] + a.gamma * (1 - batch["terminated"]) * lowest
        seen = torch.cat([batch["state"], batch["action"]], 1)
        loss = sum(0.5 * (critic(seen)[:, 0] - target).square().mean() for critic in self.critics)
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        if (k + 1) % PERIOD == 0:
            alpha = self.log_alpha.exp().detach()
            actions, log_probs = self.act(batch["state"], noise[1])
            values = torch.stack([c(torch.cat([batch["state"], actions], 1))[:, 0] for c in self.critics])
            self.policy_adam.zero_grad()
            wanted = a.entropy_per_dimension * ACTION
            alpha_loss = -(self.log_alpha * (log_probs.detach() + wanted)).mean()
            ((alpha * log_probs - values.mean(0)).mean() + alpha_loss).backward()
            self.policy_adam.step()
        with torch.no_grad():
            for target_net, critic in zip(self.targets, self.critics, strict=True):
                for old, new in zip(target_net.parameters(), critic.parameters(), strict=True):
                    old.copy_((1 - a.tau) * old + a.tau * new)


def critic_of(ensemble: nn.Module, member: int) -> nn.Sequential:
    """Returns one critic as torch's layers."""
    layers: list[nn.Module] = []
    for k, weight in enumerate(ensemble.weights):
        linear = nn.Linear(*weight.shape[1:])
        layers.append(linear)
        with torch.no_grad():
            linear.weight.copy_(weight[member].T)
            linear.bias.copy_(ensemble.biases[k][member, 0])
        if k < len(ensemble.weights) - 1:
            layers += [nn.LayerNorm(weight.shape[2]), nn.ReLU()]
    return nn.Sequential(*layers)


def test_updates_are_those_of_the_paper() -> None:
    algorithm = small(*WORDS).algorithm
    assert algorithm.layer_norm
    assert not algorithm.pessimistic_policy
    assert not algorithm.entropy_in_target
    policy = SoftActor(small(*WORDS).policy, SPEC, seed=1)
    ours = learning(SAC, policy, algorithm, seed=SEED)
    oracle, columns = Oracle(policy, ours, algorithm), transitions()
    drawn = normal(SEED, "soft update", 0, 0, range(UPDATES * 2 * ROWS), shape=(1, ACTION))
    noise = torch.from_numpy(drawn).reshape(UPDATES, 2, ROWS, ACTION)
    subsets = [permutation(SEED, "target critics", 0, k, size=CRITICS)[:SUBSET].tolist() for k in range(UPDATES)]
    assert len({tuple(sorted(subset)) for subset in subsets}) > 2  # drawn anew for each update
    metrics = ours.update(StepContext(0), {0: columns})
    for k in range(UPDATES):
        oracle.update(k, {name: column[k] for name, column in columns.items()}, noise[k], subsets[k])

    assert metrics["losses/entropy_coef"] == pytest.approx(oracle.log_alpha.exp().item(), rel=1e-6)
    learned = UPDATES * algorithm.value_lr  # as far as Adam's steps may lead
    for name, expected in (("critics", oracle.critics), ("target_critics", oracle.targets)):
        for member in range(CRITICS):
            found = critic_of(ours.modules[name], member)
            for k in range(0, len(found), 3):
                for one, other in zip(found[k].parameters(), expected[member][k].parameters(), strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-2 * learned)
    for one, other in zip(policy.module.parameters(), oracle.actor.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-2 * UPDATES / PERIOD * algorithm.lr)


def test_half_of_every_batch_are_demonstrations() -> None:
    schedule = ReplaySchedule(rows=8, demonstration_rows=4, updates=100, steps=1, expert_iterations=1, first_update=2)
    replay = ReplayStage(ReplayStageConfig(SEED, 100, SACConfig.columns, "", schedule, mixes=True))
    replay.setup(solo_context((0,)))
    size = 30
    for iteration in range(3):
        told = {
            "state": torch.full((size, STATE), float(iteration)),
            "action": torch.zeros(size, ACTION),
            "reward": torch.arange(size, dtype=torch.float32),
            "next_state": torch.zeros(size, STATE),
            "terminated": torch.zeros(size),
        }
        output = replay.run(StepContext(iteration), {0: [told]})
    batch = output.blocks[0]
    assert batch["state"].shape == (100, 8, STATE)
    shown = (batch["state"][..., 0] == 0).float()  # of iteration 0, in which the expert acted
    assert torch.equal(shown.sum(1), torch.full((100,), 4.0))
    assert len(set(batch["reward"][shown.bool()].tolist())) == size  # all of them, sooner or later
    assert output.report["rollout/demonstrations"] == size
    held = replay.export_snapshot(StepContext(3)).tensors[REPLAY]
    assert DEMONSTRATIONS in {name.split(".")[1] for name in held}
