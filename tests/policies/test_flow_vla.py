"""Flow policies: chains keep the distribution that the velocity stands for, log-probs are exact, they learn."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from policies.flow import Flow, StepNoise
from policies.flow_vla import FlowVLA
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import Observation
from tests.observations import env_spec, observed

ROWS, CHUNK, ACTION = 4, 3, 2
ENV = env_spec("PickCube-v1", ROWS, CHUNK, 12, ACTION, 6, 9, 16, ("base_camera",))
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "stem_width": 16, "keypoints": 4, "critic_hidden_size": 16}


def policy_of(**options: object) -> FlowVLA:
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

    def forward(self, hidden: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        t = time[:, None, None].double()
        variance = (1 - t) ** 2 + t**2 * self.std**2
        centred = (x.double() - t * self.mean) / variance
        return hidden, (self.mean + (t * self.std**2 - (1 - t)) * centred).float()


@pytest.mark.parametrize("steps", ["all", "one"])
@pytest.mark.parametrize(("noise", "level"), [("decaying", 0.0), ("decaying", 1.0), ("flow_sde", 0.5)])
def test_chains_end_in_the_distribution_that_the_velocity_leads_to_at_any_noise(steps, noise: str, level) -> None:
    policy, rows = policy_of(steps=200, noise=noise, stochastic_steps=steps), 400
    policy.module.head = ToNormal(0.3, 0.1)
    drawn = policy.spec.noise.draw(0, "test", range(rows))
    features = {name: value[[0] * rows] for name, value in policy.encode(seen(1)).items()}
    x = policy.act(features, drawn, level).actions
    assert float(x.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(x.std()) == pytest.approx(0.1, rel=0.05)


def test_log_probs_are_those_of_the_steps_noise() -> None:
    policy = policy_of(steps=5, stochastic_steps="all")
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


def test_the_log_probs_of_flow_noise_are_the_density_of_the_whole_chain() -> None:
    flow = Flow(chunk=1, action_dim=1, steps=2, noise=StepNoise.flow_noise)
    field = lambda x, time: (torch.sin(2 * x) + time[:, None, None], 0.2 + 0.1 * torch.cos(x))  # noqa: E731
    rows, level, start = 100_000, 1.5, 0.3
    noise = flow.spec("flow").noise.draw(0, "test", range(rows))
    noise[:, 0] = start
    at_once = torch.zeros(rows, dtype=torch.long)
    output = flow.act(field, noise, level, at_once)
    assert torch.allclose(flow.evaluate(field, output.record, level, at_once).log_probs, output.log_probs, atol=1e-4)
    grid = torch.linspace(-2.5, 4, 651)  # of both x_1 and x_2
    middle, last = (part.reshape(-1) for part in torch.meshgrid(grid, grid, indexing="ij"))
    chain = torch.stack([torch.full_like(middle, start), middle, last], 1)[..., None, None]
    at_once = torch.zeros(len(middle), dtype=torch.long)
    density = flow.evaluate(field, {"chain": chain}, level, at_once).log_probs.sum((1, 2)).exp().view(651, 651)
    ends = torch.trapezoid(density, grid, dim=0)  # of x_2
    assert float(torch.trapezoid(ends, grid)) == pytest.approx(1.0, abs=1e-3)
    for low, high in ((0.0, 0.6), (0.8, 1.4), (1.4, 2.2)):
        share = ((output.actions > low) & (output.actions < high)).float().mean()
        inside = (grid > low - 1e-4) & (grid < high + 1e-4)
        assert float(torch.trapezoid(ends[inside], grid[inside])) == pytest.approx(float(share), abs=0.01)


def test_flow_noise_is_learned_within_its_range_and_begins_with_a_policy_that_has_none(tmp_path) -> None:
    policy_of().save(tmp_path)
    learned = policy_of(noise="flow_noise", noise_range=[0.1, 0.4])
    policy = FlowVLA.from_folder(tmp_path, ENV, learned.config)
    features, noise = policy.encode(seen()), policy.spec.noise.draw(1, "test", range(ROWS))
    output = policy.act(features, noise, 1.0)
    policy.evaluate(features, output.record, 1.0).log_probs.sum().backward()
    assert policy.module.noise.leave.bias.grad.abs().max() > 0
    x, at_once = torch.zeros(ROWS, CHUNK, ACTION), torch.zeros(ROWS, dtype=torch.long)
    _, std = policy.flow.step(policy._field(features), x, 0, 1.0, at_once)
    torch.testing.assert_close(std, torch.full_like(std, 0.2))  # the geometric mean
    with torch.no_grad():
        policy.module.noise.leave.bias.fill_(9.0)
    _, std = policy.flow.step(policy._field(features), x, 0, 1.0, at_once)
    torch.testing.assert_close(std, torch.full_like(std, 0.4))
    policy.save(tmp_path)
    assert torch.equal(
        FlowVLA.from_folder(tmp_path).act(features, noise, 1.0).actions, policy.act(features, noise, 1.0).actions
    )
    assert not hasattr(FlowVLA.from_folder(tmp_path, ENV, policy_of().config).module, "noise")
    with pytest.raises(ConfigError, match=r"policy.options.noise_range is \[0.4, 0.1\], but"):
        policy_of(noise_range=[0.4, 0.1])


def test_straight_lines_to_a_chunk_have_no_error_and_evaluation_ends_there() -> None:
    flow = policy_of(steps=4).flow
    actions = torch.rand(ROWS, CHUNK, ACTION, generator=torch.Generator().manual_seed(1)) * 1.6 - 0.8
    straight = lambda x, time: (x, (actions - x) / (1 - time)[:, None, None])  # noqa: E731
    start, time = flow.parts_of(flow.imitation_noise().draw(0, "clone", range(ROWS)))
    assert flow.matching_error(straight, start, time, actions).abs().max() < 1e-4
    field = lambda x, time: (straight(x, time)[1], None)  # noqa: E731
    noise = torch.randn(ROWS, 1, CHUNK, ACTION, generator=torch.Generator().manual_seed(2))
    greedy = flow.act(field, noise, 0.0, torch.zeros(ROWS, dtype=torch.long))
    torch.testing.assert_close(greedy.actions, actions)


def test_behaviour_cloned_chains_end_at_demonstrated_chunks_from_any_noise() -> None:
    policy, start = policy_of(steps=4), policy_of().spec.greedy_noise
    assert policy.imitation_noise is not None
    assert start is not None
    chunks = torch.rand(ROWS, CHUNK, ACTION, generator=torch.Generator().manual_seed(1)) * 1.6 - 0.8
    features, optimizer = policy.encode(seen()), torch.optim.Adam(policy.imitation_parameters(whole=False), lr=2e-3)
    for update in range(200):
        rows = range(update * ROWS, (update + 1) * ROWS)
        optimizer.zero_grad()
        policy.imitation_loss(features, chunks, {"noise": policy.imitation_noise.draw(0, "clone", rows)}).backward()
        optimizer.step()
    draws = [start.draw(1, "test", range(n * ROWS, (n + 1) * ROWS)) for n in range(16)]
    ends = torch.stack([policy.act(features, noise, 0.0).actions for noise in draws])
    assert (ends - chunks).square().mean().sqrt() < 0.15  # 0.3 to 0.5 if the network predicts v from one draw of noise


@pytest.mark.parametrize("steps", [1, 2, 4, 10])
def test_real_time_chunking_never_takes_a_chain_past_the_chunk_before(steps: int, monkeypatch) -> None:
    policy = policy_of(steps=steps)
    still = lambda features: lambda x, time: (x, torch.zeros_like(x))  # noqa: E731
    monkeypatch.setattr(policy, "_expert", still)
    left = torch.rand(ROWS, CHUNK, ACTION, generator=torch.Generator().manual_seed(1)) - 0.5
    features = {"proprio": torch.zeros(ROWS, 6), "pending.actions": left, "pending.weights": torch.ones(ROWS, CHUNK)}
    noise = torch.randn(ROWS, 1, CHUNK, ACTION, generator=torch.Generator().manual_seed(2))
    chain = policy.act(features, noise, 0.0).record["chain"].unbind(1)
    missing = [(left - x) * (left - chain[0]).sign() for x in chain]  # below 0: on the other side
    assert all(((now < before + 1e-5) & (now > -1e-5)).all() for before, now in itertools.pairwise(missing))


@pytest.mark.parametrize("steps", [4, 10])
def test_evaluations_draw_the_rest_of_a_chunk_along_with_what_they_draw(steps: int, monkeypatch) -> None:
    # chunks whose actions are nearly equal: if the first is drawn to 1, the others should follow
    policy, rows = policy_of(steps=steps), 400
    covariance = torch.ones(CHUNK, CHUNK) + 0.01 * torch.eye(CHUNK)

    def field(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity of straight lines from N(0, I) to chunks with this covariance: E[x_1 - x_0 | x_t = x]."""
        t, one = float(time[0]), torch.eye(CHUNK)
        towards = (t * covariance - (1 - t) * one) @ ((1 - t) ** 2 * one + t**2 * covariance).inverse()
        return x, torch.einsum("cd,bda->bca", towards, x)

    monkeypatch.setattr(policy, "_expert", lambda features: field)
    monkeypatch.setattr(policy, "_actions", lambda features, x: x)
    weights = torch.zeros(rows, CHUNK)
    weights[:, 0] = 1.0
    noise = torch.randn(rows, 1, CHUNK, ACTION, generator=torch.Generator().manual_seed(2))
    features = {
        "proprio": torch.zeros(rows, 6),
        "pending.actions": torch.ones(rows, CHUNK, ACTION),
        "pending.weights": weights,
    }
    drawn = policy.act(features, noise, 0.0).actions
    monkeypatch.setattr(policy, "_field", lambda features, deterministic: type(policy)._field(policy, features))
    as_in_lerobot = policy.act(features, noise, 0.0).actions
    own, other = ((x[:, 1:] - x[:, :1]).square().mean().sqrt() for x in (drawn, as_in_lerobot))
    assert drawn.mean((0, 2)).min() > 0.7
    assert own < 0.2  # of the chunks themselves: 0.14
    assert other > 0.3


def test_an_episode_that_is_not_guided_does_not_depend_on_others_that_are() -> None:
    policy = policy_of(steps=4)
    assert policy.spec.greedy_noise is not None
    noise = policy.spec.greedy_noise.draw(1, "test", range(ROWS))
    left = torch.rand(ROWS, CHUNK, ACTION, generator=torch.Generator().manual_seed(1)) - 0.5
    actions = []
    for weight in (0.0, 1.0):
        weights = torch.zeros(ROWS, CHUNK)
        weights[1:] = weight
        features = {**policy.encode(seen()), "pending.actions": left, "pending.weights": weights}
        actions.append(policy.act(features, noise, 0.0).actions)
    assert torch.equal(actions[0][0], actions[1][0])
    assert not torch.equal(actions[0][1:], actions[1][1:])
