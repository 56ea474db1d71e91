"""The loss of one batch under the preset of a publication is that publication's formula, written out row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from control_runs import learning
from torch import Tensor

from policies.soft_actor import SoftActor
from rlinf_embodied.algorithms.batch import EnvColumns, PolicyColumns, TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Objective, OnPolicyConfig
from rlinf_embodied.algorithms.grpo import grpo_block
from rlinf_embodied.algorithms.iql import IQL
from rlinf_embodied.algorithms.on_policy import POLICY
from rlinf_embodied.algorithms.ppo import PPO
from rlinf_embodied.algorithms.sac import SAC
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import PolicyConfig, TrainConfig
from rlinf_embodied.interfaces.policies import Evaluation
from rlinf_embodied.learning import update
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.optimizer import linear_decay
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.host import StepContext
from tests.observations import env_spec, observed

ROWS, C, K = 24, 4, 3  # chunks, their actions, tokens of an action


@dataclass
class Batch:
    block: TrainingBlock
    scored: Evaluation  # by the weights of now


def preset(name: str, *overrides: str) -> TrainConfig:
    return compose_train([f"algorithm={name}", *overrides])


def drawn(advantages: Tensor | None = None, seed: int = 0) -> Batch:
    """Returns chunks of which some lack their last action; ratios and values lie in and outside of all clip ranges."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    valid = torch.ones(ROWS, C, dtype=torch.bool)
    valid[::3, -1] = False
    values, old = draw(ROWS, C), -2 + draw(ROWS, C, K)
    given = draw(ROWS, C) if advantages is None else advantages
    returns = values + 8 * draw(ROWS, C)
    block = TrainingBlock({}, {}, old, valid, given, valid.float(), None, values, returns)
    now = (old + 0.7 * draw(ROWS, C, K)).requires_grad_()
    return Batch(block, Evaluation(now, values=(values + 0.3 * draw(ROWS, C)).requires_grad_()))


def found(config: OnPolicyConfig, batch: Batch, joint: bool) -> float:
    """Returns the mean loss that a step descends."""
    objective = Objective(config, 1.0, lambda *rows: batch.scored, lambda *rows: batch.scored.values, joint)  # pyright: ignore
    (one,) = objective.policy_passes({0: batch.block}, {0: torch.arange(ROWS)})
    sums = one.run()
    return float(sums.loss.detach() / sums.weight)


def columns_of(batch: Batch, block: TrainingBlock) -> list[Tensor]:
    """Returns log-probs and values of now, values before and returns."""
    found = (batch.scored.log_probs, batch.scored.values, block.values, block.returns)
    return [cast(Tensor, column).detach() for column in found]


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float = math.inf) -> float:
    """-min(r A, clip(r) A), where A < 0 at most -dual A."""
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(loss, -dual * advantage) if advantage < 0 else loss


def mean_over(batch: Batch, term) -> float:
    """Returns the mean of term(row, action) over actions that count."""
    places = batch.block.valid.nonzero().tolist()
    return sum(term(row, action) for row, action in places) / len(places)


def test_ppo_of_rlinf_vla() -> None:
    """losses.py: max(L1, L2), min with 3 |A|; the larger of two Huber losses of values; their sum; AdamW, norm 10."""
    config = preset("rlinf_vla_ppo", "policy=openvla", "policy.critic=observation").algorithm
    batch, block = drawn(), drawn().block
    now, values, before, goals = columns_of(batch, block)

    def huber(error: float) -> float:
        return 0.5 * error**2 if abs(error) < 10.0 else 10.0 * (abs(error) - 5.0)

    def term(row: int, action: int) -> float:
        ratio = float((now[row, action] - block.old_log_probs[row, action]).sum().exp())
        policy = clipped(ratio, float(block.advantages[row, action]), 0.2, 0.2, 3.0)
        value, old, goal = (float(t[row, action]) for t in (values, before, goals))
        near = old + min(max(value - old, -0.2), 0.2)
        return policy + max(huber(goal - value), huber(goal - near))

    assert found(config, batch, joint=True) == pytest.approx(mean_over(batch, term), rel=1e-5)
    adam = (config.lr, config.value_lr, config.beta1, config.beta2, config.adam_eps, config.weight_decay)
    assert adam == (1e-4, 3e-3, 0.9, 0.999, 1e-8, 0.01)
    assert (config.max_grad_norm, config.gamma, config.gae_lambda) == (10.0, 0.99, 0.95)
    assert linear_decay(40, 50, config.lr, config.lr_end_fraction) == config.lr
    rollout = preset("rlinf_vla_ppo", "env.chunk=1").env
    assert rollout.num_envs * rollout.chunks_per_rollout / config.num_minibatches == 640  # actor.global_batch_size


