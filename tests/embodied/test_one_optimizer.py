"""With one optimizer of policy and critic an update is that of Stable-Baselines3's PPO: the same weights of a batch."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from runs import tiny, train
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure
from torch import Tensor, nn

from policies.actor_critic import ActorCritic
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.batch import TrainingBlock
from rlinf_embodied.embodied.learners import POLICY, VALUE, Learners
from rlinf_embodied.embodied.objective import Objective
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.reduce import ExactReducer
from rlinf_embodied.learning.update import fit

STATE, ACTION, ROWS, EPOCHS = 5, 2, 24, 6
SPEC = EnvSpec("Some-v0", 8, 1, 10, ACTION, STATE, 5, 64, (), "cpu")
WORDS = ["policy=actor_critic", "env.cameras=[]", "warm_start.from_nothing=true"]


class Space(gymnasium.Env):
    """Spaces, for whoever asks for them."""

    observation_space = gymnasium.spaces.Box(-torch.inf, torch.inf, (STATE,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION,))


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    words = ["env=gymnasium", "env.id=HalfCheetah-v5", "policy=actor_critic", "algorithm=ppo_mujoco"]
    words += ["algorithm.one_optimizer=true", "algorithm.value_coef=1.0", "algorithm.lr=3e-3"]
    return compose_train([*words, "policy.options.normalize_returns=false"])


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    """Samples of a policy that is a little apart from the one that learns, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return {
        "state": draw(ROWS, STATE),
        "action": 0.7 * draw(ROWS, ACTION),
        "log_prob": -1.5 + 0.3 * draw(ROWS, ACTION),  # of each entry of an action
        "advantage": draw(ROWS),
        "return": 5.0 * draw(ROWS),
    }


def ours(config: TrainConfig, batch: dict[str, Tensor], num_blocks: int) -> ActorCritic:
    """Returns the policy after full-batch epochs."""
    policy = ActorCritic(config.policy, SPEC, seed=1)
    reducer = ExactReducer(SoloGroup(), (0,) * num_blocks)
    learners = Learners.replicated(policy, config.algorithm, reducer)
    assert set(learners.by_name) == {POLICY}
    size, ones = ROWS // num_blocks, torch.ones(ROWS, 1)
    whole = TrainingBlock(
        features={"state": batch["state"], "raw_state": batch["state"]},
        record={"drawn": batch["action"][:, None]},
        old_log_probs=batch["log_prob"][:, None],
        valid=ones.bool(),
        advantages=batch["advantage"][:, None],
        weights=ones,
        privileged=None,
        values=torch.zeros(ROWS, 1),
        returns=batch["return"][:, None],
    )
    objective = Objective(config.algorithm, 1.0, learners.evaluate, policy.value, learners.joint)
    passes = lambda block, index: objective.policy_passes(whole, index, critic_only=False)  # noqa: E731
    rows = {block: torch.arange(block * size, (block + 1) * size) for block in range(num_blocks)}
    fit(learners.by_name[POLICY], [rows] * EPOCHS, passes)
    return policy


def theirs(config: TrainConfig, batch: dict[str, Tensor]) -> PPO:
    """Returns SB3's model after its own `train` on the same batch, from our weights."""
    algorithm = config.algorithm
    settings = {"n_steps": ROWS, "batch_size": ROWS, "n_epochs": EPOCHS, "learning_rate": algorithm.lr}
    model = PPO("MlpPolicy", Space(), normalize_advantage=False, device="cpu", **settings)
    assert (model.vf_coef, model.max_grad_norm, model.clip_range(1.0)) == (0.5, algorithm.max_grad_norm, 0.2)
    start = ActorCritic(config.policy, SPEC, seed=1)
    with torch.no_grad():
        for to, of in zip(_of_sb3(model), _of_ours(start), strict=True):
            to.copy_(of.reshape(to.shape))
    buffer = model.rollout_buffer
    for name, value in {
        "observations": batch["state"],
        "actions": batch["action"],
        "log_probs": batch["log_prob"].sum(-1),
        "advantages": batch["advantage"],
        "returns": batch["return"],
    }.items():
        getattr(buffer, name)[:] = value.numpy().reshape(getattr(buffer, name).shape)
    buffer.full = True
    model.set_logger(configure(format_strings=[]))
    model.train()
    return model


def _linears(network: nn.Module) -> list[Tensor]:
    return [p for layer in network.modules() if isinstance(layer, nn.Linear) for p in (layer.weight, layer.bias)]


def _of_ours(policy: ActorCritic) -> list[Tensor]:
    net = policy.module
    assert net.log_std is not None
    return [*_linears(net.actor), *_linears(net.critic), net.log_std]


def _of_sb3(model: PPO) -> list[Tensor]:
    net = model.policy
    shared = net.mlp_extractor
    actor = [*_linears(shared.policy_net), *_linears(net.action_net)]
    return [*actor, *_linears(shared.value_net), *_linears(net.value_net), net.log_std]


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_an_update_is_that_of_stable_baselines3(config, batch, num_blocks: int) -> None:
    start, found = _of_ours(ActorCritic(config.policy, SPEC, seed=1)), _of_ours(ours(config, batch, num_blocks))
    expected = _of_sb3(theirs(config, batch))
    for before, one, other in zip(start, found, expected, strict=True):
        torch.testing.assert_close(one, other.reshape(one.shape), rtol=1e-4, atol=2e-6)
        assert float((one - before).detach().abs().max()) > 1e-3, "nothing was learned"


def test_it_is_trained_with_and_leaves_the_other_optimizer_out(tmp_path) -> None:
    train(tiny(*WORDS, "algorithm.one_optimizer=true", "run.num_iterations=1", f"run.dir={tmp_path}"))
    states = {path.name for path in (tmp_path / "checkpoints/latest/training_state").iterdir()}
    assert any(POLICY in name for name in states)
    assert not any(VALUE in name for name in states)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.sharding=fsdp2"], r"algorithm\.one_optimizer is True.*in slices.*use algorithm\.sharding=none"),
        (
            ["algorithm=grpo", "env.auto_reset=false"],
            r"algorithm\.one_optimizer is True.*GRPO has no critic.*use false",
        ),
    ],
)
def test_what_it_does_not_go_with_is_named(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose_train(["algorithm.one_optimizer=true", *words])
