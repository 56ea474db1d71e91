"""SmolVLA: the published names and shapes, a network that is one joint pass, chains with exact log-probs, training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_folders import shapes_sha256
from torch import Tensor

from policies.smolvla.network import CrossLayer, SmolVLANet, meta_network
from policies.smolvla.policy import SmolVLA
from policies.smolvla.shape import SmolVLAOptions, read_shapes
from rlinf_embodied.compose import CONFIG_DIR, compose_train
from rlinf_embodied.config import Critic
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.envs import Observation
from tests.observations import env_spec, observed, stacked

TOY = Path(__file__).with_name("smolvla_toy.yaml")
PUBLISHED = CONFIG_DIR / "models" / "smolvla.json"
# num_total_params and num_learnable_params that LeRobot's training prints for lerobot/smolvla_base, and its tensors,
# whose names (without the leading `model.`) and shapes have the digest below
TOTAL, LEARNABLE, TENSORS = 450_046_176, 99_880_992, 500
ROWS, CHUNK, ACTION = 4, 3, 2
ENV = env_spec("PickCube-v1", ROWS, CHUNK, 12, ACTION, 6, 9, 16, ("base_camera", "hand_camera"))


def test_the_full_size_network_has_the_published_tensors_and_trains_the_published_number():
    network = meta_network(PUBLISHED, expert_only=True)
    assert len(network.state_dict()) == TENSORS
    assert shapes_sha256(network) == "04087ff8645a521165c8afc638e627c2145c15d9044121a26aa0fe7bdb462da4"
    assert sum(p.numel() for p in network.parameters()) == TOTAL
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) == LEARNABLE
    assert {p.device.type for p in network.parameters()} == {"meta"}
    assert read_shapes(PUBLISHED) == SmolVLAOptions()


# ---------------------------------------------------------------------------------------------------------- the network
def naive(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention as it is written down: [B, L, heads, D] of each, mask [B, L, P]."""
    keys, values = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (keys, values))
    scores = torch.einsum("blhd,bphd->bhlp", query, keys) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhlp,bphd->blhd", weights, values).flatten(2)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: pairs (x_i, x_{i + D / 2}) turned by position * 10000^(-2 i / D)."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10_000.0 ** (-torch.arange(half) / half)
    left, right = x.split(half, -1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def joint_pass(net: SmolVLANet, before: Tensor, actions: Tensor, valid: Tensor, order: Tensor) -> Tensor:
    """The expert's hidden states by one pass over all tokens, layer by layer, as in LeRobot's training forward.

    Args:
        net: whose layers are used.
        before: what enters the language model, [B, P, d].
        actions: what enters the expert, [B, C, d'].
        valid: which of the P + C tokens there are.
        order: a token sees those of at most its own number, [P + C].
    """
    length = before.shape[1]
    places = valid.cumsum(1) - 1
    mask = (order[None, :] <= order[:, None])[None] & valid[:, None, :]
    split = lambda layer, x, name: getattr(layer.self_attn, name)(x).unflatten(-1, (-1, layer.self_attn.head_dim))  # noqa: E731
    parts = net.vlm_with_expert
    for ours, theirs in zip(parts.vlm.model.text_model.layers, parts.lm_expert.layers, strict=True):
        x, y = ours.input_layernorm(before), theirs.input_layernorm(actions)
        query, keys = (turned(split(ours, x, name), places[:, :length]) for name in ("q_proj", "k_proj"))
        values = split(ours, x, "v_proj")
        found = naive(query, keys, values, mask[:, :length, :length])
        if isinstance(theirs, CrossLayer):
            late = turned(split(theirs, y, "q_proj"), torch.arange(actions.shape[1])[None])
            keys, values = split(theirs, keys.flatten(2), "k_proj"), split(theirs, values.flatten(2), "v_proj")
            told = naive(late, keys, values, mask[:, length:, :length])
        else:
            late, more = (turned(split(theirs, y, name), places[:, length:]) for name in ("q_proj", "k_proj"))
            keys, values = torch.cat([keys, more], 1), torch.cat([values, split(theirs, y, "v_proj")], 1)
            told = naive(late, keys, values, mask[:, length:])
        before, actions = (
            (z := h + layer.self_attn.o_proj(a)) + layer.mlp(layer.post_attention_layernorm(z))
            for h, layer, a in ((before, ours, found), (actions, theirs, told))
        )
    return parts.lm_expert.norm(actions)


def policy_of(critic: Critic = Critic.privileged, **options: object) -> SmolVLA:
    section = compose_train([f"policy={TOY}", "warm_start.from_scratch=true"]).policy
    return SmolVLA(replace(section, critic=critic, options={**section.options, **options}), ENV, seed=3)


def seen(rows: int = ROWS) -> Observation:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, 2, 16, 16, 3), generator=draw, dtype=torch.uint8)
    said = ("pick up the cube", "lift", "push", "pull the red cube")[:rows]
    return observed(torch.randn(rows, 6, generator=draw), said, images, torch.randn(rows, 9, generator=draw))