@pytest.mark.parametrize(
    ("name", "lr", "dual", "rows"), [("rlinf_vla_grpo", 2e-5, 3.0, 1024), ("simplevla_rl", 5e-6, math.inf, 512)]
)
def test_grpo_of_openvla_oft(name: str, lr: float, dual: float, rows: int) -> None:
    """Tokens have ratios, an episode's mean over its tokens counts alike, A = (R - mean) / (std + 1e-6) of a group."""
    whole = preset(name)
    config, size = whole.algorithm, 8
    lengths = torch.tensor([2, 4, 8, 5, 8, 3, 1, 8])  # actions of the eight episodes of a group
    success = torch.tensor([True, False, False, True, False, True, True, False])
    steps = torch.arange(8).reshape(2, 1, 4).expand(2, size, 4)  # two chunks of 4 actions
    valid, no = steps < lengths[None, :, None], torch.zeros(2, size, 4, dtype=torch.bool)
    generator = torch.Generator().manual_seed(1)
    old = -1 + torch.randn(2, size, 4, K, generator=generator)
    start = observed(torch.zeros(size, 1), ("",) * size)
    index = torch.zeros(0, 2, dtype=torch.long)
    env = EnvColumns(torch.zeros(2, size, 4), no, no, valid, None, start, index, None, success)
    order = torch.arange(2 * size).reshape(2, size)
    block = grpo_block([(PolicyColumns({"order": order}, {}, old, 0), env)], config, 0, {(0, 0)})
    now = (old + torch.randn(old.shape, generator=generator)).flatten(0, 1)
    batch = Batch(block, Evaluation(now[block.features["order"]].requires_grad_()))
    objective = Objective(config, 1.0, lambda *rows: batch.scored, lambda *rows: now, joint=False)
    (one,) = objective.policy_passes({0: block}, {0: torch.arange(len(block))})
    sums = one.run()
    rewards = success.float().numpy()
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    expected = 0.0
    for row in range(size):
        places = [(h, c, k) for h, c in valid[:, row].nonzero().tolist() for k in range(K)]
        ratios = [float((now.unflatten(0, (2, size))[h, row, c, k] - old[h, row, c, k]).exp()) for h, c, k in places]
        losses = [clipped(ratio, float(advantages[row]), 0.2, 0.28, dual) for ratio in ratios]
        expected += sum(losses) / len(losses) / size
    assert float(sums.loss.detach() / sums.weight) == pytest.approx(expected, rel=1e-4)
    assert (config.lr, config.adam_eps, config.weight_decay, config.max_grad_norm) == (lr, 1e-8, 0.01, 1.0)
    assert (whole.env.num_envs, whole.env.chunk, config.group_size, config.num_minibatches) == (rows, 8, 8, 4)
    assert (whole.policy.temperature, config.epochs, config.kl_coef, config.entropy_coef) == (1.6, 1, 0.0, 0.0)
    assert linear_decay(40, 50, config.lr, config.lr_end_fraction) == config.lr


