"""OpenVLA-OFT with the L1 head against its oracle: two images, proprioception, a chunk at once, training, FiLM."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from policies.openvla.actions import OFT_EPSILON, range_of
from policies.openvla.config import Decoding, Head, OpenVLAOptions
from policies.openvla.decoding import TokenDistribution, action_log_probs
from policies.openvla.folder import Checkpoint, read_oft
from policies.openvla.images import CHANNELS_PER_IMAGE, ImageProcessor, read_processor
from policies.openvla.network import full_mask
from policies.openvla.oft import OpenVLAOFT
from tests.oracles.autoregressive import case_rows, check_prompts, prompts_of
from tests.oracles.goldens import Goldens
from tests.oracles.states import compare_states


@torch.no_grad()
def check(goldens: Goldens) -> None:
    """Compares all goldens of an oracle with the L1 head."""
    options, chunk = options_of(goldens), goldens.chunk_len
    checkpoint, model = read_oft(goldens.checkpoint, options, chunk)
    processor = read_processor(goldens.checkpoint, checkpoint.config)
    check_prompts(goldens, checkpoint.config.pad_token_id)
    for index in goldens.cases():
        check_case(goldens, checkpoint, model, processor, index)
    check_training(goldens, checkpoint, model, processor)
    if goldens.names(r".*\.bf16\..*"):
        rounded, rounded_model = read_oft(goldens.checkpoint, options, chunk, torch.bfloat16)
        check_actions(goldens, rounded, rounded_model, processor, "case{}.bf16")
    if goldens.names(r"film\..*"):
        filmed, film_model = read_oft(goldens.checkpoint, replace(options, film=True), chunk)
        check_actions(goldens, filmed, film_model, processor, "film.case{}")


def options_of(goldens: Goldens) -> OpenVLAOptions:
    """Returns what the checkpoint folder does not say, from the goldens' facts."""
    proprio = "proprio_raw" in goldens.facts["cases"][0]
    key = goldens.facts["unnorm_key"]
    return OpenVLAOptions(decoding=Decoding.parallel, unnorm_key=key, head=Head.l1, proprio=proprio)


def check_case(
    goldens: Goldens, checkpoint: Checkpoint, model: OpenVLAOFT, processor: ImageProcessor, index: int
) -> None:
    """Compares what the language model reads and its states; then the actions."""
    name = f"case{index}"
    pixel_values, proprio = case_inputs(goldens, checkpoint, processor, index)
    goldens.compare_pixels(name, pixel_values.unflatten(1, (-1, CHANNELS_PER_IMAGE))[0])
    if proprio is not None:
        goldens.compare(f"{name}.proprio_normalized_f64", proprio[0])
    rows = case_rows(goldens, checkpoint, f"{name}.input_ids_processor")
    sequence = model.sequence(rows, pixel_values, proprio)
    compare_states(goldens, name, model.network, sequence, full_mask(sequence.present))
    check_actions(goldens, checkpoint, model, processor, "case{}", index)


def check_actions(
    goldens: Goldens,
    checkpoint: Checkpoint,
    model: OpenVLAOFT,
    processor: ImageProcessor,
    names: str,
    only: int | None = None,
) -> None:
    """Compares the states of the action positions and the actions, of all cases that have such goldens or of one."""
    for index in range(len(goldens.facts["cases"])) if only is None else [only]:
        name = names.format(index)
        if f"{name}.actions_normalized" not in goldens:
            continue
        pixel_values, proprio = case_inputs(goldens, checkpoint, processor, index)
        rows = case_rows(goldens, checkpoint, f"case{index}.input_ids_processor")
        if model.network.has_film:
            language = model.language(rows)
            goldens.compare(f"{name}.language_embedding_mean", language)
            goldens.compare(f"{name}.vision_features", model.network.vision_backbone(pixel_values, language))
            goldens.compare(f"{name}.projected_patches", model.network.patches(pixel_values, language))
        goldens.compare(f"{name}.actions_hidden_states", model.hidden(rows, pixel_values, proprio))
        normalised = model.regress(rows, pixel_values, proprio)
        goldens.compare(f"{name}.actions_normalized", normalised)
        scale = range_of(checkpoint.statistics, goldens.facts["unnorm_key"])
        goldens.compare(f"{name}.actions_f64", scale.expand(normalised[0].float().numpy(), OFT_EPSILON))


def case_inputs(
    goldens: Goldens, checkpoint: Checkpoint, processor: ImageProcessor, index: int
) -> tuple[Tensor, Tensor | None]:
    """Returns (pixel values [1, K * 6, S, S], normalised proprioception [1, P], float64, or None)."""
    case = goldens.facts["cases"][index]
    pixel_values = goldens.pixels(processor, case["images"])
    if "proprio_raw" not in case:
        return pixel_values, None
    raw = goldens.given(f"case{index}.proprio_raw_f64")
    scale = range_of(checkpoint.statistics, goldens.facts["unnorm_key"], "proprio")
    return pixel_values, torch.from_numpy(scale.normalise(raw.numpy()))[None]


def check_training(goldens: Goldens, checkpoint: Checkpoint, model: OpenVLAOFT, processor: ImageProcessor) -> None:
    """Compares states, actions and both losses of training rows, which are padded on the right in the reference."""
    if "train.labels" not in goldens:
        return
    ids, labels = goldens.given("train.input_ids"), goldens.given("train.labels")
    inputs = [case_inputs(goldens, checkpoint, processor, index) for index in range(len(ids))]
    pixel_values = torch.cat([pixels for pixels, _ in inputs])
    states = [state for _, state in inputs if state is not None]
    rows = prompts_of(ids, labels, checkpoint.config.pad_token_id)
    sequence = model.sequence(rows, pixel_values, torch.cat(states) if states else None)
    final = model.network.hidden(sequence.embeddings, sequence.positions, full_mask(sequence.present))
    hidden = final[:, -model.num_slots - 2 : -1]  # the last of these predicts the stop token
    goldens.compare("train.actions_hidden_states", hidden[:, :-1])
    if model.l1_head is None:
        return
    predicted = model.l1_head(hidden[:, :-1])
    goldens.compare("train.predicted_actions", predicted)
    goldens.compare("train.l1_loss", (predicted - goldens.given("train.actions_f64").float()).abs().mean())
    targets = labels[labels > 0].view(len(ids), -1)
    log_probs, _ = action_log_probs(hidden, model.network.output_layer, targets, TokenDistribution())
    goldens.compare("train.lm_loss", -log_probs.mean())
