"""OpenVLA and OpenVLA-OFT as policies: folders act, are cloned, trained with and without adapters, and restored."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvla_folders as toys
import pytest
import torch
from runs import GRPO, tiny_overrides, train, weights_of
from safetensors.torch import load_file, save_file
from stopped_runs import straight_runs

from policies.language_folder import read_tokenizer
from policies.openvla.actions import ActionTokens, range_of
from policies.openvla.decoding import TokenDistribution, decode
from policies.openvla.folder import read_checkpoint
from policies.openvla.images import read_processor
from policies.openvla.policy import OpenVLAPolicy
from policies.openvla.prompt import prompt_for, rows_of
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import Critic, PolicyConfig, TrainConfig
from rlinf_embodied.data.statistics import vector_statistics
from rlinf_embodied.errors import CheckpointError, ConfigError, ObjectiveError
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.learning.checkpoint import weights_sha256
from tests.observations import env_spec, observed, stacked
from tests.policy_contract import require_contract

pytestmark = pytest.mark.usefixtures("no_group_stays")

ROWS = 3
ENV = env_spec("PointReach-v0", ROWS, 4, 12, 2, 5, 9, 16, ("base_camera",))
LORA = {"rank": 4, "alpha": 8.0}
PARALLEL = {"decoding": "parallel", "prompt_length": 24}
LOW = ["algorithm.precision=bfloat16", "algorithm.ratio_tolerance=0.5"]
ONE_BY_ONE = {"decoding": "autoregressive", "prompt_length": 24}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """An OpenVLA folder that others wrote, for a robot of two dimensions."""
    return toys.write_published(tmp_path_factory.mktemp("published"), action=2, proprio=5)


def config_of(options: dict, critic: Critic = Critic.privileged) -> PolicyConfig:
    target = f"{OpenVLAPolicy.__module__}.OpenVLAPolicy"
    return PolicyConfig(_target_=target, name="openvla", critic=critic, options=options)


def policy_of(published: Path, options: dict, critic: Critic = Critic.privileged) -> tuple[OpenVLAPolicy, EnvSpec]:
    env = ENV if options["decoding"] == "parallel" else replace(ENV, chunk=1)
    return OpenVLAPolicy.from_folder(published, env, config_of(options, critic)), env


def shown(size: int = 20) -> Observation:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (ROWS, 1, size, size, 3), generator=draw, dtype=torch.uint8)
    proprio = torch.randn(ROWS, 5, generator=draw)
    return observed(proprio, ("lift cube?", "drop cup?", "lift"), images, torch.randn(ROWS, 9, generator=draw))


# ------------------------------------------------------------------------------------------------------------- as it is
@pytest.mark.parametrize("critic", [Critic.privileged, Critic.observation])
@pytest.mark.parametrize("options", [PARALLEL, ONE_BY_ONE, {**PARALLEL, "lora": LORA}], ids=["oft", "openvla", "lora"])
def test_it_is_what_training_asks_of_a_policy(published, options: dict, critic: Critic) -> None:
    policy, env = policy_of(published, options, critic)
    require_contract(policy, policy.config, env, shown())


def test_its_greedy_action_is_that_of_the_checkpoint_alone(published) -> None:
    policy, _ = policy_of(published, ONE_BY_ONE)
    observation = shown(size=36)
    actions = policy.act(policy.encode(observation), None, 1.0).actions
    checkpoint = read_checkpoint(published)
    processor, tokenizer = read_processor(published, checkpoint.config), read_tokenizer(published)
    for row, text in enumerate(observation.instruction):
        squared = torch.from_numpy(processor.squared(stacked(observation)[row, 0].numpy()))
        prompt = rows_of([tokenizer(prompt_for(text))["input_ids"]], 32000, 24)
        pixels = processor.normalised(squared[None, None])
        tokens, _ = decode(checkpoint.network, prompt, pixels, 2, TokenDistribution(slice(31744, 32000)))
        expected = range_of(checkpoint.statistics, None).expand(ActionTokens(32000, 256).decode(tokens[0].numpy()))
        np.testing.assert_allclose(actions[row, 0].numpy(), expected.clip(-1, 1), atol=1e-6)


@pytest.mark.parametrize("options", [PARALLEL, ONE_BY_ONE], ids=["oft", "openvla"])
def test_values_of_acting_are_those_of_training_and_of_the_end_of_a_rollout(published, options: dict) -> None:
    policy, _ = policy_of(published, options, Critic.observation)
    torch.nn.init.normal_(policy.value_parameters()[-2], generator=torch.Generator().manual_seed(1))
    features = policy.encode(shown())
    noise = policy.spec.noise.draw(0, "test", range(ROWS))
    output = policy.act(features, noise, 1.3)
    found = policy.evaluate(features, output.record, 1.3)
    assert output.values is not None
    assert found.values is not None
    torch.testing.assert_close(found.values, output.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.value(features, None), output.values, atol=1e-5, rtol=0)
    assert output.values.abs().max() > 1e-3


def test_grippers_are_turned_into_what_the_env_takes(published) -> None:
    as_it_is, binary, inverted = (
        policy_of(published, {**PARALLEL, "gripper": gripper})[0] for gripper in ("as_it_is", "binary", "inverted")
    )
    features = as_it_is.encode(shown())
    raw, ones, others = (policy.act(features, None, 1.0).actions for policy in (as_it_is, binary, inverted))
    assert torch.equal(ones[..., :-1], raw[..., :-1])
    assert torch.equal(ones[..., -1], torch.where(raw[..., -1] > 0.5, 1.0, -1.0))
    assert torch.equal(others[..., -1], -ones[..., -1])


def test_it_is_cloned_on_the_tokens_that_it_may_draw(published) -> None:
    policy, env = policy_of(published, PARALLEL)
    features = policy.encode_trainable(shown())
    actions = torch.full((ROWS, env.chunk, 2), 0.1)
    tokens = torch.from_numpy(policy._tokens.encode(policy._normalised(actions.numpy())))
    log_probs = policy.evaluate(features, {"tokens": tokens}, 1.0).log_probs
    torch.testing.assert_close(-policy.imitation_loss(features, actions, {}), log_probs.mean((1, 2)).sum())


DEGREES = torch.tensor([[-90.0, 0.2], [12.0, 0.5], [45.0, 0.1], [180.0, 0.4]])  # [C, A]


@pytest.mark.parametrize("options", [PARALLEL, ONE_BY_ONE], ids=["oft", "openvla"])
def test_data_in_degrees_are_learned_in_degrees(published, tmp_path, options: dict) -> None:
    policy, env = policy_of(published, {**options, "clip_actions": False})
    measured = {kind: torch.from_numpy(v).float() for kind, v in vector_statistics(DEGREES.numpy()).items()}
    policy.normalise_by({"action": measured})
    low, high = measured["q01"], measured["q99"]
    features, actions = policy.encode_trainable(shown()), (low + 0.75 * (high - low)).expand(ROWS, env.chunk, 2)
    adam = torch.optim.Adam(policy.imitation_parameters(whole=True), 1e-2)
    for _ in range(30):
        adam.zero_grad()
        policy.imitation_loss(features, actions, {}).backward()
        adam.step()
    policy.save(tmp_path)
    for made in (policy, OpenVLAPolicy.from_folder(tmp_path)):
        found = made.act(made.encode(shown()), None, 1.0).actions
        assert ((found - actions).abs() <= (high - low) / 255).all()  # about 112.5 degrees and 0.4
    written = json.loads((tmp_path / "dataset_statistics.json").read_text())
    assert list(written) == [env.task]
    assert written[env.task]["action"]["q99"] == measured["q99"].tolist()
    assert written[env.task]["action"]["mask"] == [True, True]
    assert written[env.task]["proprio"] == policy_of(published, options)[0].checkpoint.statistics["here"]["proprio"]


@pytest.mark.parametrize(
    "more", [{}, {"lora": LORA}, {"lora": LORA, "precision": "bfloat16"}], ids=["all", "lora", "bfloat16"]
)
def test_an_l1_head_is_fine_tuned_by_the_absolute_error_of_normalised_actions(tmp_path, more: dict) -> None:
    toys.write_toy_oft(tmp_path / "oft", toys.oft(l1=True))
    env = replace(ENV, action_dim=toys.ACTION_DIM)
    config = config_of({**PARALLEL, "head": "l1", "clip_actions": False, **more})
    policy = OpenVLAPolicy.from_folder(tmp_path / "oft", env, config)
    low, high = torch.tensor([-90.0, 0.0, 0.1]), torch.tensor([180.0, 100.0, 0.5])
    policy.normalise_by({"action": {"q01": low, "q99": high}})
    features, chosen = policy.encode_trainable(shown()), policy.imitation_parameters(whole=True)
    actions = (low + torch.tensor([0.2, 0.5, 0.8]) * (high - low)).expand(ROWS, env.chunk, 3)
    predicted, wanted = policy._regressed(features), torch.tensor([-0.6, 0.0, 0.6]).expand(ROWS, env.chunk, 3)
    loss = policy.imitation_loss(features, actions, {})
    torch.testing.assert_close(loss / ROWS, torch.nn.L1Loss()(predicted, wanted))  # as in OpenVLA-OFT's finetune.py
    assert all(gradient is not None for gradient in torch.autograd.grad(loss, chosen, allow_unused=True))
    assert {id(p) for p in policy.module.model.l1_head.parameters()} <= {id(p) for p in chosen}
    adam = torch.optim.Adam(policy.module.model.l1_head.parameters(), 3e-3)
    for _ in range(60):
        adam.zero_grad()
        policy.imitation_loss(features, actions, {}).backward()
        adam.step()
    policy.save(tmp_path / "saved")
    found = policy.act(features, None, 1.0).actions
    assert ((found - actions).abs() <= 0.05 * (high - low)).all()
    again = OpenVLAPolicy.from_folder(tmp_path / "saved")
    assert torch.equal(again.act(again.encode(shown()), None, 1.0).actions, found)


def test_parts_of_oft_that_a_folder_lacks_start_with_random_weights_and_are_saved(published, tmp_path) -> None:
    options = {**PARALLEL, "head": "l1", "proprio": True, "lora": LORA}
    with pytest.raises(CheckpointError, match=r"action_head--<steps>_checkpoint.pt, but .* none: .*new_parts=true"):
        policy_of(published, options)
    policy, _ = policy_of(published, {**options, "new_parts": True})
    policy.save(tmp_path)
    assert (tmp_path / "model.safetensors").samefile(published / "model.safetensors")
    assert weights_sha256(state_of(tmp_path)) == weights_sha256(policy.module.state_dict())


def test_a_gripper_that_is_converted_is_not_scaled(published) -> None:
    policy, _ = policy_of(published, {**PARALLEL, "gripper": "inverted"})
    policy.normalise_by({"action": {"q01": torch.tensor([-0.5, -1.0]), "q99": torch.tensor([0.5, 1.0])}})
    normalised = policy._normalised(np.array([[0.5, -1.0], [-0.5, 1.0]]))  # the gripper of the data is 1 and 0
    np.testing.assert_allclose(normalised, [[1.0, 1.0], [-1.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(policy._robot(normalised), [[0.5, -1.0], [-0.5, 1.0]], atol=1e-6)


def test_statistics_that_unnorm_key_names_stay_and_those_of_another_robot_are_refused(published) -> None:
    named, _ = policy_of(published, {**PARALLEL, "unnorm_key": "here"})
    three = {"action": {kind: torch.ones(3) for kind in ("q01", "q99")}}
    named.normalise_by(three)
    assert list(named.checkpoint.statistics) == ["here"]
    with pytest.raises(ConfigError, match="action statistics have 3 dimensions, and 2 are needed"):
        policy_of(published, PARALLEL)[0].normalise_by(three)


# ------------------------------------------------------------------------------------------------------------- training
def run(published: Path, folder: Path, options: list[str], *overrides: str) -> TrainConfig:
    own = ["policy=openvla_oft", "policy.temperature=1.0", "policy.options.prompt_length=24"]
    short = ["run.num_iterations=2", "algorithm.critic_warmup_iterations=0", "eval.num_episodes=2", "eval.num_envs=2"]
    start = [f"warm_start.checkpoint={published}", f"run.dir={folder}", "algorithm.ratio_tolerance=1e-3"]
    small = [text for text in tiny_overrides() if not text.startswith(("policy.", "warm_start."))]
    given = dict(text.split("=", 1) for text in [*small, *own, *short, *start, *options, *overrides])
    return compose_train([f"{key}={value}" for key, value in given.items()])


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return OpenVLAPolicy.from_folder(folder).module.state_dict()


ADAPTERS, SLICES = "policy.options.lora.rank=4", ["algorithm.sharding=fsdp2", "run.exact=false"]
VARIANTS = {
    "ppo": [ADAPTERS],
    "ppo, a critic on the network": [ADAPTERS, "policy.critic=observation"],
    "grpo": [*GRPO, ADAPTERS],
    "all weights": ["algorithm.rows_per_microbatch=2"],
    "in slices": [ADAPTERS, *SLICES],
    "in bfloat16": [ADAPTERS, *LOW],
    "in slices, in bfloat16": [*SLICES, *LOW],
}


@pytest.fixture(scope="module")
def straight(published, tmp_path_factory):
    """Returns what gives the folder of a variant's uninterrupted run."""
    return straight_runs(tmp_path_factory, lambda to, variant: train(run(published, to, VARIANTS[variant])), "ppo")