def test_ppo_of_the_37_details(monkeypatch) -> None:
    """cleanrl: advantages of a minibatch have mean 0 and std 1; values are clipped by 0.2; v_loss x 0.5; one norm."""
    config = preset("ppo_mujoco", "env=gymnasium", "policy=actor_critic").algorithm
    batch = drawn()
    samples, raw = batch.block, batch.block.advantages.clone()
    ppo = PPO.__new__(PPO)
    ppo.algorithm, ppo._blocks, ppo._iteration = replace(config, epochs=1, num_minibatches=1), {0: samples}, 0
    ppo.training = SimpleNamespace(seed=0, reducer=Reducer(SoloGroup(), (0,)))  # pyright: ignore
    ppo.learners, ppo._objective = {POLICY: None}, SimpleNamespace(policy_passes=lambda blocks, rows: blocks[0])  # pyright: ignore
    monkeypatch.setattr(update, "fit", lambda learner, batches, passes, stop: [passes(rows) for rows in batches])
    ppo.cloning = None
    (batch.block,) = ppo._policy_steps()  # pyright: ignore
    now, values, before, goals = columns_of(batch, samples)
    kept = raw[samples.valid].double().numpy()
    standard = (raw.double().numpy() - kept.mean()) / (kept.std(ddof=1) + 1e-8)

    def term(row: int, action: int) -> float:
        ratio = float((now[row, action] - samples.old_log_probs[row, action]).sum().exp())
        value, old, goal = (float(t[row, action]) for t in (values, before, goals))
        near = old + min(max(value - old, -0.2), 0.2)
        v_loss = 0.5 * max((value - goal) ** 2, (near - goal) ** 2)
        return clipped(ratio, float(standard[row, action]), 0.2, 0.2) + 0.5 * v_loss

    assert found(config, batch, joint=True) == pytest.approx(mean_over(batch, term), rel=1e-5)
    assert (config.one_optimizer, config.lr, config.adam_eps, config.max_grad_norm) == (True, 3e-4, 1e-5, 0.5)
    assert (config.epochs, config.num_minibatches, config.target_kl) == (10, 32, None)
    assert linear_decay(99, 100, config.lr, config.lr_end_fraction) == 0.0
    gym = preset("ppo_mujoco", "env=gymnasium", "policy=actor_critic").env
    assert gym.num_envs * gym.chunks_per_rollout == 2048


# ------------------------------------------------------------------------------------------------------- transitions
STATE, ACTION = 3, 2
SPEC = env_spec("Some-v0", 8, 1, 10, ACTION, STATE)


def transitions() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    columns = {"state": draw(ROWS, STATE), "next_state": draw(ROWS, STATE), "reward": draw(ROWS)}
    columns["action"] = torch.rand(ROWS, ACTION, generator=generator) * 1.8 - 0.9
    return columns | {"terminated": (torch.rand(ROWS, generator=generator) < 0.3).float()}


def replay(name: str, *overrides: str) -> TrainConfig:
    small = ["env=point_reach", "policy=soft_actor", "env.cameras=[]", "env.hold_steps=1", *overrides]
    return preset(name, *small)


@pytest.mark.parametrize(("name", "critics"), [("sac", 2), ("rlpd", 10)])
def test_critics_of_sac_and_rlpd(name: str, critics: int) -> None:
    """sac_learner.py: y = r + gamma mask (min of two targets - [backup_entropy] alpha log pi), mean (Q - y)^2."""
    config, columns = replay(name).algorithm, transitions()
    policy = SoftActor(PolicyConfig(), SPEC, seed=1)
    made = learning(SAC, policy, config)
    noise = policy.spec.noise.draw(0, "test", np.arange(ROWS))
    members = torch.tensor([4, 7]) if name == "rlpd" else None
    sums = made._critic_sums(columns | {"noise": noise[None]}, torch.tensor(0.3), members)
    with torch.no_grad():
        actions, log_probs = policy.sample({"state": columns["next_state"]}, noise)
        after = torch.cat([columns["next_state"], actions.flatten(1)], 1)
        of_targets, of_critics = (
            [made.modules[kind](rows)[k] for k in range(critics)]
            for kind, rows in (
                ("target_critics", after),
                ("critics", torch.cat([columns["state"], columns["action"]], 1)),
            )
        )
    loss = 0.0
    for row in range(ROWS):
        best = min(float(of_targets[k][row]) for k in ((4, 7) if name == "rlpd" else (0, 1)))
        bonus = 0.3 * float(log_probs[row].sum()) if name == "sac" else 0.0  # config.backup_entropy=False: Adroit
        goal = float(columns["reward"][row]) + 0.99 * (1 - float(columns["terminated"][row])) * (best - bonus)
        loss += sum((float(q[row]) - goal) ** 2 for q in of_critics)
    assert float(sums.loss.detach()) == pytest.approx(loss / 2, rel=1e-4)  # Adam does not see the factor
    assert (config.lr, config.value_lr, config.tau, config.batch_size) == (3e-4, 3e-4, 0.005, 256)
    if name == "rlpd":
        assert (config.layer_norm, config.target_critics, config.updates_per_step, config.policy_period) == (
            True,
            2,
            20,
            20,
        )
        assert (config.demonstration_share, config.entropy_per_dimension, config.critic_layers) == (0.5, -0.5, 3)


