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
        """Returns the size of a module on any device, "meta" among them."""
        parameters = list(module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        weights, learned = (sum(p.numel() * p.element_size() for p in some) for some in (parameters, trained))
        num_parameters, num_trained = (sum(p.numel() for p in some) for some in (parameters, trained))
        return cls(num_parameters, num_trained, weights, weights - learned)

    @property
    def stepped_bytes(self) -> int:
        """Of what an optimizer steps: float32, whatever passes compute with (learning/optimizer.py)."""
        return _MASTER * self.num_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one device holds, in bytes."""

    learner: str
    devices: str
    stages: str
    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0


def held(size: ModelSize, num_devices: Sequence[int]) -> Iterator[Held]:
    """Yields what a device holds under each arrangement of rollout and actor."""
    view, trained = float(size.weight_bytes), size.stepped_bytes
    has_masters = size.weight_bytes - size.frozen_bytes < trained
    yield Held(learner="", devices="any", stages="rollout", weights=view)
    yield Held(
        learner="replicated",
        devices="any",
        stages="actor, rollout too",
        weights=view + (trained if has_masters else 0),
        gradients=_REPLICATED_GRADIENTS * trained,
        optimizer=_MOMENTS * trained,
    )
    for number in num_devices:
        for stages, whole in (("actor", 0.0), ("actor and rollout", view)):
            yield Held(
                learner="sharded",
                devices=str(number),
                stages=stages,
                weights=(trained + size.frozen_bytes) / number + whole,
                gradients=trained,
                optimizer=_MOMENTS * trained / number,
            )


def memory_table(
    sizes: Mapping[str, ModelSize], config: MemoryConfig, profile: Profile | None = None
) -> list[dict[str, str]]:
    """Returns a table in GB, a row for each way to train and arrangement.

    Args:
        sizes: of the policy, by way to train.
        config: what it must fit into.
        profile: where working bytes were measured.
    """
    return [
        {"method": method} | _row(one, config, profile)
        for method, size in sizes.items()
        for one in held(size, config.num_devices)
    ]


def _row(one: Held, config: MemoryConfig, profile: Profile | None) -> dict[str, str]:
    working = 0.0 if profile is None else _working_bytes(one, profile)
    total = one.weights + one.gradients + one.optimizer + working
    left = config.device_gb - total / _GB
    return {
        "learner": one.learner,
        "devices": one.devices,
        "stages": one.stages,
        "weights": f"{one.weights / _GB:.1f}",
        "gradients": f"{one.gradients / _GB:.1f}",
        "optimizer": f"{one.optimizer / _GB:.1f}",
        "working": "not measured" if profile is None else f"{working / _GB:.1f}",
        "in all": f"{total / _GB:.1f}",
        "left": f"{left:.1f}" if left >= 0 else f"lacks {-left:.1f}",
    }


def _working_bytes(one: Held, profile: Profile) -> float:
    """Returns the most that a measured call of the stages took."""
    called = [stage for name, stage in profile.stages.items() if name != _LEARNER or "actor" in one.stages]
    return max((float(stage.working_bytes.max()) for stage in called), default=0.0)
