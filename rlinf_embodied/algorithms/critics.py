"""An ensemble of critics Q(s, a): networks of the same shape, computed together."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf_embodied.config import CriticsConfig
from rlinf_embodied.randomness import words


class Ensemble(nn.Module):
    """E networks from [B, D] to [E, B]: ReLU layers, each behind LayerNorm where `layer_norm` (arXiv 2302.02948)."""

    def __init__(self, num: int, inputs: int, width: int, layers: int, layer_norm: bool, seed: int) -> None:
        """Draws weights and biases uniformly within 1 / sqrt(inputs of the layer), as torch's linear layers do.

        Args:
            num: E.
            inputs: D.
            width: of hidden layers.
            layers: number of hidden layers.
            layer_norm: whether they are normalised.
            seed: of the draws; the global generator is left as it was.
        """
        super().__init__()
        sizes = [inputs, *[width] * layers, 1]
        generator = torch.Generator().manual_seed(int(words(seed, "critics")) >> 1)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for a, b in pairwise(sizes):
            bound = 1 / math.sqrt(a)
            draw = lambda *shape, bound=bound: torch.empty(shape).uniform_(-bound, bound, generator=generator)  # noqa: E731
            self.weights.append(nn.Parameter(draw(num, a, b)))
            self.biases.append(nn.Parameter(draw(num, 1, b)))
        self.scales, self.shifts = nn.ParameterList(), nn.ParameterList()
        if layer_norm:
            for _ in range(layers):
                self.scales.append(nn.Parameter(torch.ones(num, 1, width)))
                self.shifts.append(nn.Parameter(torch.zeros(num, 1, width)))

    @classmethod
    def of(cls, algorithm: CriticsConfig, inputs: int, seed: int) -> Ensemble:
        """Returns the critics of an algorithm, on the CPU."""
        return cls(
            algorithm.num_critics,
            inputs,
            algorithm.critic_hidden_size,
            algorithm.critic_layers,
            algorithm.layer_norm,
            seed,
        )

    def forward(self, rows: Tensor, members: Tensor | None = None) -> Tensor:
        """Returns the values [E, B] of rows [B, D]; of the critics `members`, int64 [K], alone [K, B]."""
        pick = (lambda part: part) if members is None else (lambda part: part.index_select(0, members))
        num = len(self.weights[0]) if members is None else len(members)
        hidden, last = rows.expand(num, -1, -1), len(self.weights) - 1
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(pick(bias), hidden, pick(weight))
            if k < last:
                if len(self.scales):
                    hidden = functional.layer_norm(hidden, hidden.shape[-1:])
                    hidden = torch.addcmul(pick(self.shifts[k]), hidden, pick(self.scales[k]))
                hidden = hidden.relu()
        return hidden[..., 0]
