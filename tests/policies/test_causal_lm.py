"""The language policy: folders that others load to the same logits, exact log-probs, clear refusals."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from language_models import language_model
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel

from policies import causal_lm
from policies.causal_lm import CausalLM
from policies.text_codec import char_tokenizer
from policies.transformer import Transformer
from policies.value_lm import ValueLM
from rlinf_embodied.config import LanguagePolicyConfig, LoraSettings
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.language import LanguagePolicy, TokenBatch

TEXT = "7+8-3="
TEMPLATE = (
    "{% for m in messages %}{{ '(' if m['role'] == 'user' else ')' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


@pytest.fixture
def policy() -> CausalLM:
    return CausalLM.from_config(LanguagePolicyConfig(), None, 3)


def tokens(rows: int = 4, length: int = 20) -> torch.Tensor:
    return torch.randint(2, 25, (rows, length), generator=torch.Generator().manual_seed(0))


def transformers_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens()).logits


def logits_of(policy: CausalLM) -> torch.Tensor:
    with torch.no_grad():
        return policy.module(input_ids=tokens()).logits


def ragged_batch() -> TokenBatch:
    """Completions of 6, 1 and 11 tokens behind prompts of 5, 7 and 1."""
    lengths = torch.tensor([11, 8, 12])
    padded = torch.where(torch.arange(12) < lengths[:, None], tokens(3, 12), 0)
    return TokenBatch(padded, torch.tensor([5, 7, 1]), lengths)


# --------------------------------------------------------------------------------------------------------------- made
def test_the_small_model_is_small_tied_and_a_function_of_its_seed(policy):
    assert isinstance(policy, LanguagePolicy)
    assert 0.3e6 < sum(p.numel() for p in policy.parameters()) < 0.35e6
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    assert policy.spec.eos_ids == (1,)
    assert (policy.spec.pad_id, policy.codec.context_length) == (0, 128)
    state = torch.get_rng_state()
    same, other = (
        CausalLM.from_config(LanguagePolicyConfig(), None, 3),
        CausalLM.from_config(LanguagePolicyConfig(), None, 4),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits_of(policy), logits_of(same))
    assert not torch.equal(logits_of(policy), logits_of(other))


@pytest.mark.parametrize(("text", "words"), [("7 + a", "policy.characters"), ("", "has no tokens")])
def test_text_that_cannot_be_read_is_refused(policy, text, words):
    with pytest.raises(ConfigError, match=words):
        policy.codec.encode_chat(policy.codec.chat(text))


# ------------------------------------------------------------------------------------------------------------- folders
def test_a_saved_folder_gives_the_same_logits_and_is_tied(policy, tmp_path):
    policy.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.embed_tokens.weight" in stored
    assert "lm_head.weight" not in stored
    assert torch.equal(transformers_logits(tmp_path), logits_of(policy))
    again = CausalLM.from_config(LanguagePolicyConfig(), tmp_path, 0)
    assert torch.equal(logits_of(again), logits_of(policy))
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert again.codec.encode_chat(again.codec.chat(TEXT)) == policy.codec.encode_chat(policy.codec.chat(TEXT))
    assert again.spec == policy.spec


def test_a_sharded_folder_gives_the_same_logits_and_missing_shards_are_named(policy, tmp_path):
    policy.save(tmp_path, max_shard_bytes=400_000)
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    assert torch.equal(transformers_logits(tmp_path), logits_of(policy))
    assert torch.equal(logits_of(CausalLM.from_config(LanguagePolicyConfig(), tmp_path, 0)), logits_of(policy))
    for name in (shards[0], shards[2]):
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"lacks 2 of {len(shards)} .*: {shards[0]}, {shards[2]}"):
        CausalLM.from_config(LanguagePolicyConfig(), tmp_path, 0)


def test_adapters_are_trained_alone_and_merged_when_saved(policy, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra lora")
    policy.save(tmp_path / "base")
    bases = [CausalLM.from_config(LanguagePolicyConfig(), tmp_path / "base", 0) for _ in range(2)]
    adapted, same = (
        CausalLM(base.model, base.codec, LanguagePolicyConfig(lora=LoraSettings(rank=4)), seed=5) for base in bases
    )
    torch.testing.assert_close(logits_of(adapted), logits_of(policy), atol=1e-6, rtol=0)  # B starts at 0
    assert 0 < sum(p.numel() for p in adapted.parameters()) < 0.3 * sum(p.numel() for p in policy.parameters())
    for one, other in zip(adapted.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)
    frozen = {name: p.clone() for name, p in adapted.module.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD(adapted.parameters(), lr=5.0)
    for _ in range(2):
        optimizer.zero_grad()
        adapted.log_probs(ragged_batch(), 1.0).log_probs.sum().backward()
        optimizer.step()
    assert all(torch.equal(p, frozen[n]) for n, p in adapted.module.named_parameters() if not p.requires_grad)
    assert (logits_of(adapted) - logits_of(policy)).abs().max() > 0.1
    adapted.save(tmp_path / "merged", str(tmp_path / "base"))
    assert not list((tmp_path / "merged").glob("adapter_*"))
    torch.testing.assert_close(transformers_logits(tmp_path / "merged"), logits_of(adapted), atol=1e-5, rtol=1e-5)
    assert logits_of(adapted).isfinite().all()  # saving left the policy usable
    folder = tmp_path / "merged/adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["base_model_name_or_path"], config["r"]) == ("LORA", str(tmp_path / "base"), 4)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    found = loaded(input_ids=ragged_batch().tokens).logits
    assert torch.equal(found, adapted.model(input_ids=ragged_batch().tokens).logits)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3", "gpt2"])
def test_flops_of_an_update_are_those_that_torch_counts(architecture):
    policy = language_model(architecture)
    policy.model.set_attn_implementation("eager")  # torch counts no fused attention of a CPU
    batch = TokenBatch(torch.full((3, 12), 5), torch.full((3,), 5), torch.full((3,), 12))
    with FlopCounterMode(display=False) as counter:
        policy.log_probs(batch, 1.0, with_entropy=False).log_probs.sum().backward()
    assert policy.update_flops([11] * 3, 21) == counter.get_total_flops()  # the last token is not read


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])  # decoded by fused weights and by the model's own layers
def test_generation_applies_the_smallest_update_of_adapters_and_the_start_is_the_model_without(architecture):
    pytest.importorskip("peft", reason="needs the extra lora")
    plain = language_model(architecture)
    policy = CausalLM(copy.deepcopy(plain.model), plain.codec, LanguagePolicyConfig(lora=LoraSettings(rank=4)), seed=5)
    row = tokens(1, 6)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1e-4)
        changed = policy.module(input_ids=row).logits[0, -1] - plain.module(input_ids=row).logits[0, -1]
        with policy.without_adapters():
            assert torch.equal(logits_of(policy), logits_of(plain))
    decoded = []
    for one in (policy, plain):
        decoder, first = one.decoder(1, 8), torch.zeros(1, dtype=torch.long)
        decoder.prefill([row[0, :-1].tolist()])
        decoder.join(first, first)
        decoded.append(decoder.step(row[0, -1:])[0])
    difference = (decoded[0] - decoded[1])[1:]  # padding is never predicted
    assert (difference - changed[1:]).norm() < 0.02 * changed[1:].norm()
    assert all(p.requires_grad for p in policy.parameters())


def test_adapters_for_modules_that_do_not_exist_are_refused(policy):
    pytest.importorskip("peft", reason="needs the extra lora")
    with pytest.raises(ConfigError, match=r"policy\.lora\.targets is \['nowhere'\]"):
        CausalLM(policy.model, policy.codec, LanguagePolicyConfig(lora=LoraSettings(targets=["nowhere"])))
    tied = CausalLM.from_config(LanguagePolicyConfig(), None, 1)
    with pytest.raises(
        ConfigError, match=r"\['q_proj', 'lm_head'\], but the model's head and embeddings are one matrix"
    ):
        CausalLM(tied.model, tied.codec, LanguagePolicyConfig(lora=LoraSettings(targets=["q_proj", "lm_head"])))


def test_a_parameter_that_the_weights_lack_is_named(policy, tmp_path):
    policy.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack 1 parameters .*layers\.1\.mlp\.up_proj\.weight"):
        CausalLM.from_config(LanguagePolicyConfig(), tmp_path, 0)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no weights"), "can load"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
    ],
    ids=["config", "no weights", "damaged weights", "tokenizer"],
)
def test_folders_that_are_incomplete_are_refused(policy, tmp_path, damage, words):
    policy.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        CausalLM.from_config(LanguagePolicyConfig(), tmp_path, 0)


# ---------------------------------------------------------------------------------------------------------- tokenizers
def without(folder: Path, *names: str) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for name in names:
        settings.pop(name)
    path.write_text(json.dumps(settings))


def test_without_a_pad_token_the_end_token_pads_and_can_still_be_said(policy, tmp_path, caplog):
    policy.save(tmp_path)
    without(tmp_path, "pad_token")
    with caplog.at_level(logging.WARNING):
        padless = CausalLM.from_config(LanguagePolicyConfig(), tmp_path, 0)
    assert "no pad token: eos token 1 pads" in caplog.text
    assert padless.spec.pad_id == 1
    batch = ragged_batch()
    ending = TokenBatch(batch.tokens.clone(), batch.prompt_lengths, batch.lengths)
    ending.tokens[0, 10] = 1
    assert padless.log_probs(ending, 1.0).log_probs.isfinite().all()


def test_without_any_end_token_nothing_could_end(policy, tmp_path):
    policy.model.generation_config.eos_token_id = None
    policy.save(tmp_path)
    without(tmp_path, "pad_token", "eos_token")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"eos_token_id": None}))
    with pytest.raises(CheckpointError, match="neither eos_token nor"):
        CausalLM.from_config(LanguagePolicyConfig(), tmp_path, 0)


def test_a_chat_template_of_the_folder_is_applied(policy, tmp_path):
    policy.codec.tokenizer.chat_template = TEMPLATE
    policy.save(tmp_path)
    chatting = CausalLM.from_config(LanguagePolicyConfig(), tmp_path, 0)
    assert chatting.codec.encode_chat(chatting.codec.chat(TEXT)) == char_tokenizer()(f"({TEXT}:")["input_ids"]
    assert chatting.codec.encode_answer("#1") == [18, 3]
    chatting.save(tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again").chat_template == TEMPLATE


def test_a_tokenizer_of_another_model_is_refused(policy):
    policy.codec.tokenizer.add_special_tokens({"pad_token": "<other>"})
    with pytest.raises(CheckpointError, match=r"tokens \[25\], but the model has 25"):
        CausalLM(policy.model, policy.codec)


# ----------------------------------------------------------------------------------------------------------- log-probs
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3", "gemma3", "windowed", "gpt2", "bloom"])
def test_log_probs_and_entropy_are_those_of_each_row_alone(architecture):
    policy, batch, temperature = language_model(architecture), ragged_batch(), 0.7
    found = policy.log_probs(batch, temperature)
    assert found.entropy is not None
    for row in range(3):
        start, end = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        with torch.no_grad():
            logits = policy.model(input_ids=batch.tokens[row : row + 1, :end]).logits[0].double() / temperature
        logits[:, 0] = -torch.inf  # padding is never said
        every = logits.log_softmax(-1)[start - 1 : end - 1]
        expected = every.gather(1, batch.tokens[row, start:end, None])[:, 0].float()
        entropy = torch.distributions.Categorical(probs=every.exp()).entropy().float()
        torch.testing.assert_close(found.log_probs[row, : end - start], expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(found.entropy[row, : end - start], entropy, atol=2e-5, rtol=0)
        assert not found.log_probs[row, end - start :].any()
    assert torch.equal(found.log_probs != 0, batch.mask)


@pytest.mark.parametrize("support", [False, True], ids=["all tokens", "restricted"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gemma3", "windowed"])
def test_packed_rows_have_the_log_probs_of_single_ones(architecture, support):
    policy, batch = language_model(architecture), ragged_batch()
    if support:  # each token, and the next one of the vocabulary
        pairs = [(token, 1 + token % 24) for row in batch.completions() for token in row]
        batch = replace(batch, support=(2 * batch.mask.int(), torch.tensor(pairs, dtype=torch.int32).flatten()))
    packed = CausalLM(
        copy.deepcopy(policy.model), policy.codec, LanguagePolicyConfig(packing=True, checkpoint_activations=True)
    )
    assert packed.packs
    assert not policy.packs
    found = packed.log_probs(batch, 0.7)
    for row, (start, end) in enumerate(zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)):
        alone = policy.log_probs(batch.select([row]), 0.7)
        rounding = 1e-5 if architecture == "windowed" else 1e-6  # both attend by a mask, over unlike numbers of rows
        assert (found.log_probs[row, : end - start] - alone.log_probs[0]).abs().max() < rounding
        assert not found.log_probs[row, end - start :].any()
    gradients = [torch.autograd.grad(p.log_probs(batch, 0.7).log_probs.sum(), p.parameters()) for p in (packed, policy)]
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_model_that_cannot_be_packed_is_refused():
    policy = language_model("bloom")
    with pytest.raises(ConfigError, match=r"policy\.packing is True, but bloom"):
        CausalLM(policy.model, policy.codec, LanguagePolicyConfig(packing=True))


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "bloom"])
def test_chunks_of_tokens_and_recomputed_activations_change_no_gradient(monkeypatch, architecture, entropy_gradient):
    policy = language_model(architecture)
    again = CausalLM(copy.deepcopy(policy.model), policy.codec, LanguagePolicyConfig(checkpoint_activations=True))

    def gradients(one: CausalLM) -> list[torch.Tensor]:
        found = one.log_probs(ragged_batch(), 0.7, entropy_gradient=entropy_gradient)
        assert found.entropy is not None
        loss = (found.log_probs.sin() + 0.3 * found.entropy).sum()
        return [loss.detach(), found.log_probs, *torch.autograd.grad(loss, one.parameters())]

    expected = gradients(policy)
    monkeypatch.setattr(causal_lm, "_LARGEST_LOGITS", 25 * 5)
    for one, other in zip(gradients(again), expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_critic_of_a_policy_with_adapters_is_whole_and_in_float32():
    pytest.importorskip("peft", reason="needs the extra lora")
    plain = CausalLM.from_config(LanguagePolicyConfig(), None, 1)
    half, codec = plain.model.to(torch.bfloat16), plain.codec
    policy = CausalLM(half, codec, LanguagePolicyConfig(lora=LoraSettings(rank=4), checkpoint_activations=True))
    critic = ValueLM.from_policy(policy)
    assert {p.dtype for p in critic.module.parameters()} == {torch.float32}
    critic.values(ragged_batch()).sum().backward()
    assert all(p.grad is not None for p in critic.module.head.parameters())


def test_values_are_read_before_each_token_and_zero_behind_the_end(policy):
    critic, batch = trained_critic(policy), ragged_batch()
    values = critic.values(batch)
    assert torch.equal(values != 0, batch.mask)
    changed = TokenBatch(batch.tokens.clone(), batch.prompt_lengths, batch.lengths)
    changed.tokens[0, 7] = 24 if batch.tokens[0, 7] != 24 else 23  # the third token of the completion
    difference = (critic.values(changed) - values)[0] != 0
    assert difference.tolist() == [False, False, False, True, True, True, *[False] * 5]


def trained_critic(policy: CausalLM) -> ValueLM:
    critic = ValueLM.from_policy(policy)
    optimizer = torch.optim.Adam(critic.module.parameters(), lr=1e-2)
    batch = ragged_batch()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = ((critic.values(batch) - 1.0)[batch.mask] ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    return critic


@pytest.mark.parametrize(("dim", "layers", "heads"), [(32, 1, 2), (64, 3, 4)])
def test_weights_values_and_gradients_are_those_of_llama(dim: int, layers: int, heads: int) -> None:
    config = LlamaConfig(
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=16,
        use_cache=False,
    )
    models, after = [], []
    for make in (lambda: LlamaModel(config), lambda: Transformer(dim, layers, heads)):
        torch.manual_seed(3)
        models.append(make())
        after.append(torch.rand(1))  # the next draw of what is built behind it
    theirs, ours = models
    assert after[0] == after[1]
    theirs.set_input_embeddings(torch.nn.Identity())
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    sequence = torch.randn(5, 11, dim)
    expected, found = theirs(inputs_embeds=sequence).last_hidden_state, ours(sequence)
    assert torch.equal(expected, found)
    expected.square().sum().backward()
    found.square().sum().backward()
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert torch.equal(a.grad, b.grad), name


def test_a_sequence_behind_its_keys_and_values_has_the_hidden_states_and_gradients_of_the_whole() -> None:
    torch.manual_seed(4)
    transformer, whole = Transformer(32, 3, 4).double(), torch.randn(5, 11, 32, dtype=torch.double)
    expected = transformer(whole)[:, 6:]
    found = transformer(whole[:, 6:], transformer.keys_and_values(whole[:, :6]))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    parameters = list(transformer.parameters())
    gradients = [torch.autograd.grad(states.square().sum(), parameters) for states in (expected, found)]
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
