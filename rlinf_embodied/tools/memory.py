"""The bytes of a large policy's weights, gradients and optimizer on a device, and where they fit.

    n parameters, P of them trained, b bytes per value in a pass (2: bfloat16, 4: float32), N devices

    column        replicated                     sharded over N (FSDP2)
    weights       b n, and 4 P where b < 4       (4 P + b (n - P)) / N, and b n for rollouts on the same device
    gradients     8 P: the sum over a block,     4 P / N
                  and that over earlier ones
    optimizer     8 P (Adam)                     8 P / N

n and P are counted on the model, built on torch's meta device without memory.  The additional memory of passes and
rollouts is measured: the working bytes of a profile.  For a language model's training pass it is counted on the meta
device, too, allocation by allocation (`pass_bytes`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlinf_embodied.config import MemoryConfig
from rlinf_embodied.interfaces.language import LanguagePolicy, TokenBatch
from rlinf_embodied.planning.profile import Profile

_GB = 1e9
_MASTER = 4
_REPLICATED_GRADIENTS, _MOMENTS = 2, 2
_LEARNER = "actor"  # the stage of a profile whose working bytes are those of training


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers of a policy's parameters and bytes."""

    num_parameters: int
    num_trained: int
    weight_bytes: int  # of passes and rollouts
    frozen_bytes: int  # the part of weight_bytes that is not trained

    @classmethod
    def of(cls, module: nn.Module) -> ModelSize:
        parameters = list(module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        weights, learned = (sum(p.numel() * p.element_size() for p in some) for some in (parameters, trained))
        num_parameters, num_trained = (sum(p.numel() for p in some) for some in (parameters, trained))
        return cls(num_parameters, num_trained, weights, weights - learned)


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes that one device holds under an arrangement of rollout and actor."""

    learner: str
    devices: str
    stages: str
    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0


def held(size: ModelSize, num_devices: Sequence[int]) -> Iterator[Held]:
    """Yields the bytes that a device holds under each arrangement of rollout and actor."""
    view, trained = float(size.weight_bytes), _MASTER * size.num_trained  # an optimizer steps float32
    masters = trained if size.weight_bytes - size.frozen_bytes < trained else 0
    gradients, moments = _REPLICATED_GRADIENTS * trained, _MOMENTS * trained
    yield Held("", "any", "rollout", view)
    yield Held("replicated", "any", "actor, rollout too", view + masters, gradients, moments)
    for number in num_devices:
        shard = (trained + size.frozen_bytes) / number
        yield Held("sharded", str(number), "actor", shard, trained / number, moments / number)
        yield Held("sharded", str(number), "actor and rollout", shard + view, trained / number, moments / number)


def pass_bytes(policy: LanguagePolicy, num_tokens: int) -> float:
    """Returns the peak bytes of a forward and backward pass over one sequence of a model on the meta device.

    They include activations and gradients, but not the weights, nor the workspace of kernels, nor fragmentation.
    """
    token = lambda number: torch.tensor([number])  # noqa: E731
    batch = TokenBatch(torch.zeros(1, num_tokens, dtype=torch.long, device="meta"), token(1), token(num_tokens))
    with ByteCounter() as counter, _fused_attention():
        outputs = policy.log_probs(batch, 1.0, entropy_gradient=False)
        torch.autograd.grad(outputs.log_probs.sum(), policy.parameters())
    return float(counter.peak)


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of the meta tensors that are created within its block."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()  # storages

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """Runs an operation and counts the storages that it creates."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return True  # meta tensors have no value; checks of values succeed
        for leaf in tree_leaves((args, kwargs)):
            self._note(leaf, 0)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._note(leaf, 1)
        return result

    def _note(self, leaf: object, new: int) -> None:
        if not isinstance(leaf, Tensor) or leaf.device.type != "meta":
            return
        storage = leaf.untyped_storage()
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            self._count(size := new * storage.nbytes())
            weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._count(-size)

    def _count(self, more: int) -> None:
        self.bytes += more
        self.peak = max(self.peak, self.bytes)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Within the block attention keeps its output and one number per query, as on GPUs.

    On the meta device torch would allocate the matrix of all pairs.  The function is replaced for all callers,
    since layers that are recomputed in the backward pass run outside of any mode.
    """
    stock = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        assert attn_mask is None, "a single sequence is causal and needs no mask"
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, True, scale=options.get("scale"))[0]

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock


def memory_table(
    sizes: Mapping[str, ModelSize],
    config: MemoryConfig,
    profile: Profile | None = None,
    counted: Mapping[str, float] | None = None,
) -> list[dict[str, str]]:
    """Returns a table in GB, with a row for each training method and arrangement.

    Working bytes are those of a profile, or, for a training pass, those `counted` by training method.
    """
    rows = []
    arrangements = ((method, one) for method, size in sizes.items() for one in held(size, config.num_devices))
    for method, arrangement in arrangements:
        stages = () if profile is None else profile.stages.items()
        called = [stage for name, stage in stages if name != _LEARNER or "actor" in arrangement.stages]
        trains = counted is not None and "actor" in arrangement.stages
        measured: list[float] = [float(stage.working_bytes.max()) for stage in called]  # of any call
        if counted is not None and trains:
            measured.append(float(counted[method]))
        working = max(measured, default=0.0)
        known = profile is not None or trains
        parts = {name: getattr(arrangement, name) / _GB for name in ("weights", "gradients", "optimizer")}
        total = sum(parts.values()) + working / _GB
        left = config.device_gb - total
        rows.append(
            {"method": method}
            | {name: getattr(arrangement, name) for name in ("learner", "devices", "stages")}
            | {name: f"{value:.1f}" for name, value in parts.items()}
            | {"working": f"{working / _GB:.1f}" if known else "not measured", "in all": f"{total:.1f}"}
            | {"left": f"{left:.1f}" if left >= 0 else f"lacks {-left:.1f}"}
        )
    return rows
