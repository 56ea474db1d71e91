"""With one optimizer of policy and critic an update is that of Stable-Baselines3's PPO: the same weights of a batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from control_runs import learning
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure
from torch import Tensor, nn

from policies.actor_critic import ActorCritic
from rlinf_embodied.algorithms import ppo as ppo_module
from rlinf_embodied.algorithms.batch import TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Objective
from rlinf_embodied.algorithms.on_policy import POLICY, VALUE_GROUP, replicated
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.learning.update import fit
from tests.observations import env_spec

STATE, ACTION, ROWS, EPOCHS, PIXELS = 5, 2, 24, 6, 36
SPEC = env_spec("Some-v0", 8, 1, 10, ACTION, STATE, 5, PIXELS, ())
SEEN = env_spec("Some-v0", 8, 1, 10, ACTION, STATE, 5, PIXELS, ("one",))  # the state and an image


class Space(gymnasium.Env):
    """Spaces, for whoever asks for them."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION,))

    def __init__(self, sees: bool) -> None:
        state = gymnasium.spaces.Box(-np.inf, np.inf, (STATE,))
        image = gymnasium.spaces.Box(0, 255, (PIXELS, PIXELS, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict({"image": image, "state": state}) if sees else state


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    words = ["env=gymnasium", "env.id=HalfCheetah-v5", "policy=actor_critic", "algorithm=ppo_mujoco"]
    words += ["algorithm.value_clip=null", "algorithm.value_coef=1.0", "algorithm.lr=3e-3"]
    return compose_train([*words, "policy.options.normalize_returns=false"])


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    """Samples of a policy that is a little apart from the one that learns, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "state": draw(ROWS, STATE),
        "images": torch.randint(256, (ROWS, 1, PIXELS, PIXELS, 3), dtype=torch.uint8, generator=generator),
        "action": 0.7 * draw(ROWS, ACTION),
        "log_prob": -1.5 + 0.3 * draw(ROWS, ACTION),  # of each entry of an action
        "advantage": draw(ROWS),
        "return": 5.0 * draw(ROWS),
    }


def samples(batch: dict[str, Tensor]) -> TrainingBlock:
    ones = torch.ones(ROWS, 1)
    return TrainingBlock(
        features={"state": batch["state"], "raw_state": batch["state"], "images": batch["images"]},
        record={"drawn": batch["action"][:, None]},
        old_log_probs=batch["log_prob"][:, None],
        valid=ones.bool(),
        advantages=batch["advantage"][:, None],
        weights=ones,
        privileged=None,
        values=torch.zeros(ROWS, 1),
        returns=batch["return"][:, None],
    )


def ours(config: TrainConfig, spec: EnvSpec, batch: dict[str, Tensor], num_blocks: int) -> ActorCritic:
    """Returns the policy after full-batch epochs."""
    policy = ActorCritic(config.policy, spec, seed=1)
    reducer = Reducer(SoloGroup(), (0,) * num_blocks)
    learners, joint = replicated(policy, config.algorithm, reducer)
    assert set(learners) == {POLICY}
    size, whole = ROWS // num_blocks, samples(batch)
    objective = Objective(config.algorithm, 1.0, policy.evaluate, policy.value, joint)
    passes = partial(objective.policy_passes, dict.fromkeys(range(num_blocks), whole))
    rows = {block: torch.arange(block * size, (block + 1) * size) for block in range(num_blocks)}
    fit(learners[POLICY], [rows] * EPOCHS, passes)
    return policy


def theirs(config: TrainConfig, spec: EnvSpec, batch: dict[str, Tensor]) -> PPO:
    """Returns SB3's model after its own `train` on the same batch, from our weights."""
    algorithm, sees = config.algorithm, bool(spec.cameras)
    settings = {"n_steps": ROWS, "batch_size": ROWS, "n_epochs": EPOCHS, "learning_rate": algorithm.lr}
    if sees:
        settings["policy_kwargs"] = {
            "net_arch": [],
            "features_extractor_kwargs": {"cnn_output_dim": ActorCritic.options_type().hidden_size},
        }
    kind = "MultiInputPolicy" if sees else "MlpPolicy"
    model = PPO(kind, Space(sees), normalize_advantage=False, device="cpu", **settings)
    assert (model.vf_coef, model.max_grad_norm, model.clip_range(1.0)) == (0.5, algorithm.max_grad_norm, 0.2)
    start = ActorCritic(config.policy, spec, seed=1)
    with torch.no_grad():
        for to, of in zip(_of_sb3(model), _of_ours(start), strict=True):
            to.copy_(of.reshape(to.shape))
    buffer = model.rollout_buffer
    for name, value in {
        "actions": batch["action"],
        "log_probs": batch["log_prob"].sum(-1),
        "advantages": batch["advantage"],
        "returns": batch["return"],
    }.items():
        getattr(buffer, name)[:] = value.numpy().reshape(getattr(buffer, name).shape)
    shown = {"state": batch["state"].numpy(), "image": batch["images"][:, 0].permute(0, 3, 1, 2).numpy()}
    for name in shown if sees else ():
        buffer.observations[name][:] = shown[name][:, None]
    if not sees:
        buffer.observations[:] = shown["state"][:, None]
    buffer.full = True
    model.set_logger(configure(format_strings=[]))
    model.train()
    return model


def _layers(network: nn.Module) -> list[Tensor]:
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    return [p for layer in layers for p in (layer.weight, layer.bias)]


def _of_ours(policy: ActorCritic) -> list[Tensor]:
    net = policy.module
    assert net.log_std is not None
    trunk = _layers(net.images) if net.has_images else []
    return [*trunk, *_layers(net.actor), *_layers(net.critic), net.log_std]


def _of_sb3(model: PPO) -> list[Tensor]:
    net = model.policy
    shared = net.mlp_extractor
    actor = [*_layers(shared.policy_net), *_layers(net.action_net)]
    trunk = _layers(net.features_extractor)  # nothing on a state
    return [*trunk, *actor, *_layers(shared.value_net), *_layers(net.value_net), net.log_std]


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("spec", [SPEC, SEEN], ids=["state", "images"])
def test_an_update_is_that_of_stable_baselines3(config, spec: EnvSpec, batch, num_blocks: int) -> None:
    start, found = _of_ours(ActorCritic(config.policy, spec, seed=1)), _of_ours(ours(config, spec, batch, num_blocks))
    expected = _of_sb3(theirs(config, spec, batch))
    for before, one, other in zip(start, found, expected, strict=True):
        torch.testing.assert_close(one, other.reshape(one.shape), rtol=1e-4, atol=2e-6)
        assert float((one - before).detach().abs().max()) > 1e-3, "nothing was learned"


def test_a_value_head_on_the_policys_trunk_has_its_own_rate_and_is_trained_alone_in_warm_up(config, batch) -> None:
    algorithm = replace(config.algorithm, one_optimizer=False, lr=1e-4, value_lr=3e-3)
    policy = ActorCritic(config.policy, SEEN, seed=1)
    learners, joint = replicated(policy, algorithm, Reducer(SoloGroup(), (0,)))
    learner = learners[POLICY]
    assert set(learners) == {POLICY}
    assert learner.rates == {"main": 1e-4, VALUE_GROUP: 3e-3}
    objective = Objective(algorithm, 1.0, policy.evaluate, policy.value, joint)
    block, start = samples(batch), {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    passes = partial(objective.value_passes, {0: block})
    learner.step({0: torch.arange(ROWS)}, passes, only=(VALUE_GROUP,))
    actor = {id(p) for p in policy.policy_parameters()}
    moved = {(id(p) in actor) for name, p in policy.module.named_parameters() if not torch.equal(p, start[name])}
    assert moved == {False}, "the trunk and the policy stay as they are"


@pytest.mark.parametrize(("bound", "steps"), [(0.5, 1.0), (1e-9, 1e-4)])
def test_the_gradient_of_the_value_head_has_its_own_bound(config, batch, bound: float, steps: float) -> None:
    """Adam's first step is lr g / (|g| + eps): a bound on |g| far below eps makes it small."""
    given = {"max_grad_norm": 0.5, "value_max_grad_norm": bound, "value_lr": 1e-3, "adam_eps": 1e-5}
    algorithm = replace(config.algorithm, one_optimizer=False, **given)
    policy = ActorCritic(config.policy, SEEN, seed=1)
    learners, joint = replicated(policy, algorithm, Reducer(SoloGroup(), (0,)))
    objective, block = Objective(algorithm, 1.0, policy.evaluate, policy.value, joint), samples(batch)
    before = [p.detach().clone() for p in policy.value_parameters()]
    passes = partial(objective.value_passes, {0: block})
    learners[POLICY].step({0: torch.arange(ROWS)}, passes, only=(VALUE_GROUP,))
    changes = [float((p - old).detach().abs().max()) for p, old in zip(policy.value_parameters(), before, strict=True)]
    assert 0.1 * steps < max(changes) / 1e-3 <= 1.01 * steps


def test_warm_up_and_further_epochs_step_the_value_head_alone(config, batch, monkeypatch) -> None:
    counts = {"epochs": 1, "value_epochs": 3, "num_minibatches": 1, "critic_warmup_iterations": 1}
    algorithm = replace(config.algorithm, one_optimizer=False, **counts)
    ppo = learning(ppo_module.PPO, ActorCritic(config.policy, SEEN, seed=1), algorithm)
    ppo._blocks, learner, groups = {0: samples(batch)}, ppo.learners[POLICY], []
    step = learner.step
    monkeypatch.setattr(learner, "step", lambda *given: groups.append(given[3]) or step(*given))
    for iteration, expected in enumerate([[(VALUE_GROUP,)] * 3, [None, (VALUE_GROUP,), (VALUE_GROUP,)]]):
        groups.clear()
        ppo._iteration = iteration
        ppo._fit_policy()
        assert groups == expected
