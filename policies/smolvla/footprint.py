"""A SmolVLA as a plan of its memory needs it: a network on the meta device, a pass over whole chains, a rollout.

Nothing is computed and no weights are read; config.json of a checkpoint is enough.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from policies.checkpoint_folder import read_json
from policies.flow import Flow
from policies.smolvla.network import Prefix, SmolVLANet
from policies.smolvla.shape import TYPE, Published, read_shapes

_PIXELS = 256  # width and height of what a camera shows
_LEVEL = 0.5  # of a step's noise


class SmolVLAFootprint:
    """What tools/memory.py asks of a policy (`LargePolicy`); chains have the network's action dimensions."""

    def __init__(self, network: SmolVLANet, published: Published, prompt_tokens: int, expert_only: bool) -> None:
        """Takes the network, its sizes, the tokens of a row's prompt, and whether the expert alone is trained."""
        options = published.options
        self.module: nn.Module = network
        self._network, self._published, self._prompt_tokens = network, published, prompt_tokens
        self._expert_only = expert_only
        self._flow = Flow(published.chunk, options.max_action_dim, options.steps)

    def blocks(self) -> list[nn.Module]:
        """Returns the layers of the vision tower, of the language model and of the expert."""
        parts = self._network.vlm_with_expert
        model = parts.vlm.model
        return [*model.vision_model.encoder.layers, *model.text_model.layers, *parts.lm_expert.layers]

    def loss(self, rows: int) -> Tensor:
        """Makes the pass of a policy update: log-probs of given chains."""
        chain = torch.zeros(rows, self._flow.steps + 1, self._flow.chunk, self._flow.action_dim, device=self._device)
        velocity = partial(self._network.velocity, self._prefix(rows, self._expert_only))
        return self._flow.evaluate(velocity, chain, _LEVEL).log_probs.sum()

    @torch.no_grad()
    def act(self, rows: int) -> None:
        """Draws chains of rows."""
        noise = torch.zeros(rows, self._flow.steps + 1, self._flow.chunk, self._flow.action_dim, device=self._device)
        velocity = partial(self._network.velocity, self._prefix(rows, True))
        self._flow.act(velocity, rows, self._device, noise, _LEVEL)

    def _prefix(self, rows: int, frozen: bool) -> Prefix:
        words = torch.ones(rows, self._prompt_tokens, dtype=torch.int64, device=self._device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            image = torch.zeros(rows, _PIXELS, _PIXELS, 3, dtype=torch.uint8, device=self._device)
            vision = self._network.see([image] * self._published.num_cameras)
            context = self._network.context(vision, words)
        state = torch.zeros(rows, self._published.options.max_state_dim, device=self._device)
        return self._network.prefix(context, state)

    @property
    def _device(self) -> torch.device:
        return self._network.state_proj.weight.device


def is_smolvla(path: Path) -> bool:
    """Returns whether a config.json is that of a SmolVLA."""
    return read_json(path, "give the config.json of a policy").get("type") == TYPE


def meta_network(published: Published, dtype: torch.dtype, expert_only: bool) -> SmolVLANet:
    """Returns a network on the meta device, of which either the expert or all that takes part is trained."""
    with torch.device("meta"):
        network = SmolVLANet(published.options)
    network.freeze_others(network.trained(language=not expert_only, vision=not expert_only))
    return network.to(dtype)


def footprint(path: Path, dtype: torch.dtype, prompt_tokens: int, expert_only: bool) -> SmolVLAFootprint:
    """Returns what a plan asks of the SmolVLA of a config.json.

    Raises:
        CheckpointError: see `read_shapes`.
    """
    published = read_shapes(path)
    return SmolVLAFootprint(meta_network(published, dtype, expert_only), published, prompt_tokens, expert_only)
