"""What the tiny VLA promises: the protocol, exact log-probs, keyed sampling, independent rows, files that restore."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from policies.tiny_vla import TinyVLA
from policies.tokenizer import PAD, WORDS, WordTokenizer
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import Observation
from tests.observations import env_spec, observed, stacked

ENV = env_spec("PickCube-v1", 16, 5, 50, 7, 19, 45, 64, ("base_camera", "hand_camera"))
ROWS, CHUNK, ACTION, BINS = 8, 5, 7, 33


@pytest.fixture(scope="module")
def policy() -> TinyVLA:
    return TinyVLA(PolicyConfig(), ENV, seed=3)


def observe(rows: int = ROWS, text: str = "pick up the cube", seed: int = 0) -> Observation:
    g = torch.Generator().manual_seed(seed)
    return observed(
        proprio=torch.randn(rows, 19, generator=g),
        instruction=(text,) * rows,
        images=torch.randint(0, 256, (rows, 2, 64, 64, 3), dtype=torch.uint8, generator=g),
        privileged=torch.randn(rows, 45, generator=g),
    )


def noise(rows: int = ROWS, seed: int = 1) -> torch.Tensor:
    return torch.rand(rows, CHUNK, ACTION, generator=torch.Generator().manual_seed(seed)).clamp(1e-6, 1 - 1e-6)


# ------------------------------------------------------------------------------------------------------------- sampling


def test_the_greedy_action_is_the_mean_of_the_distribution_within_two_bins_of_the_likeliest(policy: TinyVLA) -> None:
    features = policy.encode(observe())
    every = [
        policy.evaluate(features, {"tokens": torch.full((ROWS, CHUNK, ACTION), v)}, 1.0).log_probs for v in range(BINS)
    ]
    odds = torch.stack(every, -1).detach().double().exp()  # [ROWS, CHUNK, ACTION, BINS]
    places = torch.arange(BINS)
    odds = odds * ((places - odds.argmax(-1, keepdim=True)).abs() <= 2)
    means = (odds * torch.linspace(-1, 1, BINS)).sum(-1) / odds.sum(-1)
    greedy = policy.act(features, None, 0.6)
    assert (greedy.actions - means).abs().max() < 1e-5
    assert (greedy.actions - torch.linspace(-1, 1, BINS)[greedy.record["tokens"]]).abs().max() > 1e-3


def test_actions_are_the_centres_of_their_bins(policy: TinyVLA) -> None:
    output = policy.act(policy.encode(observe()), noise(), 1.0)
    assert torch.allclose(output.actions, torch.linspace(-1, 1, BINS)[output.record["tokens"]], atol=1e-6)


# -------------------------------------------------------------------------------------------------- what rows depend on
def test_a_row_depends_neither_on_its_neighbours_nor_on_its_position(policy: TinyVLA) -> None:
    block, others = observe(16), replace(observe(16, seed=9), instruction=tuple(f"push ball {k}" for k in range(16)))
    order = [5, 11, *[k for k in range(16) if k not in (5, 11)]]
    mixed = Observation.concatenate([block.rows([5, 11]), others.rows(range(2, 16))])
    plain = policy.act(policy.encode(block), noise(16), 0.6)
    for scene, rows in ((block.rows(order), noise(16)[order]), (mixed, noise(16)[order])):
        output = policy.act(policy.encode(scene), rows, 0.6)
        for name in ("actions", "log_probs"):
            assert torch.equal(getattr(output, name)[:2], getattr(plain, name)[[5, 11]])
        assert torch.equal(output.record["tokens"][:2], plain.record["tokens"][[5, 11]])


def test_the_network_is_one_graph_for_torch_compile(policy: TinyVLA) -> None:
    features = policy.encode(observe(3))
    inputs = (policy._pool(features), features["proprio"], features["tokens"])
    graph = torch.compile(policy.module.hidden, backend="eager", fullgraph=True)
    assert torch.allclose(graph(*inputs), policy.module.hidden(*inputs), atol=1e-6)


def test_instruction_image_of_each_camera_and_body_change_the_distribution(policy: TinyVLA) -> None:
    base = observe(2)
    wrist, third = stacked(base).clone(), stacked(base).clone()
    third[:, 0], wrist[:, 1] = 255 - third[:, 0], 255 - wrist[:, 1]
    tokens = torch.zeros(2, CHUNK, ACTION, dtype=torch.long)
    reference = policy.evaluate(policy.encode(base), {"tokens": tokens}, 0.6).log_probs
    for change in (
        {"instruction": ("push the cube to the goal",) * 2},
        {"images": dict(zip(base.images, third.unbind(1), strict=True))},
        {"images": dict(zip(base.images, wrist.unbind(1), strict=True))},
        {"state": {"proprio": base.proprio + 0.5}},
    ):
        changed = policy.evaluate(policy.encode(replace(base, **change)), {"tokens": tokens}, 0.6).log_probs
        assert (changed - reference).abs().max() > 1e-4, change.keys()


def test_privileged_state_never_reaches_the_policy(policy: TinyVLA) -> None:
    blind = replace(observe(), privileged=None)
    first, second = (policy.act(policy.encode(o), noise(), 0.6) for o in (observe(), blind))
    assert torch.equal(first.log_probs, second.log_probs)


# ------------------------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("freeze", [True, False])
def test_the_policy_loss_reaches_every_policy_parameter(freeze: bool) -> None:
    policy = TinyVLA(PolicyConfig(options={"freeze_stem": freeze}), ENV, seed=0)
    features = policy.encode(observe())
    tokens = torch.randint(0, BINS, (ROWS, CHUNK, ACTION), generator=torch.Generator().manual_seed(0))
    policy.evaluate(features, {"tokens": tokens}, 0.6).log_probs.sum().backward()
    trained = {id(p) for p in policy.policy_parameters()}
    reached = {id(p) for p in policy.module.parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert trained == reached
    stem = {id(p) for p in policy.module.stem.parameters()}
    assert bool(stem & {id(p) for p in policy.policy_parameters()}) is not freeze


@pytest.mark.parametrize("critic", list(Critic))
def test_the_value_loss_trains_the_value_head_and_nothing_else(critic: Critic) -> None:
    policy = TinyVLA(PolicyConfig(critic=critic), ENV, seed=0)
    torch.nn.init.normal_(policy.value_parameters()[-2], generator=torch.Generator().manual_seed(0))
    (policy.value(policy.encode(observe()), torch.randn(ROWS, CHUNK, 45)) - 1.0).square().sum().backward()
    values = {id(p) for p in policy.value_parameters()}
    assert not values & {id(p) for p in policy.policy_parameters()}
    for parameter in policy.module.parameters():
        trained = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
        assert trained is (id(parameter) in values)


def test_cached_maps_and_images_give_the_same_distribution(policy: TinyVLA) -> None:
    tokens = torch.zeros(ROWS, CHUNK, ACTION, dtype=torch.long)
    cached = policy.evaluate(policy.encode_frozen(observe()), {"tokens": tokens}, 0.6).log_probs
    fresh = policy.evaluate(policy.encode_trainable(observe()), {"tokens": tokens}, 0.6).log_probs
    assert torch.equal(cached, fresh)


def test_the_imitation_loss_is_a_sum_over_rows(policy: TinyVLA) -> None:
    observation, actions = observe(), noise() * 2 - 1
    targets = {"object_position": torch.rand(ROWS, 3)}
    whole = policy.imitation_loss(policy.encode_trainable(observation), actions, targets)
    halves = [
        policy.imitation_loss(
            policy.encode_trainable(observation.rows(rows)),
            actions[rows],
            {"object_position": targets["object_position"][rows]},
        )
        for rows in (slice(0, 3), slice(3, ROWS))
    ]
    assert torch.allclose(whole, halves[0] + halves[1], rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------- statistics
def test_statistics_standardise_and_spare_constant_columns() -> None:
    policy = TinyVLA(PolicyConfig(), ENV, seed=0)
    mean, std = torch.arange(19.0), torch.full((19,), 2.0)
    std[3], std[4] = 0.0, 1e-5
    policy.set_statistics("proprio", mean, std)
    x = mean + 2.0
    scaled = policy.module.proprio_scale(x)
    assert scaled[0] == 1.0
    assert scaled[3] == 2.0  # a constant column is not scaled
    assert scaled[4] == 10.0  # a nearly constant one does not blow up


# ---------------------------------------------------------------------------------------------------------------- files
def test_the_folder_has_the_hugging_face_form(tmp_path: Path, policy: TinyVLA) -> None:
    policy.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["TinyVLA"]
    statistics = json.loads((tmp_path / "dataset_statistics.json").read_text())["PickCube-v1"]
    assert set(statistics) == {"proprio", "vision", "privileged"}
    assert len(statistics["proprio"]["mean"]) == 19
    assert "head.weight" in load_file(tmp_path / "model.safetensors")


def test_settings_of_use_may_change_on_loading_but_not_the_shape(tmp_path: Path, policy: TinyVLA) -> None:
    policy.save(tmp_path)
    loaded = TinyVLA.from_folder(tmp_path, config=PolicyConfig(temperature=1.3, options={"freeze_stem": False}))
    assert loaded.config.temperature == 1.3
    assert "images.base_camera" in loaded.encode(observe(1))
    with pytest.raises(CheckpointError, match=r"policy\.options\.hidden_size is 64.*was made with 128"):
        TinyVLA.from_folder(tmp_path, config=PolicyConfig(options={"hidden_size": 64}))


@pytest.mark.parametrize("damage", ["missing", "truncated", "huge", "foreign"])
def test_a_damaged_folder_is_a_checkpoint_error_that_names_it(tmp_path: Path, policy: TinyVLA, damage: str) -> None:
    policy.save(tmp_path)
    if damage == "missing":
        (tmp_path / "config.json").unlink()
    elif damage == "truncated":
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "huge":
        statistics = {"PickCube-v1": {"proprio": {"mean": [10**400], "std": [1.0]}}}
        (tmp_path / "dataset_statistics.json").write_text(json.dumps(statistics))
    else:
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        TinyVLA.from_folder(tmp_path)


def test_images_of_several_env_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.history is 2, but policy\.name=tiny_vla sees .* one env step"):
        TinyVLA(PolicyConfig(), replace(ENV, history=2), 0)


def test_a_privileged_critic_needs_privileged_state() -> None:
    with pytest.raises(ConfigError, match=r"policy\.critic.*set policy\.critic=observation"):
        TinyVLA(PolicyConfig(), replace(ENV, features=ENV.features[:-1]), seed=0)
    TinyVLA(PolicyConfig(critic=Critic.observation), replace(ENV, features=ENV.features[:-1]), seed=0)


# ---------------------------------------------------------------------------------------------------------------- words
def test_words_are_numbered_alike_whatever_their_case_and_punctuation() -> None:
    tokenizer = WordTokenizer(6)
    first, second = tokenizer(["pick up the cube", "Pick up the Cube!"])
    assert torch.equal(first, second)
    assert first[4:].tolist() == [PAD, PAD]
    assert len(set(WORDS)) == len(WORDS)


def test_unknown_words_and_the_ends_of_long_instructions_still_count() -> None:
    tokenizer = WordTokenizer(4)
    rows = tokenizer(
        ["grasp the zorp", "grasp the blick", "move the red cube to the left", "move the red cube to the right"]
    )
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[2], rows[3])
    assert int(rows.max()) < tokenizer.size
