"""What weights, gradients and moments hold under each arrangement, and what a profile adds."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.plan import meta_models
from policies.causal_lm import CausalLM
from policies.text_codec import TextCodec, char_tokenizer
from rlinf_embodied.algorithms.log_probs import token_log_probs_and_entropy
from rlinf_embodied.compose import CONFIG_DIR
from rlinf_embodied.config import LanguagePolicyConfig, LoraSettings, MemoryConfig, Precision
from rlinf_embodied.learning.weights import state_bytes
from rlinf_embodied.planning.profile import load_profile
from rlinf_embodied.reasoning.policy_folder import round_matrices
from rlinf_embodied.tools.memory import ByteCounter, ModelSize, _fused_attention, held, memory_table, pass_bytes

FROZEN = 10**9


@pytest.fixture
def size() -> ModelSize:
    """A billion frozen values in bfloat16 and a quarter of that in float32, which is trained."""
    with torch.device("meta"):
        frozen, trained = nn.Linear(FROZEN, 1, bias=False).to(torch.bfloat16), nn.Linear(FROZEN // 4, 1, bias=False)
    return ModelSize.of(nn.ModuleList([frozen.requires_grad_(False), trained]))


def test_each_arrangement_adds_up(size: ModelSize) -> None:
    assert (size.num_parameters, size.num_trained) == (FROZEN * 5 // 4, FROZEN // 4)
    found = {(one.stages, one.devices): (one.weights, one.gradients, one.optimizer) for one in held(size, [1, 2])}
    assert found == {
        ("rollout", "any"): (3e9, 0, 0),
        ("actor, rollout too", "any"): (3e9, 2e9, 2e9),
        ("actor", "1"): (3e9, 1e9, 2e9),
        ("actor and rollout", "1"): (6e9, 1e9, 2e9),
        ("actor", "2"): (1.5e9, 5e8, 1e9),
        ("actor and rollout", "2"): (4.5e9, 5e8, 1e9),
    }


def test_what_is_trained_in_bfloat16_has_a_copy_in_float32() -> None:
    with torch.device("meta"):
        module = nn.Linear(FROZEN, 1, bias=False).to(torch.bfloat16)
    replicated = next(one for one in held(ModelSize.of(module), []) if one.learner == "replicated")
    assert replicated.weights == (2 + 4) * FROZEN


def test_the_table_adds_what_a_profile_measured_and_says_what_lacks(size: ModelSize) -> None:
    config = MemoryConfig(num_devices=[2], device_gb=5.0)
    plain = memory_table({"LoRA": size}, config)
    assert [row["working"] for row in plain] == ["not measured"] * 4
    assert [row["left"] for row in plain] == ["2.0", "lacks 2.0", "2.0", "lacks 1.0"]
    profile = load_profile(CONFIG_DIR / "profiles" / "maniskill_openvla.json")
    rollout, *training = memory_table({"LoRA": size}, config, profile)
    largest = {name: float(stage.working_bytes.max()) / 1e9 for name, stage in profile.stages.items()}
    assert rollout["working"] == f"{max(largest['env'], largest['policy']):.1f}"
    assert {row["working"] for row in training} == {f"{max(largest.values()):.1f}"}


def test_a_pass_of_qwen_1_5b_over_16k_tokens_takes_at_most_12_gb_with_its_gradients() -> None:
    config = CONFIG_DIR / "models" / "qwen2_5_1_5b.json"
    policy = meta_models(config, MemoryConfig(precision=Precision.float32, lora=LoraSettings(rank=0)))["full"]
    gradients = 4 * sum(p.numel() for p in policy.parameters())
    assert 6.1e9 < gradients < pass_bytes(policy, 16384) <= 12e9


def _smollm2() -> LlamaForCausalLM:
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**shape, **heads))


def test_rounded_matrices_of_smollm2_take_326_instead_of_538_mb() -> None:
    model = _smollm2()
    assert round(state_bytes(model) / 1e6) == 538
    round_matrices(model, Precision.bfloat16)
    assert round(state_bytes(model) / 1e6) == 326


def test_a_pass_of_smollm2_over_2k_tokens_takes_less_than_half_of_one_with_whole_logits_and_activations() -> None:
    plain, other, third = (_smollm2() for _ in range(3))
    with torch.device("meta"):
        tokens = torch.zeros(1, 2048, dtype=torch.long)
    with ByteCounter() as whole, _fused_attention():
        logits = plain(input_ids=tokens[:, :-1], use_cache=False).logits
        log_probs, _ = token_log_probs_and_entropy(logits, tokens[:, 1:], 1.0, False)
        torch.autograd.grad(log_probs.sum(), list(plain.parameters()))
    chunked = pass_bytes(CausalLM(other, TextCodec(char_tokenizer(), None)), 2048)
    settings = LanguagePolicyConfig(packing=False, checkpoint_activations=True)
    lean = pass_bytes(CausalLM(third, TextCodec(char_tokenizer(), None), settings), 2048)
    assert lean < whole.peak / 2
    assert [round(count / 1e9, 1) for count in (whole.peak, chunked, lean)] == [5.0, 4.4, 1.6]