@pytest.mark.parametrize("variant", [v if v == "ppo" else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS])
def test_a_published_folder_is_trained_saved_and_continues(published, straight, tmp_path, variant: str) -> None:
    before = {path.name: path.read_bytes() for path in published.iterdir()}
    digest, options = weights_of(straight(variant)), VARIANTS[variant]
    assert weights_sha256(state_of(straight(variant) / "checkpoints/latest")) == digest
    one = train(run(published, tmp_path, options, "run.num_iterations=1"))
    assert one["weights_sha256"] != digest
    more = train(run(published, tmp_path, options, "resume=auto"))
    assert more["weights_sha256"] == digest
    assert {path.name: path.read_bytes() for path in published.iterdir()} == before


def test_adapters_leave_the_base_as_it_was_and_link_to_it(published, straight) -> None:
    latest = straight() / "checkpoints/latest"
    assert (latest / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()
    assert os.stat(latest / "model.safetensors").st_nlink > 1
    trained, fresh = state_of(latest), OpenVLAPolicy.from_folder(published, ENV, config_of({**PARALLEL, "lora": LORA}))
    changed = {name for name, value in fresh.module.state_dict().items() if not torch.equal(value, trained[name])}
    assert changed
    assert all(".lora_" in name or name.startswith(("critic.", "privileged_scale.")) for name in changed)
    peft_names = {name.rpartition(".lora_")[0] for name in changed if ".lora_" in name}
    assert not any("vision_backbone" in name for name in peft_names)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen towers", "trained towers"])
def test_every_adapter_gets_a_gradient(published, frozen: bool) -> None:
    policy, _ = policy_of(published, {**PARALLEL, "lora": LORA, "freeze_vision": frozen})
    features = policy.encode(shown())
    record = policy.act(features, policy.spec.noise.draw(0, "action", range(ROWS)), 1.0).record
    loss = policy.evaluate(features, record, 1.0).log_probs.sum()
    gradients = torch.autograd.grad(loss, policy.policy_parameters(), allow_unused=True)
    assert all(gradient is not None for gradient in gradients)
    names = [name for name in policy.module.state_dict() if ".lora_" in name]
    assert len(names) == len(gradients)
    assert any("vision_backbone" in name for name in names) is not frozen


def test_adapters_of_a_bfloat16_network_are_float32_and_are_restored(published, tmp_path) -> None:
    policy, _ = policy_of(published, {**PARALLEL, "lora": LORA, "precision": "bfloat16"})
    assert {p.dtype for p in policy.policy_parameters()} == {torch.float32}
    features = policy.encode(shown())
    record = policy.act(features, policy.spec.noise.draw(0, "action", range(ROWS)), 1.0).record
    policy.evaluate(features, record, 1.0).log_probs.sum().backward()
    assert {p.grad.dtype for p in policy.policy_parameters() if p.grad is not None} == {torch.float32}
    policy.save(tmp_path)
    assert weights_sha256(state_of(tmp_path)) == weights_sha256(policy.module.state_dict())


def test_adapters_of_another_part_are_refused(published, tmp_path) -> None:
    policy, _ = policy_of(published, {**PARALLEL, "lora": LORA})
    policy.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"policy.options.freeze_vision is False, but .* made with True"):
        OpenVLAPolicy.from_folder(tmp_path, config=config_of({**PARALLEL, "lora": LORA, "freeze_vision": False}))
    path = tmp_path / "adapter_model.safetensors"
    layer = "base_model.model.network.vision_backbone.featurizer.blocks.0.attn.proj"
    save_file(load_file(path) | {f"{layer}.lora_A.weight": torch.randn(4, 8)}, path)
    with pytest.raises(CheckpointError, match=r"and this policy differ in tensors .*featurizer"):
        OpenVLAPolicy.from_folder(tmp_path)


