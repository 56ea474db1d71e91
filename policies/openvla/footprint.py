"""An OpenVLA as a plan of its memory needs it: a network on the meta device, low-rank adapters, a pass, a rollout.

Nothing is computed and no weights are read; config.json of a checkpoint is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from policies.checkpoint_folder import read_json
from policies.openvla.autoregressive import decode, score
from policies.openvla.film import AdaptedLayer
from policies.openvla.folder import empty_network
from policies.openvla.images import CHANNELS_PER_IMAGE
from policies.openvla.log_probs import TokenDistribution
from policies.openvla.network import OpenVLA
from policies.openvla.prompt import TokenRows
from policies.openvla.settings import WHOLE, OpenVLAConfig, config_of
from rlinf_embodied.errors import ConfigError

ALL_LINEAR = "all-linear"
_SHOWN = 8


class OpenVLAFootprint:
    """What tools/memory.py asks of a policy (`LargePolicy`); it works on any device, "meta" among them."""

    def __init__(self, network: OpenVLA, prompt_tokens: int, action_tokens: int) -> None:
        """Takes the network and the tokens of a row: of its prompt, BOS and empty token included, and of its answer."""
        self.module: nn.Module = network
        self._network, self._prompt_tokens, self._action_tokens = network, prompt_tokens, action_tokens
        # an adapted output layer has no one matrix whose columns could be cut out
        adapted = isinstance(network.output_layer, AdaptedLayer)
        self._distribution = TokenDistribution(columns=None if adapted else network.config.action_columns)

    def blocks(self) -> list[nn.Module]:
        """Returns the layers of both towers and of the language model."""
        return self._network.blocks()

    def loss(self, rows: int) -> Tensor:
        """Makes the pass of a policy update: log-probs and entropies of given action tokens."""
        first = self._network.config.action_columns.start
        tokens = torch.full((rows, self._action_tokens), first, device=self._device)
        log_probs, entropy = score(self._network, self._prompts(rows), self._pixels(rows), tokens, self._distribution)
        return (log_probs + entropy).sum()

    def act(self, rows: int) -> None:
        """Draws the action tokens of rows, with a cache."""
        drawn = torch.zeros(rows, self._action_tokens, device=self._device)
        prompts, pixels = self._prompts(rows), self._pixels(rows)
        decode(self._network, prompts, pixels, self._action_tokens, self._distribution, drawn)

    @property
    def _device(self) -> torch.device:
        return next(self._network.parameters()).device

    def _prompts(self, rows: int) -> TokenRows:
        ids = torch.zeros(rows, self._prompt_tokens, dtype=torch.int64, device=self._device)
        return TokenRows(ids, torch.ones_like(ids, dtype=torch.bool))

    def _pixels(self, rows: int) -> Tensor:
        side = self._network.config.image_size
        return torch.zeros(rows, CHANNELS_PER_IMAGE, side, side, device=self._device)


def read_shapes(path: Path) -> OpenVLAConfig:
    """Returns the config of a config.json.

    Raises:
        CheckpointError: it is damaged, or of another kind of model.
    """
    return config_of(read_json(path, WHOLE), str(path))


def meta_network(
    config: OpenVLAConfig, dtype: torch.dtype, lora_rank: int = 0, lora_targets: Sequence[str] = (ALL_LINEAR,)
) -> OpenVLA:
    """Returns a network on the meta device.

    Args:
        config: the shapes.
        dtype: of passes and rollouts.
        lora_rank: only adapters of this rank are trained; 0: all weights are.
        lora_targets: see `add_adapters`.

    Raises:
        CheckpointError: timm or transformers cannot build the network.
        ConfigError: the targets name no layer.
    """
    network = empty_network(config)
    if lora_rank:
        network.requires_grad_(False)
        add_adapters(network, lora_rank, lora_targets)
    return network.to(dtype)


def add_adapters(network: nn.Module, rank: int, targets: Sequence[str]) -> int:
    """Puts low-rank adapters on layers in place and returns how many; the published recipe has rank 32 on all.

    Args:
        network: its other parameters are left as they are.
        rank: of the adapters.
        targets: last parts of layers' names, such as q_proj or featurizer.patch_embed.proj; all-linear for every linear
            layer and convolution, the output layer included (openvla/openvla, vla-scripts/finetune.py).

    Raises:
        ConfigError: a target names no linear layer or convolution.
    """
    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    for target in targets:
        if not any(_named(name, target) for name in layers):
            known = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
            raise ConfigError(
                f"memory.lora_targets has {target!r}, but no linear layer or convolution of the model is called so: "
                f"use [{ALL_LINEAR}], or ends of names such as {', '.join(known[:_SHOWN])}"
            )
    chosen = [name for name in layers if any(_named(name, target) for target in targets)]
    for name in chosen:
        owner, _, last = name.rpartition(".")
        with layers[name].weight.device:
            setattr(network.get_submodule(owner), last, AdaptedLayer(layers[name], rank))
    return len(chosen)


def _named(name: str, target: str) -> bool:
    return target == ALL_LINEAR or name == target or name.endswith(f".{target}")
