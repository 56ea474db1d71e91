"""Settings of language policies: the shape of a model made from scratch, adapters, and how a folder is used."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_embodied.errors import ConfigError


def _require(holds: bool, path: str, value: object, rule: str, action: str) -> None:
    if not holds:
        raise ConfigError(f"{path} is {value!r}, but {rule}: {action}")


@dataclass(kw_only=True, slots=True)
class TinyLMConfig:
    """A Qwen2-shaped model with tied embeddings and one token per character, made from scratch (0.3 M parameters)."""

    characters: str = "0123456789+-*/=;#()x,:?"
    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    intermediate_size: int = 240
    context_length: int = 128

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size", "context_length"):
            value = getattr(self, name)
            _require(value >= 1, f"policy.{name}", value, "it must be at least 1", "use a positive number")
        _require(
            self.hidden_size % (2 * self.num_heads) == 0,
            "policy.hidden_size",
            self.hidden_size,
            f"it must be a multiple of twice policy.num_heads={self.num_heads} (rotary embeddings pair dimensions)",
            "change one of the two",
        )


@dataclass(kw_only=True, slots=True)
class LoraSettings:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W + alpha / rank * B A, and only A and B are trained."""

    rank: int = 16
    alpha: float = 32.0
    targets: list[str] = field(default_factory=lambda: ["all-linear"])  # module names; all-linear: all but the head

    def __post_init__(self) -> None:
        _require(self.rank >= 1, "policy.lora.rank", self.rank, "it must be at least 1", "use 16, or no policy.lora")
        _require(self.alpha > 0, "policy.lora.alpha", self.alpha, "it must be positive", "use twice the rank")
        _require(bool(self.targets), "policy.lora.targets", self.targets, "it names modules", "use [all-linear]")
