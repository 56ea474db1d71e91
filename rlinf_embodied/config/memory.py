"""The section `memory` of experiments/plan.py: what a large policy is to fit into."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.config.language import LoraSettings, Precision


@dataclass(kw_only=True, slots=True)
class MemoryConfig:
    """How a policy is trained, and on which devices; a GB is 1e9 bytes."""

    num_devices: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    device_gb: float = 80.0
    precision: Precision = Precision.bfloat16  # of passes and rollouts; what is trained is kept in float32 as well
    lora: LoraSettings = field(default_factory=lambda: LoraSettings(rank=32))  # rank 0: full fine-tuning only
    profile: str | None = None  # profile.json of a run of this policy, for measured working bytes

    def __post_init__(self) -> None:
        rule = "it lists at least one number, and each is at least 1"
        holds = bool(self.num_devices) and min(self.num_devices) >= 1
        require(holds, "memory.num_devices", self.num_devices, rule, "use [1,2,4,8]")
        require_numbers(self, "memory", "device_gb", low=0, above=True)
