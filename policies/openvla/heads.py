"""What OpenVLA-OFT adds to the network: a head that regresses actions, and a projector of proprioception.

Parameter names are those of the published side files.
"""

from __future__ import annotations

from torch import Tensor, nn

_NUM_BLOCKS = 2


class _ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class _ResidualPerceptron(nn.Module):
    def __init__(self, in_features: int, dim: int, out_features: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(in_features)
        self.fc1 = nn.Linear(in_features, dim)
        self.mlp_resnet_blocks = nn.ModuleList([_ResidualBlock(dim) for _ in range(_NUM_BLOCKS)])
        self.layer_norm2 = nn.LayerNorm(dim)
        self.fc2 = nn.Linear(dim, out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(self.layer_norm1(x)).relu()
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """Regresses each action of a chunk from the hidden states of its A positions."""

    def __init__(self, dim: int, action_dim: int) -> None:
        """Takes the width D of the language model and the number of action dimensions A."""
        super().__init__()
        self.model = _ResidualPerceptron(dim * action_dim, dim, action_dim)
        self.action_dim = action_dim

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [B, C * A, D] to normalised actions [B, C, A], which may leave [-1, 1]."""
        rows, positions, dim = hidden.shape
        return self.model(hidden.reshape(rows, positions // self.action_dim, self.action_dim * dim))


class ProprioProjector(nn.Module):
    """Makes one token of the language model from the robot's own state."""

    def __init__(self, dim: int, proprio_dim: int) -> None:
        """Takes the width D of the language model and the number of state dimensions."""
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, dim)
        self.fc2 = nn.Linear(dim, dim)
        self.activation = nn.GELU()
        self.proprio_dim = proprio_dim

    def forward(self, proprio: Tensor) -> Tensor:
        """Maps normalised states [B, proprio_dim] to tokens [B, D]."""
        return self.fc2(self.activation(self.fc1(proprio)))
