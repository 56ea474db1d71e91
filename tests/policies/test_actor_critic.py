"""Actor and critic: distributions against torch's, statistics against numpy's, equal weights under two plans."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import digest, executor_for, iterate, tiny, train, trees
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from policies.action_distributions import Categorical, Gaussian, SquashedGaussian
from policies.actor_critic import ActorCritic
from policies.running_statistics import RunningStatistics
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.policies import HasRunningStatistics, ImitationPolicy
from rlinf_embodied.runtime.session import SerialSession
from tests.observations import env_spec, observed
from tests.policy_contract import require_contract

STATE = env_spec("Task-v0", 4, 1, 10, 2, 5, 7, 16, ())
IMAGE = env_spec("Task-v0", 4, 1, 10, 2, 0, 2, 16, ("rgb_array",))
CHOICE = replace(STATE, action_dim=3, categorical=True)
CONFIG = compose_train(["env=gymnasium", "policy=actor_critic", "algorithm=ppo_mujoco"]).policy
APART = (2, trees("0:1/2", "1/2:1", "1/2:1", shards=2))
TOGETHER = (1, trees("all", "all", "all"))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def seen(env: EnvSpec, rows: int = 4) -> Observation:
    size = (rows, len(env.cameras), 16, 16, 3)
    images = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return observed(drawn(rows, env.proprio_dim), ("",) * rows, images if env.cameras else None, None)


def made(env: EnvSpec, **options: object) -> ActorCritic:
    return ActorCritic(replace(CONFIG, options=dict(options)), env, seed=3)


@pytest.mark.parametrize(
    "env", [STATE, IMAGE, CHOICE, replace(STATE, chunk=3)], ids=["state", "image", "choice", "chunk"]
)
@pytest.mark.parametrize("distribution", ["auto", "squashed_gaussian"])
def test_it_keeps_the_protocol_on_every_kind_of_env(env: EnvSpec, distribution: str) -> None:
    if env.categorical and distribution != "auto":
        pytest.skip("a choice is categorical")
    policy = made(env, distribution=distribution)
    require_contract(policy, policy.config, env, seen(env))
    assert isinstance(policy, HasRunningStatistics)
    assert not isinstance(policy, ImitationPolicy)  # nothing is measured by random actions, and nothing is cloned


def test_a_gaussian_is_torchs_normal_at_its_temperature() -> None:
    out, log_std, noise = drawn(4, 2, 3), torch.tensor([[0.1, -0.4, 0.0]] * 2), drawn(4, 2, 3) + 0.3
    sample = Gaussian(2, 3).draw(out, log_std, noise, 0.5)
    expected = Normal(out, log_std.exp() * 0.5)
    log_probs, entropy = Gaussian(2, 3).scored(out, log_std, sample, 0.5)
    assert torch.allclose(sample, out + noise * log_std.exp() * 0.5)
    assert torch.allclose(log_probs, expected.log_prob(sample), atol=1e-6)
    assert torch.allclose(entropy, expected.entropy(), atol=1e-6)
    assert torch.equal(Gaussian(2, 3).draw(out, log_std, None, 0.5), out)


def test_a_squashed_gaussian_is_torchs_tanh_of_a_normal_also_far_out() -> None:
    out, log_std = drawn(4, 1, 3), torch.zeros(1, 3)
    sample = torch.cat([drawn(3, 1, 3), torch.full((1, 1, 3), 9.0)])
    expected = TransformedDistribution(Normal(out.double(), 1.0), TanhTransform(cache_size=1))
    action = expected.transforms[0](sample.double())  # cached, so that the inverse is exact
    log_probs, entropy = SquashedGaussian(2, 3).scored(out, log_std, sample, 1.0)
    assert torch.allclose(log_probs, expected.log_prob(action).float(), atol=1e-4)
    assert entropy is None
    assert float(SquashedGaussian(2, 3).actions(sample).abs().max()) <= 1


def test_a_categorical_is_torchs_and_its_action_points_at_the_choice() -> None:
    logits, noise = drawn(2000, 1, 3), torch.rand(2000, 1, generator=torch.Generator().manual_seed(1))
    choice = Categorical(1, 3).draw(logits[:1].expand_as(logits), None, noise, 1.0)
    shares = torch.bincount(choice[:, 0], minlength=3) / 2000
    assert torch.allclose(shares, logits[0, 0].softmax(-1), atol=0.04)
    with torch.no_grad():  # the entropy is there also for those that only look
        log_probs, entropy = Categorical(1, 3).scored(logits, None, choice, 2.0)
    expected = TorchCategorical(logits=logits / 2.0)
    assert torch.allclose(log_probs[..., 0], expected.log_prob(choice), atol=1e-6)
    assert entropy is not None
    assert torch.allclose(entropy[..., 0], expected.entropy(), atol=1e-6)
    assert torch.equal(Categorical(1, 3).actions(choice).argmax(-1), choice)


def test_running_statistics_are_those_of_all_rows_however_they_came() -> None:
    rows = drawn(1000, 3).double().numpy() * [1.0, 50.0, 0.0] + [3.0, 1e4, 7.0]
    statistics = RunningStatistics(3)
    for part in np.split(rows, [10, 400]):
        blocks = [statistics.sums(torch.from_numpy(half)) for half in np.array_split(part, 2)]
        statistics.absorb(blocks[0] + blocks[1])
    assert np.allclose(statistics.mean.numpy(), rows.mean(0), rtol=1e-12)
    assert np.allclose(statistics.var.numpy(), rows.var(0), rtol=1e-9, atol=1e-12)
    assert float(statistics.count) == 1000
    assert statistics.std()[2] == 1  # of a column that never changes
    assert float(statistics.standardise(torch.tensor([[1e9, 1e4, 7.0]]), 10.0).max()) == 10


def test_no_columns_have_no_statistics() -> None:
    statistics = RunningStatistics(0)
    statistics.absorb(statistics.sums(torch.zeros(4, 0)))
    assert float(statistics.count) == 4


def test_values_stay_where_they_were_when_the_scale_of_returns_changes() -> None:
    policy, features = made(STATE), made(STATE).encode(seen(STATE))
    before = policy.value(features, None)
    total = policy.statistics_sums({"raw_state": torch.zeros(0, 5)}, drawn(50, 1) * 300)
    policy.update_statistics(total)
    assert float(policy.module.return_statistics.std()) > 200
    assert torch.allclose(policy.value(features, None), before, atol=1e-5)


def test_a_critics_gradient_does_not_grow_with_the_scale_of_returns() -> None:
    norms = []
    for scale in (1.0, 1000.0):
        policy = made(STATE)
        policy.update_statistics(policy.statistics_sums({"raw_state": torch.zeros(0, 5)}, drawn(50, 1) * scale))
        features, target = policy.encode(seen(STATE)), drawn(4, 1) * scale
        with torch.no_grad():
            policy.module.last_of_critic.weight.mul_(scale)  # alike in deviations
        (policy.value(features, None) - target).square().mean().backward()
        bias = policy.module.last_of_critic.bias.grad
        assert bias is not None
        norms.append(float(bias.norm()))
    assert math.isclose(norms[0], norms[1], rel_tol=1e-3)


@pytest.mark.parametrize(
    ("env", "changes", "message"),
    [
        (STATE, {"critic": "privileged"}, "policy.critic is 'privileged'"),
        (STATE, {"options": {"distribution": "categorical"}}, "policy.options.distribution is 'categorical'"),
        (CHOICE, {"options": {"distribution": "gaussian"}}, "policy.options.distribution is 'gaussian'"),
        (STATE, {"options": {"distribution": "beta"}}, "it is one of auto, gaussian"),
        (STATE, {"options": {"normalise": True}}, "policy.options.normalise is True"),
        (env_spec("Task-v0", 4, 1, 10, 2, 0, 7), {}, "env.cameras"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key_to_change(env: EnvSpec, changes: dict, message: str) -> None:
    critic = type(CONFIG.critic)(changes.pop("critic", CONFIG.critic))
    with pytest.raises(ConfigError, match=message):
        ActorCritic(replace(CONFIG, critic=critic, **changes), env, 0)


# ------------------------------------------------------------------------------------------------------------ training
def on_point_reach(*overrides: str) -> TrainConfig:
    given = [
        "policy=actor_critic",
        "policy.options.hidden_size=16",
        "algorithm=ppo_mujoco",
        "algorithm.num_minibatches=2",
    ]
    return tiny(*given, "algorithm.bootstrap_at_timeout=true", *overrides)


PLANNED = {"state": ["env.cameras=[]"], "images": ["env.cameras=[a,b]"], "history": ["env.history=2"]}


@pytest.mark.parametrize("overrides", PLANNED.values(), ids=PLANNED)
def test_plans_give_the_same_weights_and_statistics(tmp_path: Path, overrides: list[str]) -> None:
    config = on_point_reach(*overrides)
    train(on_point_reach(*overrides, f"run.dir={tmp_path / 'run'}", "run.num_iterations=0"))
    start, found = tmp_path / "run/checkpoints/latest", []
    for devices, tree in (TOGETHER, APART):
        session = SerialSession()
        executor = executor_for(config, tree, devices, session, start)
        metrics = iterate(config, executor, 3)
        module = next(h for h in session._hosts.values() if "actor" in h.stages).stages["actor"].shared.policy.module  # pyright: ignore[reportAttributeAccessIssue]
        found.append((digest(executor), float(module.state_statistics.count), float(module.return_statistics.count)))
        assert all(m["losses/initial_log_ratio"] <= 1e-5 for m in metrics)
    assert found[0] == found[1]
    assert found[0][1] == 3 * 16 * 4  # iterations, rows, chunk-steps
    assert 3 * 16 * 4 < found[0][2] <= 3 * 16 * 4 * 4  # and of a chunk's actions those before an episode's end


def test_slices_of_the_weights_are_refused_since_statistics_would_miss_them(tmp_path: Path) -> None:
    config = on_point_reach(
        *("env.cameras=[]", "algorithm.sharding=fsdp2", "algorithm.one_optimizer=false"), f"run.dir={tmp_path}"
    )
    with pytest.raises(Exception, match=r"algorithm\.sharding is 'fsdp2', but the policy's running statistics"):
        train(config)


@pytest.mark.slow
def test_a_pole_is_balanced_without_its_speed_by_two_env_steps_and_not_by_one(tmp_path: Path) -> None:
    found = []
    for history in (1, 2):
        given = ["env=gymnasium", "env.task=gym_envs:StillCartPole-v0", "env.horizon=500", f"env.history={history}"]
        given += ["policy=actor_critic", "algorithm=ppo_mujoco", "cluster=serial", "plan=collocated", "run.seed=1"]
        given += ["run.num_iterations=12", "eval.num_episodes=20", f"run.dir={tmp_path / str(history)}"]
        found.append(train(compose_train(given))["after"]["return"])
    assert found[0] < 80
    assert found[1] > 250
