"""One contract for every policy on a simulator: the one that sees, the one on the state, the one of the docs.

For your own policy alone: `python -m pytest tests/policies/test_policy_contract.py --policy=<yaml>`, on what the
env of `--env=<yaml>` shows, or else on random observations of PickCube's sizes, with a camera if the policy takes one
(docs/own_policy.md).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rlinf_embodied.compose import compose_evaluate, compose_train
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.policy_folder import load_policy, new_policy, require_policy_class, save_policy
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import ACTION_IS_PAD, Features, ImitationPolicy, Policy
from tests.observations import env_spec, observed
from tests.policy_contract import require_contract, value_of

ROWS = 6
PICK = env_spec("PickCube-v1", ROWS, 5, 50, 7, 34, 50, 64, ("base_camera",))
EXAMPLE = Path(__file__).resolve().parents[2] / "experiments/examples/own_policy.yaml"
KINDS = ["tiny_vla", "flow_vla", "state", "actor_critic", "soft_actor"]
KINDS += [pytest.param(str(EXAMPLE), id=EXAMPLE.stem)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs every test on every policy, or on that of --policy alone."""
    own = metafunc.config.getoption("--policy")
    if "config" in metafunc.fixturenames:
        kinds = KINDS if own is None else [pytest.param(own, id=Path(own).stem)]
        metafunc.parametrize("config", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def config(request: pytest.FixtureRequest) -> PolicyConfig:
    """The section of a policy."""
    if request.param == str(EXAMPLE):
        sys.path.append(str(EXAMPLE.parent))
    section = compose_train([f"policy={request.param}", "warm_start.from_scratch=true"]).policy
    require_policy_class(section, cloned=False)
    return section


@pytest.fixture(scope="module")
def shown(config: PolicyConfig, request: pytest.FixtureRequest) -> tuple[EnvSpec, Observation]:
    """What the policy acts in, and a first observation of it."""
    path = request.config.getoption("--env")
    if path is not None:
        env = make_env(compose_evaluate([f"env={path}", "policy=random"]).env, ROWS, "cpu")
        seen = env.reset(range(ROWS))
        env.close()
        return env.spec, seen
    try:
        new_policy(config, PICK, 0, "cpu")
    except ConfigError:  # it takes no cameras
        return replace(PICK, features=PICK.features[1:]), drawn(0)
    return PICK, drawn(1)


def drawn(cameras: int) -> Observation:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (ROWS, cameras, 64, 64, 3), generator=draw, dtype=torch.uint8) if cameras else None
    proprio = torch.randn(ROWS, PICK.proprio_dim, generator=draw)
    return observed(proprio, ("pick up the cube",) * ROWS, images, torch.randn(ROWS, 50, generator=draw))


@pytest.fixture
def policy(config: PolicyConfig, shown: tuple[EnvSpec, Observation]) -> Policy:
    return new_policy(config, shown[0], 3, "cpu")


@pytest.fixture
def features(policy: Policy, shown: tuple[EnvSpec, Observation]) -> Features:
    return policy.encode(shown[1])


def trained(policy: Policy) -> set[int]:
    """Returns which parameters the last backward pass reached."""
    return {id(p) for p in policy.module.parameters() if p.grad is not None and bool(p.grad.abs().max() > 0)}


def ids(parameters: list[nn.Parameter]) -> set[int]:
    return {id(p) for p in parameters}


def test_its_methods_return_what_the_protocol_says(config, policy, shown) -> None:
    require_contract(policy, config, *shown)


def test_its_weights_follow_from_the_seed_alone(config, shown) -> None:
    before = torch.random.get_rng_state()
    first, same, other = (new_policy(config, shown[0], seed, "cpu").module.state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator was used: see torch.random.fork_rng"
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def require_tokens(policy, features, config) -> None:
    if set(policy.act(features, None, config.temperature).record) != {"tokens"}:
        pytest.skip("its choices are no tokens")


def test_the_probabilities_of_the_first_token_add_up_to_1(config, policy, features, shown) -> None:
    require_tokens(policy, features, config)
    shape = (ROWS, policy.spec.chunk, policy.spec.action_dim)
    every = [{"tokens": torch.full(shape, value)} for value in range(policy.options.num_bins)]
    total = sum(policy.evaluate(features, record, config.temperature).log_probs[:, 0, 0].exp() for record in every)
    assert torch.allclose(torch.as_tensor(total), torch.ones(ROWS), atol=1e-4)


def test_more_noise_chooses_a_later_token(config, policy, features) -> None:
    require_tokens(policy, features, config)
    shape = (ROWS, policy.spec.chunk, policy.spec.action_dim)
    chosen = [
        policy.act(features, torch.full(shape, u), config.temperature).record["tokens"][:, 0, 0]
        for u in (1e-6, 0.5, 1 - 1e-6)
    ]
    assert bool((chosen[0] <= chosen[1]).all())
    assert bool((chosen[1] <= chosen[2]).all())
    assert bool((chosen[0] < chosen[2]).any())


def test_each_loss_reaches_its_own_parameters_alone(config, policy, features, shown) -> None:
    noise = policy.spec.noise.draw(0, "test", range(ROWS))
    record = policy.act(features, noise, config.temperature).record
    policy.evaluate(features, record, config.temperature).log_probs.sum().backward()
    assert set() < trained(policy) <= ids(policy.policy_parameters())
    policy.module.zero_grad(set_to_none=True)
    if not policy.value_parameters():
        pytest.skip("value_parameters() is empty: for GRPO only")
    value_of(config, policy, features, shown[1], policy.spec.chunk).sum().backward()
    assert set() < trained(policy) <= ids(policy.value_parameters())


def test_a_folder_restores_it(config, policy, features, shown, tmp_path) -> None:
    env = compose_evaluate(["env=point_reach", "policy=random"]).env
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(0.01)
    if isinstance(policy, ImitationPolicy):
        size = (shown[0].proprio_dim,)
        policy.set_statistics("proprio", torch.full(size, 0.5), torch.full(size, 2.0))
    save_policy(policy, tmp_path, env, config)
    again = load_policy(config, str(tmp_path), "cpu").policy
    before, after = policy.module.state_dict(), again.module.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    left, right = (p.act(p.encode(shown[1]), None, config.temperature) for p in (policy, again))
    assert torch.equal(left.actions, right.actions)


def test_cloning_draws_it_to_the_actions(config, policy, shown) -> None:
    try:
        require_policy_class(config, cloned=True)
    except ConfigError as error:
        pytest.skip(str(error))
    if not isinstance(policy, ImitationPolicy):
        pytest.skip(f"{config.name} is not cloned")
    env, seen = shown
    actions = torch.full((ROWS, env.chunk, env.action_dim), 0.5)
    optimizer = torch.optim.Adam(policy.imitation_parameters(True), 3e-3)
    losses = []
    noise = policy.imitation_noise
    targets = {} if noise is None else {"noise": noise.draw(0, "test", range(ROWS))}
    for _ in range(20):
        loss = policy.imitation_loss(policy.encode_trainable(seen), actions, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    padding = {ACTION_IS_PAD: torch.ones(ROWS, env.chunk, dtype=torch.bool)}  # which counts nothing
    assert policy.imitation_loss(policy.encode_trainable(seen), actions, targets | padding) == 0
