"""An update of soft actor-critic is that of Stable-Baselines3: the same losses and weights from the same batch."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium
import pytest
import torch
from control_runs import learning, small
from stable_baselines3 import SAC as PeerSAC  # noqa: N811
from stable_baselines3.common.logger import configure
from torch import Tensor, nn

from policies.soft_actor import SoftActor
from rlinf_embodied.algorithms.sac import SAC
from rlinf_embodied.algorithms.transitions import Columns
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.randomness import normal
from rlinf_embodied.runtime.host import StepContext
from tests.observations import env_spec

STATE, ACTION, ROWS, UPDATES = 3, 2, 32, 6
SPEC = env_spec("Some-v0", 8, 1, 10, ACTION, STATE, 5, 64, ())


class Space(gymnasium.Env):
    """Spaces, for whoever asks for them."""

    observation_space = gymnasium.spaces.Box(-torch.inf, torch.inf, (STATE,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION,))


def updates(config: TrainConfig, num_blocks: int) -> tuple[SoftActor, SAC]:
    policy = SoftActor(config.policy, SPEC, seed=1)
    return policy, learning(SAC, policy, config.algorithm, num_blocks)


def batches(num_blocks: int) -> dict[int, Columns]:
    """The same transitions, dealt to blocks."""
    generator, size = torch.Generator().manual_seed(0), (UPDATES, ROWS)
    whole = {
        "state": torch.randn(*size, STATE, generator=generator),
        "action": torch.rand(*size, ACTION, generator=generator) * 2 - 1,
        "reward": torch.randn(*size, generator=generator),
        "next_state": torch.randn(*size, STATE, generator=generator),
        "terminated": (torch.rand(*size, generator=generator) < 0.3).float(),
    }
    part = ROWS // num_blocks
    return {b: {n: c[:, b * part : (b + 1) * part] for n, c in whole.items()} for b in range(num_blocks)}


def weights_of(ensemble: nn.Module, member: int) -> list[Tensor]:
    """Returns the weights and biases of one critic in the order and form of torch's linear layers."""
    pairs = zip(ensemble.weights, ensemble.biases, strict=True)
    return [part for weight, bias in pairs for part in (weight[member].T, bias[member, 0])]


def theirs(ours: SAC, policy: SoftActor, gamma: float, tau: float) -> PeerSAC:
    """Returns their algorithm with our weights."""
    width = [16, 16]
    model = PeerSAC("MlpPolicy", Space(), gamma=gamma, tau=tau, policy_kwargs={"net_arch": width}, device="cpu")
    model.set_logger(configure(None, []))
    actor, net = model.actor, policy.module
    with torch.no_grad():
        for target, source in zip(
            [*actor.latent_pi.parameters(), *actor.mu.parameters(), *actor.log_std.parameters()],
            net.parameters(),
            strict=True,
        ):
            target.copy_(source)
        for name, critic in (("critics", model.critic), ("target_critics", model.critic_target)):
            for member, network in enumerate((critic.qf0, critic.qf1)):
                for target, source in zip(network.parameters(), weights_of(ours.modules[name], member), strict=True):
                    target.copy_(source)
    return model


def test_updates_are_those_of_stable_baselines3(monkeypatch) -> None:
    config = small("algorithm.gamma=0.9", "algorithm.tau=0.1")
    policy, ours = updates(config, num_blocks=1)
    model = theirs(ours, policy, 0.9, 0.1)
    columns = batches(1)[0]
    noise = normal(5, "soft update", 0, 0, range(UPDATES * 2 * ROWS), shape=(1, ACTION))
    drawn = torch.from_numpy(noise).reshape(UPDATES, 2, ROWS, ACTION)
    in_their_order = iter(drawn.flip(1).flatten(0, 1))  # theirs asks for the state's action first
    monkeypatch.setattr("torch.distributions.normal._standard_normal", lambda *_, **__: next(in_their_order))
    sampled = iter(
        SimpleNamespace(
            observations=columns["state"][k],
            actions=columns["action"][k],
            rewards=columns["reward"][k][:, None],
            next_observations=columns["next_state"][k],
            dones=columns["terminated"][k][:, None],
            discounts=None,
        )
        for k in range(UPDATES)
    )
    monkeypatch.setattr(model.replay_buffer, "sample", lambda size, env: next(sampled))
    model.train(gradient_steps=UPDATES, batch_size=ROWS)
    metrics = ours.update(StepContext(0), {0: columns})

    logged = model.logger.name_to_value
    assert metrics["losses/critic_loss"] * 2 == pytest.approx(logged["train/critic_loss"], rel=1e-5)
    assert metrics["losses/policy_loss"] == pytest.approx(logged["train/actor_loss"], rel=1e-4)
    assert metrics["losses/entropy_coef"] == pytest.approx(model.log_ent_coef.exp().item(), rel=1e-6)
    learned = UPDATES * config.algorithm.lr  # as far as Adam's steps may lead
    for member, network in enumerate((model.critic.qf0, model.critic.qf1)):
        for found, expected in zip(weights_of(ours.modules["critics"], member), network.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * learned)
    for member, network in enumerate((model.critic_target.qf0, model.critic_target.qf1)):
        for found, expected in zip(
            weights_of(ours.modules["target_critics"], member), network.parameters(), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * learned)
    actor = model.actor
    expected = [*actor.latent_pi.parameters(), *actor.mu.parameters(), *actor.log_std.parameters()]
    for found, other in zip(policy.module.parameters(), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-2 * learned)  # its log-probs are of tanh^2 + 1e-6


def test_the_policy_is_updated_once_per_period() -> None:
    policy, ours = updates(small(f"algorithm.policy_period={UPDATES + 1}"), num_blocks=2)
    before = [p.clone() for p in policy.module.parameters()]
    ours.update(StepContext(0), batches(2))
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))
    critics = ours.modules["critics"]
    assert not any(
        torch.equal(a, b) for a, b in zip(critics.weights, ours.modules["target_critics"].weights, strict=True)
    )


def test_only_noise_depends_on_how_a_batch_is_dealt_to_blocks(monkeypatch) -> None:
    config = small("algorithm.updates_per_step=1")
    monkeypatch.setattr(SAC, "_noise", lambda self, i, b, r: torch.zeros(UPDATES, 2, r.shape[1], 1, ACTION))
    metrics = [updates(config, number)[1].update(StepContext(0), batches(number)) for number in (1, 4)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)
