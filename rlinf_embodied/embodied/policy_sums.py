"""What the policy epochs of an iteration add up to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PolicySums:
    """Sums over the steps of an iteration; see `add` for the statistics of one."""

    loss: float = 0.0
    weight: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    count: float = 0.0
    entropy: float = 0.0
    actions: float = 0.0
    norm: float = 0.0
    steps: int = 0

    def add(self, statistics: Tensor, weight: float, norm: float) -> None:
        """Adds one minibatch."""
        loss, kl, clipped, count, entropy, actions = statistics.tolist()
        self.loss, self.kl, self.clipped = self.loss + loss, self.kl + kl, self.clipped + clipped
        self.count, self.entropy, self.actions = self.count + count, self.entropy + entropy, self.actions + actions
        self.weight, self.norm, self.steps = self.weight + weight, self.norm + norm, self.steps + 1

    def means(self) -> dict[str, float]:
        """Returns metrics by name; each mean has its own denominator."""
        count = max(self.count, 1.0)
        return {
            "losses/policy_loss": self.loss / max(self.weight, 1e-8),
            "losses/approx_kl": self.kl / count,
            "losses/clipfrac": self.clipped / count,
            "losses/entropy": self.entropy / max(self.actions, 1.0),
            "losses/grad_norm": self.norm / max(self.steps, 1),
            "losses/policy_steps": float(self.steps),
        }
