"""OpenVLA's network with random weights on one device: actions per second of rollouts, samples per second of training.

FLOPs are counted by formula: 2 for each parameter that a token passes in a forward pass (a product and a sum), twice as
many backward, half of these for the gradients of the weights, which frozen weights do not get:

    rollout          2 n T                  n parameters, T tokens
    training         6 n T
    its adapters     4 n T + 6 a T          n frozen parameters, a of adapters

summed over the towers and the projector (T: patches), the language model (patches, prompt, actions) and its output
layer (actions).  What attention adds (queries times keys, weights times values) and the optimizer are left out, and a
prompt's padding counts.  MFU is FLOPs / second / the peak of the device (Chowdhery et al. 2022, arXiv:2204.02311, B).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.adapters import inject_adapters
from policies.checkpoint_folder import read_json
from policies.openvla.config import WHOLE, OpenVLAConfig, config_of
from policies.openvla.decoding import TokenDistribution, decode, predicting_states
from policies.openvla.folder import empty_network
from policies.openvla.images import CHANNELS_PER_IMAGE
from policies.openvla.network import OpenVLA
from policies.openvla.oft import OpenVLAOFT
from policies.openvla.prompt import TokenRows
from rlinf_embodied import device
from rlinf_embodied.compose import CONFIG_DIR
from rlinf_embodied.config import LoraSettings

ADAPTER = ".lora_"  # in the names of their parameters
_DRAWN = 1 << 20  # numbers that all weights repeat: drawing seven billion takes minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is measured."""

    config: OpenVLAConfig
    dtype: torch.dtype = torch.bfloat16
    rollout_rows: int = 16
    training_rows: int = 8
    prompt_tokens: int = 32
    action_dim: int = 7
    chunk: int = 8  # of OpenVLA-OFT
    lora_rank: int = 32
    repeat: int = 5


def published() -> Work:
    """Returns work with the published network of seven billion parameters."""
    return Work(config=config_of(read_json(CONFIG_DIR / "models" / "openvla_7b.json", WHOLE)))


def meta_network(work: Work, lora_rank: int = 0) -> OpenVLA:
    """Returns the network on the meta device, with adapters if they have a rank."""
    network = empty_network(work.config)
    if lora_rank:
        with torch.device("meta"):
            inject_adapters(network, LoraSettings(rank=lora_rank), 0, "lora")
    return network.to(work.dtype)


