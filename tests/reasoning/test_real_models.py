"""A folder in the form of a real model trains on GSM8K-like files and is saved as transformers loads it; bad input."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from math_runs import tiny_math
from model_folders import EOS, gsm8k_rows, model_folder, write_rows
from runs import metric_rows, train
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from policies.causal_lm import CausalLM
from rlinf_embodied.config import DataConfig, LanguagePolicyConfig, MathConfig
from rlinf_embodied.data.problems import Split
from rlinf_embodied.errors import ConfigError, RlinfError
from rlinf_embodied.learning.checkpoint import weights_sha256
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.reasoning.prompt_stage import Prompts
from rlinf_embodied.training.trainer import Trainer

NUM_TEST = 6
ASCII = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("data")
    train, test = gsm8k_rows(0, 20), gsm8k_rows(20, NUM_TEST)
    return {"train": write_rows(folder / "train.jsonl", train), "test": write_rows(folder / "test.jsonl", test)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Qwen2's form, and Llama's with a tokenizer without a token for padding."""
    root = tmp_path_factory.mktemp("models")
    return {name: model_folder(root / name, name, pad=name == "qwen2") for name in ("qwen2", "llama")}


def config_of(model: Path, files: dict[str, str], folder: Path, *overrides: str) -> MathConfig:
    """Two iterations on a model's folder; entropy gives every completion a gradient, be it right or wrong."""
    config = tiny_math(
        *("data=files", f"data.files.train={files['train']}", f"data.files.test={files['test']}"),
        *("policy=folder", f"policy.folder={model}", f"run.dir={folder}", "run.num_iterations=2"),
        *("generation.max_new_tokens=16", "algorithm.drop_zero_variance_groups=false", "algorithm.entropy_coef=0.01"),
        *("algorithm.tokens_per_microbatch=1024", "eval.num_problems=100", *overrides),
    )
    return config


@torch.no_grad()
def logits_of(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_it_trains_and_is_saved_as_transformers_loads_it(folders, files, tmp_path, caplog, name: str) -> None:
    start = folders[name]
    assert len(list(start.glob("model-*-of-*.safetensors"))) > 1
    with caplog.at_level(logging.WARNING, "policies.language_folder"):
        summary = train(config_of(start, files, tmp_path))
    assert ("no pad token" in caplog.text) == (name == "llama")
    rows = metric_rows(tmp_path)
    assert [row["charts/optimizer_steps"] for row in rows] == [1, 1]
    assert all(row["losses/mismatch_max"] < 1e-4 and row["losses/grad_norm"] > 0 for row in rows)
    assert summary["num_eval_problems"] == NUM_TEST  # all that the file has, not the 100 that were asked for

    saved = tmp_path / "checkpoints/latest"
    model, before = (AutoModelForCausalLM.from_pretrained(f, local_files_only=True).eval() for f in (saved, start))
    assert type(model) is type(before)
    assert model.config.tie_word_embeddings
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    # what was in the workers' memory is what transformers reads
    assert weights_sha256(model.state_dict()) == summary["weights_sha256"] != weights_sha256(before.state_dict())
    policy = CausalLM.from_config(LanguagePolicyConfig(), saved, 0)
    question = "Ada has 3 apples. How many?"
    tokens = policy.codec.encode_chat(policy.codec.chat(question))
    assert torch.equal(logits_of(model, tokens), logits_of(policy.model, tokens))
    assert not torch.equal(logits_of(model, tokens), logits_of(before, tokens))

    tokenizer, original = (PreTrainedTokenizerFast.from_pretrained(f, local_files_only=True) for f in (saved, start))
    assert json.loads((saved / "tokenizer.json").read_text()) == json.loads((start / "tokenizer.json").read_text())
    assert tokenizer.chat_template == original.chat_template is not None
    assert (tokenizer.pad_token, tokenizer.eos_token) == (original.pad_token, EOS)
    chat = [{"role": "user", "content": question}]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert written == f"<|begin|>user\n{question}<|end|>\n<|begin|>assistant\n"
    assert tokens == original(written, add_special_tokens=False)["input_ids"]


# ----------------------------------------------------------------------------------------------------------- bad input
def refused(kind: type[RlinfError], *parts: str, config: MathConfig) -> None:
    """Checks that nothing starts, and that the message holds path, value, rule and next action."""
    with pytest.raises(kind) as caught:
        Trainer(ReasoningJob(config))
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
    assert not Path(config.run.dir or "").exists()


def test_prompts_longer_than_the_context(files, tmp_path, nothing_starts) -> None:
    short = model_folder(tmp_path / "short", "qwen2", context=90)
    parts = ["the context of the model holds 90 tokens", "shortest of 100 prompts", "generation.max_new_tokens=16"]
    refused(ConfigError, *parts, config=config_of(short, files, tmp_path / "run"))


def test_prompts_are_measured_without_reading_the_models_weights(folders, files, tmp_path) -> None:
    bare = shutil.copytree(folders["qwen2"], tmp_path / "bare")
    for path in bare.glob("*.safetensors"):
        path.write_bytes(b"not one")
    prompts = Prompts(config_of(bare, files, tmp_path / "run"), str(bare), Split.train)
    assert len(prompts.batch(0, 4)) == 4


def test_every_position_of_a_stream_has_the_same_problem_whichever_are_left_out(files) -> None:
    lengths = sorted(len(row["question"]) for row in gsm8k_rows(0, 20))
    config, parts = tiny_math(), {"train": files["train"], "test": files["test"]}
    config.policy.characters, config.policy.context_length = ASCII, 200
    config.data = DataConfig(files=parts, max_prompt_tokens=lengths[6])  # about a third fits
    prompts = Prompts(config, None, Split.train)
    whole = prompts.batch(0, 40)
    assert [prompts.batch(place, 1)[0] for place in range(40)] == whole
    assert len({prompt.id for _, prompt in whole}) == 40
    assert max(len(prompt.tokens) for _, prompt in whole) <= lengths[6]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.level=sums4"], ["data.level is 'sums4'", "a level is one of", "for example sum4-6-9"]),
        (["data.level=chain2-3", 'policy.characters="0123456789+-=;#"'], ["cannot read", "policy.characters"]),
        (["generation.max_new_tokens=40"], ["context of the model holds 40", "generation.max_new_tokens=40"]),
    ],
)
def test_generated_problems_that_do_not_fit(tmp_path, nothing_starts, overrides, parts) -> None:
    refused(ConfigError, *parts, config=tiny_math(f"run.dir={tmp_path / 'run'}", *overrides))