def test_policy_of_rlpd_climbs_the_mean_of_its_critics_and_that_of_sac_their_minimum() -> None:
    columns, policy = transitions(), SoftActor(PolicyConfig(), SPEC, seed=1)
    noise = policy.spec.noise.draw(0, "test", np.arange(ROWS))
    for name in ("sac", "rlpd"):
        made = learning(SAC, policy, replay(name).algorithm)
        sums = made._policy_sums(columns | {"noise": torch.stack([noise, noise])}, torch.tensor(0.3))
        with torch.no_grad():
            actions, log_probs = policy.sample({"state": columns["state"]}, noise)
            q = made.modules["critics"](torch.cat([columns["state"], actions.flatten(1)], 1))
        best = q.min(0).values if name == "sac" else q.mean(0)
        assert float(sums.statistics[0]) == pytest.approx(float((0.3 * log_probs.sum(-1) - best).sum()), rel=1e-4)
        (slope,) = torch.autograd.grad(sums.loss, made._log_coef)  # sac.py: -log(alpha) (log pi + target entropy)
        entropy = {"sac": -ACTION, "rlpd": -ACTION / 2}[name]
        assert float(slope) == pytest.approx(-float((log_probs.sum(-1) + entropy).sum()), rel=1e-4)


def test_numbers_of_sac_are_those_of_the_authors_variants() -> None:
    config = replay("sac").algorithm
    assert (config.gamma, config.target_critics, config.critic_layers, config.critic_hidden_size) == (0.99, 2, 2, 256)
    assert (config.initial_entropy_coef, config.capacity, config.warmup_steps) == (1.0, 1_000_000, 1_000)
    assert (config.updates_per_step, config.policy_period, config.expert_steps) == (1, 1, 0)
    assert (config.beta1, config.beta2, config.adam_eps, config.weight_decay) == (0.9, 0.999, 1e-8, 0.0)


def test_iql() -> None:
    """learner.py: V, then the policy by exp(3 (Q - V)) up to 100, then Q towards r + gamma mask V(s'); a cosine."""
    config, columns = replay("iql", "data=x", "run.num_iterations=4").algorithm, transitions()
    policy = SoftActor(PolicyConfig(), SPEC, seed=1)
    made = learning(IQL, policy, config)
    value, policy_sums = made._value_sums(columns), made._policy_sums(columns)
    critics = made._critic_sums(columns)
    with torch.no_grad():
        both = torch.cat([columns["state"], columns["action"]], 1)
        q, now = made.modules["target_critics"](both).min(0).values, made.modules["critics"](both)
        v, later = (made.modules["value"](columns[name])[0] for name in ("state", "next_state"))
        log_probs = policy.log_density({"state": columns["state"]}, columns["action"][:, None]).sum(-1)
    u = [float(a - b) for a, b in zip(q, v, strict=True)]
    assert float(value.loss.detach()) == pytest.approx(sum((0.7 if x > 0 else 0.3) * x**2 for x in u), rel=1e-4)
    made.algorithm = replace(config, advantage_limit=0.1)  # the preset's 100 is out of reach
    for sums, limit in ((policy_sums, 100.0), (made._policy_sums(columns), 0.1)):
        weights = [min(math.exp(3.0 * x), limit) for x in u]
        expected = -sum(w * float(p) for w, p in zip(weights, log_probs, strict=True))
        assert float(sums.loss.detach()) == pytest.approx(expected, rel=1e-4)
    made.algorithm = config
    goal = columns["reward"] + 0.99 * (1 - columns["terminated"]) * later
    assert float(critics.loss.detach()) == pytest.approx(float((now - goal).square().sum()) / 2, rel=1e-4)
    assert (config.lr, config.tau, config.cosine) == (3e-4, 0.005, True)
    data = {0: {name: column[None].repeat(2, *[1] * column.dim()) for name, column in columns.items()}}
    made.training = replace(made.training, num_iterations=4)
    made.update(StepContext(3), data)  # the last update is the second of iteration 3
    assert made.learners["policy_optimizer"].lr == pytest.approx(3e-4 * (1 + math.cos(math.pi * 3.5 / 4)) / 2)
