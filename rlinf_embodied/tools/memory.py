"""What a large policy's weights, gradients and optimizer hold on a device, in bytes, and where that fits.

    n parameters, P of them trained, b bytes per value in a pass (2: bfloat16, 4: float32), N devices

    column        replicated                     sharded over N (FSDP2)
    weights       b n, and 4 P where b < 4       (4 P + b (n - P)) / N, and b n for rollouts on the same device
    gradients     12 P: a sum, the sum of        4 P: whole until the last pass
                  earlier blocks, a new one
    optimizer     8 P (Adam)                     8 P / N

n and P are counted on the model itself, built on torch's meta device without memory.  What passes and rollouts need
in addition is measured and not computed: the working bytes of a profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from rlinf_embodied.config import MemoryConfig
from rlinf_embodied.planning.profile import Profile

_GB = 1e9
_MASTER = 4
_REPLICATED_GRADIENTS, _MOMENTS = 3, 2
_LEARNER = "actor"  # the stage of a profile whose working bytes are those of training


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A policy as far as memory is concerned."""

    num_parameters: int
    num_trained: int
    weight_bytes: int  # of passes and rollouts
    frozen_bytes: int  # of them, those that are not trained

    @classmethod
    def of(cls, module: nn.Module) -> ModelSize:
        parameters = list(module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        weights, learned = (sum(p.numel() * p.element_size() for p in some) for some in (parameters, trained))
        num_parameters, num_trained = (sum(p.numel() for p in some) for some in (parameters, trained))
        return cls(num_parameters, num_trained, weights, weights - learned)


@dataclass(frozen=True, slots=True)
class Held:
    """What one device holds under an arrangement of rollout and actor, in bytes."""

    learner: str
    devices: str
    stages: str
    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0


def held(size: ModelSize, num_devices: Sequence[int]) -> Iterator[Held]:
    """Yields what a device holds under each arrangement of rollout and actor."""
    view, trained = float(size.weight_bytes), _MASTER * size.num_trained  # an optimizer steps float32
    masters = trained if size.weight_bytes - size.frozen_bytes < trained else 0
    gradients, moments = _REPLICATED_GRADIENTS * trained, _MOMENTS * trained
    yield Held("", "any", "rollout", view)
    yield Held("replicated", "any", "actor, rollout too", view + masters, gradients, moments)
    for number in num_devices:
        own = (trained + size.frozen_bytes) / number
        yield Held("sharded", str(number), "actor", own, trained, moments / number)
        yield Held("sharded", str(number), "actor and rollout", own + view, trained, moments / number)


def memory_table(
    sizes: Mapping[str, ModelSize], config: MemoryConfig, profile: Profile | None = None
) -> list[dict[str, str]]:
    """Returns a table in GB, a row for each way to train and arrangement; a profile has measured working bytes."""
    found = []
    for method, one in ((method, one) for method, size in sizes.items() for one in held(size, config.num_devices)):
        stages = () if profile is None else profile.stages.items()
        called = [stage for name, stage in stages if name != _LEARNER or "actor" in one.stages]
        working = max((float(stage.working_bytes.max()) for stage in called), default=0.0)  # of any measured call
        parts = {name: getattr(one, name) / _GB for name in ("weights", "gradients", "optimizer")}
        total = sum(parts.values()) + working / _GB
        left = config.device_gb - total
        found.append(
            {"method": method, "learner": one.learner, "devices": one.devices, "stages": one.stages}
            | {name: f"{value:.1f}" for name, value in parts.items()}
            | {"working": "not measured" if profile is None else f"{working / _GB:.1f}", "in all": f"{total:.1f}"}
            | {"left": f"{left:.1f}" if left >= 0 else f"lacks {-left:.1f}"}
        )
    return found