def test_a_critic_on_the_network_is_refused_where_the_network_is_in_slices(published, tmp_path) -> None:
    options = ["policy.critic=observation", *SLICES]
    with pytest.raises(ConfigError, match=r"algorithm.sharding is 'fsdp2', but the critic shares parameters"):
        train(run(published, tmp_path / "run", options))


def test_a_plan_of_two_workers_gives_the_same_weights(published, straight, tmp_path) -> None:
    two = train(run(published, tmp_path, [ADAPTERS], "plan=disaggregated", "cluster.num_devices=2"))
    assert two["weights_sha256"] == weights_of(straight())


# --------------------------------------------------------------------------------------------------------------- errors
def test_an_l1_head_is_evaluated_and_refused_by_rl(tmp_path) -> None:
    folder = tmp_path / "regressing"
    toys.write_toy_oft(folder, toys.oft(l1=True))
    env = replace(ENV, action_dim=toys.ACTION_DIM)
    policy = OpenVLAPolicy.from_folder(folder, env, config_of({**PARALLEL, "head": "l1", "unnorm_key": "arm"}))
    assert policy.act(policy.encode(shown()), None, 1.0).actions.shape == (ROWS, 4, toys.ACTION_DIM)
    policy.options.stop_token = False
    features, model = policy.encode(shown()), policy.module.model
    with torch.no_grad():
        normalised = model.l1_head(model.hidden(*policy._inputs(features), stop_token=False))
    for noise in (None, policy.spec.noise.draw(0, "action", range(ROWS))):  # evaluations also sample
        assert torch.equal(policy.act(features, noise, 1.0).actions, policy._robot(normalised.numpy()))
    with pytest.raises(ObjectiveError, match=r"policy\.options\.head is l1, but RL needs log-probs"):
        policy.policy_parameters()


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (
            {**PARALLEL, "unorm_key": "here"},
            ENV,
            r"policy.options.unorm_key is 'here', but .*did you mean policy.options.unnorm_key",
        ),
        ({**PARALLEL, "decoding": "diffusion"}, ENV, r"policy.options.decoding is 'diffusion', but"),
        (
            {**PARALLEL, "unnorm_key": "there"},
            ENV,
            "policy.options.unnorm_key is 'there', but the checkpoint has statistics of here",
        ),
        (
            PARALLEL,
            replace(ENV, action_dim=7),
            "policy.options.unnorm_key is None, but .* action statistics have 2 dimensions, and 7 are needed",
        ),
        (PARALLEL, replace(ENV, features=ENV.features[1:]), r"env.cameras is \[\], but the policy sees"),
        (ONE_BY_ONE, ENV, r"env.chunk is 4, but autoregressive OpenVLA decides on one action at a time"),
        ({**ONE_BY_ONE, "proprio": True}, ENV, r"policy.options.proprio is True, but only OpenVLA-OFT supports it"),
        (
            {**PARALLEL, "lora": {"rank": 4, "targets": ["q_prj"]}},
            ENV,
            r"policy.options.lora.targets is \['q_prj'\], but",
        ),
        (
            {**PARALLEL, "lora": {"rank": 4, "targets": ["q_proj", "qkv"]}},
            ENV,
            r"policy.options.lora.targets is \['q_proj', 'qkv'\], but the layers 'qkv' receive no gradient",
        ),
        ({**PARALLEL, "prompt_length": 5}, ENV, "policy.options.prompt_length is 5, but a prompt has .* tokens"),
    ],
)
def test_what_does_not_fit_is_named(published, tmp_path, options: dict, env: EnvSpec, words: str) -> None:
    def started() -> None:
        policy = OpenVLAPolicy.from_folder(published, env, config_of(options))
        policy.encode(shown())
        policy.save(tmp_path)  # the first that a training does with a published folder

    with pytest.raises((ConfigError, CheckpointError), match=words):
        started()


def test_a_checkpoint_of_other_options_is_refused(straight) -> None:
    with pytest.raises(CheckpointError, match=r"options.lora is {'rank': 0, .* {'rank': 4"):
        OpenVLAPolicy.from_folder(straight() / "checkpoints/latest", config=config_of(PARALLEL))