@torch.no_grad()
def test_keys_and_values_made_once_give_what_one_pass_over_all_tokens_gives():
    policy = policy_of()
    net, features = policy.module.model, policy.encode_frozen(seen())
    x, time = torch.randn(ROWS, CHUNK, 8), torch.tensor([0.0, 0.3, 0.7, 1.0])
    state = torch.nn.functional.pad(features["proprio"], (0, 34))
    prefix = net.prefix(net.context(features["vision"], features["tokens"]), features["proprio"])
    words = net.vlm_with_expert.vlm.model.text_model.embed_tokens(features["tokens"])
    before = torch.cat([torch.cat([features["vision"], words], 1) * math.sqrt(24), net.state_proj(state)[:, None]], 1)
    assert before.shape[1] == 2 * 4 + 4 + 1  # two cameras of four tokens, four words, a state
    told = features["tokens"] != 0
    valid = torch.cat([torch.ones(ROWS, 8).bool(), told, torch.ones(ROWS, 1 + CHUNK).bool()], 1)
    order = torch.tensor([0] * 12 + [1] + [2 + c for c in range(CHUNK)])
    expected = joint_pass(net, before, net._entered(x, time), valid, order)
    torch.testing.assert_close(net.hidden(prefix, x, time), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_eyes_are_transformers_own():
    policy = policy_of()
    net, images = policy.module.model, stacked(seen())
    model = net.vlm_with_expert.vlm.model
    pixels = images.flatten(0, 1).permute(0, 3, 1, 2) / 127.5 - 1.0
    pixels = torch.nn.functional.interpolate(pixels, size=(32, 32), mode="bilinear", align_corners=False)
    found = model.connector(model.vision_model(pixel_values=pixels).last_hidden_state)
    torch.testing.assert_close(net.see(list(images.unbind(1))), found.reshape(ROWS, 8, 24))


@torch.no_grad()
def test_a_chunk_is_the_beginning_of_a_longer_one():
    policy = policy_of()
    net = policy.module.model
    prefix = policy._prefix(policy.encode(seen()))
    x, time = torch.randn(ROWS, 5, ACTION), torch.full((ROWS,), 0.4)
    torch.testing.assert_close(net.velocity(prefix, x[:, :2], time), net.velocity(prefix, x, time)[:, :2])


# ----------------------------------------------------------------------------------------------------------- the policy


def test_a_critic_on_observations_reads_the_expert_and_trains_its_head_alone() -> None:
    policy = policy_of(Critic.observation)
    features = policy.encode(seen())
    assert torch.equal(policy.value(features, None), torch.zeros(ROWS, CHUNK))  # its last layer begins at 0
    torch.nn.init.ones_(policy.value_parameters()[-2])
    values = policy.value(features, None)
    assert values.std() > 0
    assert not torch.equal(values[0], values[1])
    values.sum().backward()
    reached = {name for name, p in policy.module.named_parameters() if p.grad is not None}
    assert reached == {name for name, _ in policy.module.named_parameters() if name.startswith("value.")}


@pytest.mark.parametrize("expert_only", [True, False])
def test_the_expert_learns_alone_unless_stated_otherwise(expert_only: bool) -> None:
    policy = policy_of(expert_only=expert_only)
    features, noise = policy.encode_trainable(seen()), policy.imitation_noise.draw(0, "test", range(ROWS))
    policy.imitation_loss(features, torch.zeros(ROWS, CHUNK, ACTION), {"noise": noise}).backward()
    reached = {name for name, p in policy.module.named_parameters() if p.grad is not None}
    named = {id(p): name for name, p in policy.module.named_parameters()}
    trained = {named[id(p)] for p in policy.imitation_parameters(True)}
    assert trained == reached
    assert any(".vlm." in name for name in trained) is not expert_only


# --------------------------------------------------------------------------------------------------- sizes and refusals
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_expert_layers": 8}, "num_expert_layers is 8, but only -1 can be built"),
        ({"type": "pi0"}, "type is 'pi0', but only 'smolvla' can be built"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(changed, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(PUBLISHED.read_text()) | changed))
    with pytest.raises(CheckpointError, match=message):
        read_shapes(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stepz": 4}, r"policy.options.stepz is 4, but"),
        ({"image_size": 40}, r"policy.options.image_size is 40, but tokens are squares of 16 pixels"),
        ({"num_kv_heads": 3}, r"policy.options.num_heads is 2, but heads share keys and values"),
        ({"expert_width": 0.7}, r"policy.options.hidden_size is 24, but it and the expert's \(16\)"),
        ({"max_state_dim": 5}, r"policy.options.max_state_dim is 5, but there are 6 numbers in the state of Pick"),
    ],
)
def test_options_are_checked_by_name(options, message):
    if "expert_width" in options:
        options |= {"num_heads": 3, "num_kv_heads": 1}
    with pytest.raises(ConfigError, match=message):
        policy_of(**options)