def random_network(work: Work, place: str, lora_rank: int = 0) -> OpenVLA:
    """Returns a network of random weights on a device."""
    network = meta_network(work, lora_rank).to_empty(device=place)
    drawn = 0.02 * torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))
    drawn = drawn.to(work.dtype).to(place)  # equal weights would take less power, and so less time, than these
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(drawn.repeat(-(-parameter.numel() // _DRAWN))[: parameter.numel()].view_as(parameter))
    network.renew_buffers()
    return network.to(place)


def forward_flops(network: OpenVLA, tokens: int, predicted: int) -> tuple[float, float]:
    """Returns the FLOPs of a row's forward pass in (weights, adapters).

    Args:
        network: whose parameters count.
        tokens: that the language model reads, the patches of its image among them.
        predicted: tokens that the output layer makes logits for.
    """
    patches = network.vision_backbone.num_patches
    passed = {
        "vision_backbone.": patches,
        "projector.": patches,
        "language_model.model.layers.": tokens,
        "language_model.lm_head.": predicted,
    }
    towers = (network.vision_backbone.featurizer, network.vision_backbone.fused_featurizer)
    # what comes after the block before a tower's last one is not computed, see policies/openvla/vision.py
    rest = [part for tower in towers for part in (tower.blocks[-1], tower.norm, tower.attn_pool) if part is not None]
    unused = {id(parameter) for part in rest for parameter in part.parameters()}
    found = {True: 0.0, False: 0.0}
    for name, parameter in network.named_parameters():
        count = next((number for prefix, number in passed.items() if name.startswith(prefix)), 0)
        count = 0 if id(parameter) in unused else count
        found[ADAPTER in name] += 2.0 * parameter.numel() * count
    return found[False], found[True]


def seconds_per_call(run: Callable[[], object], place: str, repeat: int) -> float:
    """Returns seconds per call of work on a device, after one call that does not count."""

    run()
    device.synchronize(place)
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    device.synchronize(place)
    return (time.perf_counter() - start) / repeat


def rates(what: str, number: float, flops: float, seconds: float, place: str) -> dict[str, object]:
    """Returns `number` of something per second, TFLOP/s, and MFU where the device's peak is known."""
    peak = device.peak_flop_per_s(place)
    found = {"seconds": seconds, f"{what}_per_s": number / seconds, "tflop_per_s": flops / seconds / 1e12}
    return {**found, **({} if peak is None else {"mfu": flops / seconds / peak})}


def inputs(work: Work, rows: int, place: str) -> tuple[TokenRows, Tensor]:
    ids, side = torch.ones(rows, work.prompt_tokens, dtype=torch.int64, device=place), work.config.image_size
    pixels = torch.zeros(rows, CHANNELS_PER_IMAGE, side, side, device=place)
    return TokenRows(ids, torch.ones_like(ids, dtype=torch.bool)), pixels


def loss(network: OpenVLA, work: Work, rows: int, place: str) -> Tensor:
    """Makes the pass of a policy update: log-probs and entropies of given action tokens."""
    columns = work.config.action_columns
    tokens = torch.full((rows, work.action_dim), columns.start, device=place)
    hidden = predicting_states(network, *inputs(work, rows, place), tokens)
    log_probs, entropy = TokenDistribution(columns).score(hidden, network.output_layer, tokens)
    return (log_probs + entropy).sum()


# ------------------------------------------------------------------------------------------------------------- measured
@torch.no_grad()
def rollouts(work: Work, place: str) -> dict[str, object]:
    """Returns what policy calls take: OpenVLA's, token by token, and OpenVLA-OFT's, a chunk at once."""
    network, rows = random_network(work, place), work.rollout_rows
    prompts, pixels = inputs(work, rows, place)
    distribution = TokenDistribution(work.config.action_columns)
    oft = OpenVLAOFT(network, work.chunk, work.action_dim)
    seen = network.vision_backbone.num_patches + work.prompt_tokens

    def measured(num_tokens: int, read: int, run: Callable[[Tensor], object]) -> dict[str, object]:
        uniforms = torch.full((rows, num_tokens), 0.5, device=place)
        seconds = seconds_per_call(lambda: run(uniforms), place, work.repeat)
        flops = rows * forward_flops(network, read, num_tokens)[0]
        return rates("actions", rows * num_tokens // work.action_dim, flops, seconds, place)

    one, chunk = work.action_dim, work.action_dim * work.chunk
    return {
        "rows": rows,
        "autoregressive": measured(
            one, seen + one - 1, lambda drawn: decode(network, prompts, pixels, one, distribution, drawn)
        ),
        "parallel": measured(
            chunk,
            seen + chunk + 1,
            lambda drawn: distribution.choose(oft.hidden(prompts, pixels), network.output_layer, drawn),
        ),
    }


def training(work: Work, place: str) -> dict[str, object]:
    """Returns what an update takes that trains adapters: log-probs, their gradients, and a step of torch's AdamW."""
    network, rows = random_network(work, place, work.lora_rank), work.training_rows
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        loss(network, work, rows, place).backward()
        optimizer.step()

    seconds = seconds_per_call(step, place, work.repeat)
    read = network.vision_backbone.num_patches + work.prompt_tokens + work.action_dim - 1  # the last one is not
    frozen, adapters = forward_flops(network, read, work.action_dim)
    return {"rows": rows, **rates("samples", rows, rows * (2 * frozen + 3 * adapters), seconds, place)}
