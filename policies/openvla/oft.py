"""OpenVLA-OFT: decodes all tokens of a chunk of C actions in parallel, with attention between all positions.

BOS | patches of K images | proprioception | prompt, empty token | C * A zero vectors | stop token

Since the network predicts the next token, the hidden state at the empty token predicts the first action value, and that
of the last zero vector is unused.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from policies.openvla.network import OpenVLA, Sequence, full_mask
from policies.openvla.prompt import STOP_TOKEN, TokenRows

_NUM_BLOCKS = 2


class _ResidualPerceptron(nn.Module):
    def __init__(self, in_features: int, dim: int, out_features: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(in_features)
        self.fc1 = nn.Linear(in_features, dim)
        blocks = [nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU()) for _ in range(_NUM_BLOCKS)]
        self.mlp_resnet_blocks = nn.ModuleList([nn.ModuleDict({"ffn": block}) for block in blocks])
        self.layer_norm2 = nn.LayerNorm(dim)
        self.fc2 = nn.Linear(dim, out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(self.layer_norm1(x)).relu()
        for block in self.mlp_resnet_blocks:
            x = x + cast(nn.ModuleDict, block)["ffn"](x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """Regression of each action of a chunk from the hidden states of its A positions."""

    def __init__(self, dim: int, action_dim: int) -> None:
        """Takes the width D of the language model and the number of action dimensions A."""
        super().__init__()
        self.model = _ResidualPerceptron(dim * action_dim, dim, action_dim)
        self.action_dim = action_dim

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [B, C * A, D] to normalised actions [B, C, A], which may leave [-1, 1]."""
        rows, positions, dim = hidden.shape
        hidden = hidden.to(self.model.layer_norm1.weight.dtype)
        return self.model(hidden.reshape(rows, positions // self.action_dim, self.action_dim * dim))


class ProprioProjector(nn.Module):
    """Projects the robot's state to one token of the language model."""

    def __init__(self, dim: int, proprio_dim: int) -> None:
        """Takes the width D of the language model and the number of state dimensions."""
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, dim)
        self.fc2 = nn.Linear(dim, dim)
        self.activation = nn.GELU()
        self.proprio_dim = proprio_dim

    def forward(self, proprio: Tensor) -> Tensor:
        """Maps normalised states [B, proprio_dim] to tokens [B, D]."""
        return self.fc2(self.activation(self.fc1(proprio.to(self.fc1.weight.dtype))))


class OpenVLAOFT(nn.Module):
    """An OpenVLA network with the parts that OFT adds; unused ones among `l1_head`, `proprio_projector` are None."""

    def __init__(
        self,
        network: OpenVLA,
        chunk_len: int,
        action_dim: int,
        l1_head: L1Head | None = None,
        proprio_projector: ProprioProjector | None = None,
    ) -> None:
        """Takes the network, C, A and OFT's parts."""
        super().__init__()
        self.network, self.l1_head, self.proprio_projector = network, l1_head, proprio_projector
        self.num_slots = chunk_len * action_dim
        self.eval()

    def sequence(
        self, rows: TokenRows, pixel_values: Tensor, proprio: Tensor | None = None, stop_token: bool = True
    ) -> Sequence:
        """Returns the input of the language model.

        Args:
            rows: the prompts, which end in the empty token.
            pixel_values: [B, K * 6, S, S].
            proprio: normalised proprioception [B, P], if there is a projector for it.
            stop_token: whether to append the stop token, as in the reference; RLinf leaves it out.
        """
        visual = self.network.patches(pixel_values)
        if self.proprio_projector is not None:
            assert proprio is not None, "a network that reads proprioception was handed none"
            visual = torch.cat([visual, self.proprio_projector(proprio).to(visual.dtype)[:, None]], dim=1)
        tail = visual.new_zeros(len(visual), self.num_slots, self.network.dim)
        if stop_token:
            stop = torch.full((len(rows.ids), 1), STOP_TOKEN, device=rows.ids.device)
            tail = torch.cat([tail, self.network.embed(stop)], dim=1)
        return self.network.sequence(rows, visual, tail)

    def hidden(
        self, rows: TokenRows, pixel_values: Tensor, proprio: Tensor | None = None, stop_token: bool = True
    ) -> Tensor:
        """Returns the final hidden states of the action positions, [B, C * A, D]; see `sequence` for arguments."""
        sequence = self.sequence(rows, pixel_values, proprio, stop_token)
        hidden = self.network.hidden(sequence.embeddings, sequence.positions, full_mask(sequence.present))
        first = hidden.shape[1] - self.num_slots - int(stop_token) - 1
        return hidden[:, first : first + self.num_slots]
