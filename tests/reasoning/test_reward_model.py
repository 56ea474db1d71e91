"""A frozen reward model: its scores are transformers' own under every plan, and one that cannot be used is named."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from math_runs import completions, tiny_math
from runs import metric_rows, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

from policies.reward_lm import RewardLM
from policies.text_codec import MATH_CHARACTERS, PAD_ID, char_tokenizer
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning.weights import state_bytes
from rlinf_embodied.reasoning.batch import Completions, Rewards
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.reward_stage import RewardModelStage, RewardStage
from rlinf_embodied.runtime.host import StepContext, solo_context

ROWS = [(5, 6, 4, 1), (7, 1), (8, 9, 10, 11)]  # two samples each of these prompts' completions; the last is cut off


def model(folder: Path, *, characters: str = MATH_CHARACTERS, **changes) -> Path:
    tokenizer = char_tokenizer(characters)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 1, "pad_token_id": PAD_ID}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Qwen2ForSequenceClassification(Qwen2Config(**sizes | {"max_position_embeddings": 64} | changes))
        torch.nn.init.normal_(made.score.weight)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scored() -> Completions:
    problem, ended = Problem(0, "1+2=", "3", None, "sum", "sum1"), [row[-1] == 1 for row in ROWS]
    return completions([problem], [(4, 2, 3)] * 3, ROWS, ended=ended, texts=["#3", "3", ""])


@pytest.mark.parametrize("pad", [PAD_ID, None])
@torch.no_grad()
def test_rewards_are_the_scores_of_transformers(tmp_path, pad) -> None:
    config = tiny_math(f"reward.model={model(tmp_path, pad_token_id=pad)}", "reward.format_reward=0.5")
    stage, reward = RewardModelStage(StageConfig(config, str(tmp_path))), RewardStage(StageConfig(config, ""))
    for each in (stage, reward):
        each.setup(solo_context([0]))
    own = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    expected = [own(torch.tensor([[4, 2, 3, *row]])).logits[0, 0] for row in ROWS]
    scores = stage.run(StepContext(0), {0: [scored()]}).blocks[0]
    torch.testing.assert_close(scores, torch.stack(expected), atol=1e-6, rtol=0)
    output = reward.run(StepContext(0), {0: [scored(), scores]})
    rewards, (group,) = cast(Rewards, output.blocks[0]), cast(list, output.report)
    assert torch.equal(rewards.raw[0], scores)
    assert torch.equal(rewards.rewards[0], scores + 0.5 * torch.tensor([1.0, 0.0, 0.0]))
    assert group.correct == (True, False, False)  # by the answers, as without the model


@torch.no_grad()
def test_in_bfloat16_scores_are_those_of_autocast_and_the_stage_holds_fewer_bytes(tmp_path) -> None:
    config = tiny_math(f"reward.model={model(tmp_path)}", "algorithm.precision=bfloat16")
    stage = RewardModelStage(StageConfig(config, str(tmp_path)))
    stage.setup(solo_context([0]))
    own, rows = RewardLM.load(tmp_path), scored().rows
    with torch.autocast("cpu", torch.bfloat16):
        expected = own.scores(rows)
    assert torch.equal(stage.run(StepContext(0), {0: [scored()]}).blocks[0].flatten(), expected)
    assert (expected - own.scores(rows)).abs().max() > 1e-4
    assert state_bytes(stage._shared.policy.module) < 0.7 * state_bytes(own.module)


def test_it_trains_alike_wherever_the_model_is_placed(tmp_path) -> None:
    found = []
    for plan in ("collocated", "disaggregated"):
        given = f"reward.model={model(tmp_path / 'model')}", f"run.dir={tmp_path / plan}", "cluster.num_devices=2"
        found.append(train(tiny_math(*given, f"plan={plan}", "run.num_iterations=2"))["weights_sha256"])
    assert found[0] == found[1]
    rows = metric_rows(tmp_path / "collocated")
    assert all(row["rollout/reward"] != row["rollout/accuracy"] and row["losses/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_labels": 2}, "its config has 2 labels"),
        ({"max_position_embeddings": 32}, "its context holds 32 tokens, and prompts with completions have up to 40"),
        ({"characters": MATH_CHARACTERS[::-1]}, "its tokens are not the policy's"),
        (None, "cannot be used: .* has no config.json"),
    ],
)
def test_a_model_that_cannot_read_completions_is_refused_at_once(tmp_path, changes, rule) -> None:
    if changes is not None:
        model(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"reward\.model .*{rule}"):
        ReasoningJob(tiny_math(f"reward.model={tmp_path}")).require_checkpoint(None)


def test_a_folder_without_a_head_is_refused(tmp_path) -> None:
    weights = model(tmp_path) / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(weights).items() if name != "score.weight"}
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"reward\.model cannot be used: .*score\.weight"):
        RewardLM.load(tmp_path)
