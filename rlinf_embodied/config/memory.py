"""The section `memory` of experiments/plan.py: what a large policy is asked to fit into."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.config.language import Precision


@dataclass(kw_only=True, slots=True)
class MemoryConfig:
    """A policy's training and rollouts, and devices for them; a GB is 1e9 bytes."""

    num_devices: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    device_gb: float = 80.0
    reserved_gb: float = 0.0  # of each device, for what no formula counts: see rlinf_embodied/tools/memory.py
    precision: Precision = Precision.bfloat16  # of passes and rollouts; what is trained is kept in float32 besides
    lora_rank: int = 32  # OpenVLA's published recipe; 0: full fine-tuning only
    lora_targets: list[str] = field(default_factory=lambda: ["all-linear"])  # ends of layers' names; or all of them
    prompt_tokens: int = 32  # BOS and the empty token included
    action_tokens: int = 7
    rollout_rows: int = 16  # of a policy call on a device
    microbatch: int = 1  # rows of a training pass on a device

    def __post_init__(self) -> None:
        rule = "it lists at least one number, and each is at least 1"
        holds = bool(self.num_devices) and min(self.num_devices) >= 1
        require(holds, "memory.num_devices", self.num_devices, rule, "use [1,2,4,8]")
        require_numbers(self, "memory", "prompt_tokens", "action_tokens", "rollout_rows", "microbatch", low=1)
        require_numbers(self, "memory", "reserved_gb", "lora_rank", low=0)
        rule = "there is memory, and more than what is reserved"
        require(self.room_bytes > 0, "memory.device_gb", self.device_gb, rule, "use 80, and memory.reserved_gb=0")
        rule = "it names layers that adapters lie on"
        require(bool(self.lora_targets), "memory.lora_targets", self.lora_targets, rule, "use [all-linear]")

    @property
    def room_bytes(self) -> float:
        """What a device has for weights, training and rollouts."""
        return (self.device_gb - self.reserved_gb) * 1e9
