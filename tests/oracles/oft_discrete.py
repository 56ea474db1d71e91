"""OpenVLA-OFT with tokens against its oracle, as three codebases run it.

oft.*        tokens over the whole vocabulary, one row at a time
rlinf.*      rows padded after BOS, action tokens only, no stop token at the end
simplevla.*  rows as each alone, action tokens only
"""

from __future__ import annotations

import torch
from torch import Tensor

from policies.openvla.actions import OFT_EPSILON, ActionTokens, range_of
from policies.openvla.config import Decoding, OpenVLAOptions
from policies.openvla.decoding import TokenDistribution, action_log_probs
from policies.openvla.folder import Checkpoint, read_oft
from policies.openvla.images import ImageProcessor, read_processor
from policies.openvla.network import full_mask
from policies.openvla.oft import OpenVLAOFT
from policies.openvla.prompt import TokenRows, rows_of
from tests.oracles.autoregressive import case_rows, check_prompts
from tests.oracles.goldens import Goldens
from tests.oracles.states import compare_states

_SCORED = r"{}\.logprobs_T([\d.]+?)(?:_top(-?\d+))?"


@torch.no_grad()
def check(goldens: Goldens) -> None:
    """Compares all goldens of an oracle with tokens."""
    options = OpenVLAOptions(decoding=Decoding.parallel, unnorm_key=goldens.facts["unnorm_key"])
    checkpoint, model = read_oft(goldens.checkpoint, options, goldens.chunk_len)
    processor = read_processor(goldens.checkpoint, checkpoint.config)
    check_prompts(goldens, checkpoint.config.pad_token_id)
    for index in goldens.cases("oft."):
        check_case(goldens, checkpoint, model, processor, index)
    if "rlinf.input_ids" in goldens:
        check_rlinf(goldens, checkpoint, model, processor)
    if "simplevla.input_ids" in goldens:
        check_simplevla(goldens, checkpoint, model, processor)


def check_case(
    goldens: Goldens, checkpoint: Checkpoint, model: OpenVLAOFT, processor: ImageProcessor, index: int
) -> None:
    """Compares one image and instruction from pixels to actions."""
    name = f"oft.case{index}"
    pixel_values = goldens.pixels(processor, [goldens.facts["cases"][index]["image"]])
    goldens.compare_pixels(name, pixel_values)
    rows = case_rows(goldens, checkpoint, f"{name}.input_ids_processor")
    done = model.decode(rows, pixel_values, TokenDistribution())
    goldens.compare(f"{name}.actions_hidden_states", done.hidden)
    goldens.compare_columns(f"{name}.action_logits", model.network.output_layer(done.hidden))
    goldens.compare(f"{name}.action_tokens", done.tokens)
    goldens.compare(f"{name}.actions_f64", robot_actions(goldens, checkpoint, model, done.tokens)[0])


def robot_actions(goldens: Goldens, checkpoint: Checkpoint, model: OpenVLAOFT, tokens: Tensor) -> Tensor:
    """Returns the robot's actions [B, C, A] that tokens [B, C * A] mean."""
    values = ActionTokens.of(checkpoint.config).decode(tokens.view(len(tokens), model.chunk_len, -1).numpy())
    scale = range_of(checkpoint.statistics, goldens.facts["unnorm_key"])
    return torch.from_numpy(scale.expand(values, OFT_EPSILON))


def batch_pixels(goldens: Goldens, processor: ImageProcessor, num_rows: int) -> Tensor:
    """Returns the pixel values [B, 6, S, S] of the rows that RLinf's and SimpleVLA-RL's code was run on."""
    return torch.cat([goldens.pixels(processor, [f"rl_image{row}.png"]) for row in range(num_rows)])


