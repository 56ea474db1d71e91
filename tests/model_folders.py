"""Folders in the form of real models: sharded weights, tied embeddings, a trained BPE tokenizer, a chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
CHAT = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
_NAMES = ("Ada", "Ben", "Cleo", "Dan")


def shapes_sha256(module: nn.Module) -> str:
    """Returns the SHA-256 of the names and shapes of all tensors, by which published ones are known."""
    lines = sorted((name, list(tensor.shape)) for name, tensor in module.state_dict().items())
    return hashlib.sha256("\n".join(f"{name} {shape}" for name, shape in lines).encode()).hexdigest()


def gsm8k_rows(first: int, count: int) -> list[dict[str, str]]:
    """Returns questions and answers as GSM8K writes them; row number i is always the same."""
    rows = []
    for i in range(first, first + count):
        a, b, name = 2 + i % 7, 1 + i % 5, _NAMES[i % 4]
        answer = f"{name} buys {b} more.\nThat is {a}+{b} = <<{a}+{b}={a + b}>>{a + b} apples in all.\n#### {a + b}"
        rows.append({"question": f"{name} has {a} apples and buys {b}. How many now? ({i})", "answer": answer})
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    """Writes JSON Lines and returns the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def bpe_tokenizer(pad: bool, chat: bool = True) -> PreTrainedTokenizerFast:
    """Returns a tokenizer over bytes, its merges learned from such questions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BOS, EOS, *([PAD] if pad else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for row in gsm8k_rows(0, 40) for text in row.values()], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD if pad else None)
    if chat:
        made.chat_template = CHAT
    return made


def model_folder(
    folder: Path, architecture: str, *, pad: bool = True, context: int = 256, shards: str = "40KB"
) -> Path:
    """Writes a model with random weights and its tokenizer, as save_pretrained does, and returns the folder."""
    tokenizer = bpe_tokenizer(pad)
    common = {
        "vocab_size": 352,  # more than the tokenizer has, as real models do
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if architecture == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**common))
        else:
            model = LlamaForCausalLM(LlamaConfig(**common, rope_theta=500000.0))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, max_shard_size=shards)
    tokenizer.save_pretrained(folder)
    return folder
