"""OpenVLA against its oracle: images, towers, prompt, hidden states, logits, tokens, actions, training loss."""

from __future__ import annotations

import torch

from policies.openvla.actions import ActionTokens, range_of
from policies.openvla.decoding import TokenDistribution, action_log_probs, decode, predicting_states
from policies.openvla.folder import Checkpoint, read_checkpoint
from policies.openvla.images import CHANNELS_PER_IMAGE, ImageProcessor, read_processor
from policies.openvla.network import causal_mask
from policies.openvla.prompt import STOP_TOKEN, TOKENIZER, PromptTokenizer, TokenRows, prompt_for, rows_of
from policies.openvla.vision import patch_features
from tests.oracles.goldens import Goldens
from tests.oracles.states import compare_states

IGNORED_LABEL = -100


def check(goldens: Goldens) -> None:
    """Compares all goldens of an OpenVLA oracle."""
    checkpoint = read_checkpoint(goldens.checkpoint)
    processor = read_processor(goldens.checkpoint, checkpoint.config)
    check_prompts(goldens, checkpoint.config.pad_token_id)
    check_action_tokens(goldens, checkpoint)
    for index in goldens.cases():
        check_case(goldens, checkpoint, processor, index)
    check_training(goldens, checkpoint, processor)
    if goldens.names(r".*\.bf16\..*"):
        check_bfloat16(goldens, processor)


def check_prompts(goldens: Goldens, pad_token_id: int) -> None:
    """Compares the token ids of prompts; left out where the oracle has no tokenizer, whose licence is its own."""
    if not (goldens.checkpoint / TOKENIZER).is_file():
        return
    tokenizer = PromptTokenizer(goldens.checkpoint, pad_token_id)
    prefix = "oft." if any(name.startswith("oft.") for name in goldens.tensors) else ""
    for index, case in enumerate(goldens.facts["cases"]):
        ids = torch.tensor([tokenizer.encode(prompt_for(case["instruction"]))])
        goldens.compare(f"{prefix}case{index}.input_ids_processor", ids)


def check_action_tokens(goldens: Goldens, checkpoint: Checkpoint) -> None:
    """Compares the map between action values and tokens."""
    tokens = ActionTokens.of(checkpoint.config)
    if "tok.encode_ids" in goldens:
        goldens.compare("tok.encode_ids", tokens.encode(goldens.given("tok.encode_in").numpy()))
        goldens.compare("tok.decode_actions_f64", tokens.decode(goldens.given("tok.decode_ids").numpy()))


@torch.no_grad()
def check_case(goldens: Goldens, checkpoint: Checkpoint, processor: ImageProcessor, index: int) -> None:
    """Compares one image and instruction from pixels to actions."""
    case, name = goldens.facts["cases"][index], f"case{index}"
    network = checkpoint.network
    pixel_values = goldens.pixels(processor, [case["image"]])
    goldens.compare_pixels(name, pixel_values)
    half = CHANNELS_PER_IMAGE // 2
    backbone = network.vision_backbone
    goldens.compare(f"{name}.dino_features", patch_features(backbone.featurizer, pixel_values[:, :half]))
    goldens.compare(f"{name}.siglip_features", patch_features(backbone.fused_featurizer, pixel_values[:, half:]))
    visual = network.patches(pixel_values)
    goldens.compare(f"{name}.projected_patches", visual)
    rows = case_rows(goldens, checkpoint, f"{name}.input_ids_processor")
    goldens.compare(f"{name}.input_ids_model", rows.ids)
    sequence = network.sequence(rows, visual)
    final = compare_states(goldens, name, network, sequence, causal_mask(sequence.present))
    logits = network.output_layer(final)
    goldens.compare_columns(f"{name}.prefill_logits", logits)
    goldens.compare(f"{name}.prefill_logits_last", logits[0, -1])
    scale = range_of(checkpoint.statistics, case["unnorm_key"])
    done = decode(network, rows, pixel_values, scale.dim, TokenDistribution())
    goldens.compare(f"{name}.action_tokens", done.tokens[0])
    goldens.compare_columns(f"{name}.step_logits", network.output_layer(done.hidden[0]))
    normalised = ActionTokens.of(checkpoint.config).decode(done.tokens[0].numpy())
    goldens.compare(f"{name}.actions_normalized_f64", normalised)
    goldens.compare(f"{name}.actions_f64", scale.expand(normalised))


def case_rows(goldens: Goldens, checkpoint: Checkpoint, name: str) -> TokenRows:
    """Returns the prompt that a golden holds as token rows."""
    return rows_of(goldens.given(name).tolist(), checkpoint.config.pad_token_id)


@torch.no_grad()
def check_training(goldens: Goldens, checkpoint: Checkpoint, processor: ImageProcessor) -> None:
    """Compares logits of training rows where there is no padding, and the loss over action and stop tokens."""
    if "train.loss" not in goldens:
        return
    ids, present = goldens.given("train.input_ids"), goldens.given("train.attention_mask").bool()
    labels = goldens.tensors["train.labels"]
    images = [goldens.pixels(processor, [case["image"]]) for case in goldens.facts["cases"][: len(ids)]]
    pixel_values, network = torch.cat(images), checkpoint.network
    sequence = network.sequence(TokenRows(ids, present), network.patches(pixel_values))
    final = network.hidden(sequence.embeddings, sequence.positions, causal_mask(sequence.present))
    goldens.compare_columns("train.logits", network.output_layer(final[:, -ids.shape[1] :]), present)
    encoded = torch.from_numpy(ActionTokens.of(checkpoint.config).encode(goldens.given("train.actions").numpy()))
    targets = torch.cat([encoded, torch.full_like(encoded[:, :1], STOP_TOKEN)], dim=1)
    goldens.compare("train.labels", torch.full_like(labels, IGNORED_LABEL).masked_scatter(labels > 0, targets))
    rows = prompts_of(ids, labels, checkpoint.config.pad_token_id)
    hidden = predicting_states(network, rows, pixel_values, targets)
    log_probs, _ = action_log_probs(hidden, network.output_layer, targets, TokenDistribution())
    goldens.compare("train.loss", -log_probs.mean())


def prompts_of(ids: torch.Tensor, labels: torch.Tensor, pad_token_id: int) -> TokenRows:
    """Returns what stands before the first label of training rows that are padded on the right."""
    firsts = (labels != IGNORED_LABEL).int().argmax(1).tolist()
    return rows_of([row[:first].tolist() for row, first in zip(ids, firsts, strict=True)], pad_token_id)


@torch.no_grad()
def check_bfloat16(goldens: Goldens, processor: ImageProcessor) -> None:
    """Compares a run in bfloat16, whose last bits are the machine's own, within a wider limit."""
    checkpoint = read_checkpoint(goldens.checkpoint, torch.bfloat16)
    network = checkpoint.network
    for index, case in enumerate(goldens.facts["cases"]):
        name = f"case{index}.bf16"
        if f"{name}.projected_patches" not in goldens:
            continue
        pixel_values = goldens.pixels(processor, [case["image"]])
        goldens.compare(f"{name}.projected_patches", network.patches(pixel_values))
        rows = case_rows(goldens, checkpoint, f"case{index}.input_ids_processor")
        done = decode(network, rows, pixel_values, 1, TokenDistribution())
        goldens.compare(f"{name}.prefill_logits_last", network.output_layer(done.hidden[0, 0]))