def check_rlinf(goldens: Goldens, checkpoint: Checkpoint, model: OpenVLAOFT, processor: ImageProcessor) -> None:
    """Compares positions, states, greedy tokens, log-probs and entropies of RLinf's variant."""
    ids = goldens.given("rlinf.input_ids")
    pixel_values = batch_pixels(goldens, processor, len(ids))
    goldens.compare_pixels("rlinf", pixel_values)
    rows = prompts_in(ids, checkpoint, ids.shape[1])
    goldens.compare("rlinf.attention_mask", rows.present)
    sequence = model.sequence(rows, pixel_values, stop_token=False)
    goldens.compare("rlinf.mm_attention_mask", sequence.present)
    goldens.compare("rlinf.position_ids", sequence.positions)
    compare_states(goldens, "rlinf", model.network, sequence, full_mask(sequence.present))
    columns = checkpoint.config.action_columns
    done = model.decode(rows, pixel_values, TokenDistribution(columns=columns), stop_token=False)
    shape = goldens.tensors["rlinf.greedy_tokens"].shape
    goldens.compare("rlinf.greedy_tokens", done.tokens.view(shape))
    goldens.compare("rlinf.greedy_prev_logprobs", done.log_probs)
    goldens.compare("rlinf.greedy_actions_f64", robot_actions(goldens, checkpoint, model, done.tokens))
    goldens.compare_columns("rlinf.action_logits", model.network.output_layer(done.hidden))
    tokens = goldens.given("rlinf.train_tokens").flatten(1)
    compare_scores(goldens, "rlinf", checkpoint, model, rows, pixel_values, tokens, done.tokens, stop_token=False)


def check_simplevla(goldens: Goldens, checkpoint: Checkpoint, model: OpenVLAOFT, processor: ImageProcessor) -> None:
    """Compares greedy tokens, logits, log-probs and entropies of SimpleVLA-RL's variant."""
    ids = goldens.given("simplevla.input_ids")
    pixel_values = batch_pixels(goldens, processor, len(ids))
    goldens.compare_pixels("simplevla", pixel_values)
    rows = prompts_in(ids, checkpoint)
    columns = checkpoint.config.action_columns
    done = model.decode(rows, pixel_values, TokenDistribution(columns=columns))
    goldens.compare("simplevla.greedy_tokens", done.tokens)
    goldens.compare("simplevla.greedy_actions_f64", robot_actions(goldens, checkpoint, model, done.tokens))
    logits = model.network.output_layer(done.hidden)[..., columns]
    goldens.compare(f"simplevla.train_logits_{logits.shape[-1]}", logits)
    compare_scores(goldens, "simplevla", checkpoint, model, rows, pixel_values, done.tokens, done.tokens)


def prompts_in(ids: Tensor, checkpoint: Checkpoint, width: int | None = None) -> TokenRows:
    """Returns token rows of the prompts in padded rows, wherever their padding stands."""
    pad = checkpoint.config.pad_token_id
    return rows_of([row[row != pad].tolist() for row in ids], pad, width)


def compare_scores(
    goldens: Goldens,
    prefix: str,
    checkpoint: Checkpoint,
    model: OpenVLAOFT,
    rows: TokenRows,
    pixel_values: Tensor,
    tokens: Tensor,
    greedy: Tensor,
    stop_token: bool = True,
) -> None:
    """Compares log-probs and entropies at the temperatures and top-k that goldens are named by.

    With top-k the goldens are of the greedy tokens: others would have none.
    """
    for match in goldens.names(_SCORED.format(prefix)):
        distribution = TokenDistribution(
            temperature=float(match[1]), columns=checkpoint.config.action_columns, top_k=max(int(match[2] or 0), 0)
        )
        scored = greedy if distribution.top_k else tokens
        hidden = model.hidden(rows, pixel_values, stop_token=stop_token)
        log_probs, entropy = action_log_probs(hidden, model.network.output_layer, scored, distribution)
        goldens.compare(match[0], log_probs)
        goldens.compare(match[0].replace("logprobs", "entropy"), entropy)
