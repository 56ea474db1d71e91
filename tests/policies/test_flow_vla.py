"""The flow policy: chains keep the distribution that the velocity stands for, log-probs are exact, it learns."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from runs import trees
from torch import Tensor, nn

from policies.flow_vla import FlowVLA
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.interfaces.envs import Observation
from tests.observations import env_spec, observed

ROWS, CHUNK, ACTION = 4, 3, 2
ENV = env_spec("PickCube-v1", ROWS, CHUNK, 12, ACTION, 6, 9, 16, ("base_camera",))
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "stem_width": 16, "keypoints": 4, "critic_hidden_size": 16}
APART = (2, trees("0:1/2", "1/2:1", "1/2:1", shards=2))
TOGETHER = (1, trees("all", "all", "all"))


def policy_of(**options: int) -> FlowVLA:
    config = PolicyConfig(_target_="policies.flow_vla.FlowVLA", name="flow_vla", options=SMALL | options)
    return FlowVLA(config, ENV, seed=3)


def seen(rows: int = ROWS) -> Observation:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, 1, 16, 16, 3), generator=draw, dtype=torch.uint8)
    proprio = torch.randn(rows, 6, generator=draw)
    return observed(proprio, ("pick up the cube",) * rows, images, torch.randn(rows, 9, generator=draw))


class ToNormal(nn.Module):
    """The velocity of straight lines from N(0, 1) to N(mean, std^2): E[x_1 - x_0 | x_t = x], in closed form."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, hidden: Tensor, x: Tensor, time: Tensor) -> Tensor:
        t = time[:, None, None].double()
        variance = (1 - t) ** 2 + t**2 * self.std**2
        centred = (x.double() - t * self.mean) / variance
        return (self.mean + (t * self.std**2 - (1 - t)) * centred).float()


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_chains_end_in_the_distribution_that_the_velocity_leads_to_at_any_noise(level: float) -> None:
    policy = policy_of(steps=200)
    policy.module.head = ToNormal(0.3, 0.1)
    rows = 400
    noise = policy.spec.noise.draw(0, "test", range(rows))
    x = noise[:, 0]
    for k in range(200):
        step = policy.flow.step(partial(policy.module.head, torch.zeros(rows, CHUNK, 32)), x, k, level)
        x = step.mean + step.std * noise[:, k + 1]
    assert float(x.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(x.std()) == pytest.approx(0.1, rel=0.05)


def test_log_probs_are_those_of_the_steps_noise() -> None:
    policy = policy_of(steps=5)
    features, noise = policy.encode(seen()), policy.spec.noise.draw(1, "test", range(ROWS))
    output = policy.act(features, noise, 0.7)
    assert output.log_probs.shape == (ROWS, CHUNK, 5)
    for k in range(5):
        std = 0.7 * math.sqrt((1 - k / 5) / 5)
        expected = -0.5 * noise[:, k + 1] ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
        torch.testing.assert_close(output.log_probs[..., k], expected.sum(-1), atol=1e-3, rtol=1e-4)
    found = policy.evaluate(features, output.record, 0.7).log_probs
    torch.testing.assert_close(found, output.log_probs, atol=1e-4, rtol=0)
    other = policy.evaluate(features, {"chain": output.record["chain"] + 0.01}, 0.7).log_probs
    assert (other - found).abs().max() > 1e-3


def test_straight_lines_to_a_chunk_have_no_loss_and_greedy_actions_end_there() -> None:
    flow = policy_of(steps=4).flow
    actions = torch.rand(ROWS, CHUNK, ACTION, generator=torch.Generator().manual_seed(1)) * 1.6 - 0.8
    straight = lambda x, time: (actions - x) / (1 - time)[:, None, None]  # noqa: E731
    drawn = {"noise": flow.imitation_noise().draw(0, "clone", range(ROWS))}
    assert flow.matching_loss(straight, drawn, actions).abs().max() < 1e-8
    assert flow.matching_loss(lambda x, time: straight(x, time) + 0.5, drawn, actions).sub(0.25).abs().max() < 1e-4
    greedy = flow.act(straight, ROWS, torch.device("cpu"), None, 1.0)
    torch.testing.assert_close(greedy.actions, actions)
