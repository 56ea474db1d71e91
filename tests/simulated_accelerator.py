"""Makes the device "sim" (accelerator/sim.cpp) known to torch; import it, or name it in cluster.device_module.

    cluster.torch_device=sim cluster.device_module=simulated_accelerator cluster.num_devices=1

`torch.sim` then answers what `torch.cuda` would, and besides: `set_limit(bytes)`, `operations()`.
A device starts with 4 GiB, or with SIM_ROOM_BYTES where the environment has it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.nn.attention
from sim_library import library
from torch import Tensor

NAME = "sim"
_C = ctypes.CDLL(str(library()))
for _name in ("in_use", "peak", "limit", "operations"):
    getattr(_C, f"sim_{_name}").restype = ctypes.c_int64
for _device in range(_C.sim_device_count() if "SIM_ROOM_BYTES" in os.environ else 0):
    _C.sim_set_limit(_device, ctypes.c_int64(int(os.environ["SIM_ROOM_BYTES"])))


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return _C.sim_current_device() if found is None else found


def memory_allocated(device: torch.device | str | int | None = None) -> int:
    """Returns the bytes of all tensors on a device."""
    return _C.sim_in_use(_index(device))


def max_memory_allocated(device: torch.device | str | int | None = None) -> int:
    """Returns the most bytes since the last reset."""
    return _C.sim_peak(_index(device))


def reset_peak_memory_stats(device: torch.device | str | int | None = None) -> None:
    """Starts a new maximum."""
    _C.sim_reset_peak(_index(device))


def mem_get_info(device: torch.device | str | int | None = None) -> tuple[int, int]:
    """Returns (free, total) bytes."""
    total = _C.sim_limit(_index(device))
    return total - memory_allocated(device), total


def set_limit(size: int, device: torch.device | str | int | None = None) -> None:
    """Gives a device another size in bytes; what does not fit raises torch.OutOfMemoryError."""
    _C.sim_set_limit(_index(device), ctypes.c_int64(size))


def operations() -> int:
    """Returns how many operations ran on the devices of this process."""
    return _C.sim_operations()


def set_device(device: torch.device | str | int) -> None:
    """Makes a device the current one of this thread."""
    _C.sim_set_device(_index(device))


@contextmanager
def device_of(device: torch.device | str | int) -> Iterator[None]:
    """Makes a device the current one within the block (`torch.sim.device`)."""
    before = _C.sim_current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Waits for a device, which is never late."""


def empty_cache() -> None:
    """Gives back what is kept: nothing is."""


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attends as the CPU would: torch asks only devices that it knows which kernel suits them."""
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    own = (query, key, value, mask, dropout_p, is_causal)
    if torch._fused_sdp_choice(*own, scale=scale, enable_gqa=enable_gqa) == torch.nn.attention.SDPBackend.MATH.value:
        return torch._scaled_dot_product_attention_math(*own, scale=scale, enable_gqa=enable_gqa)[0]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]


def _module() -> ModuleType:
    module = ModuleType(f"torch.{NAME}")
    own = (memory_allocated, max_memory_allocated, reset_peak_memory_stats, mem_get_info, set_limit, operations)
    for function in (*own, set_device, synchronize, empty_cache):
        setattr(module, function.__name__, function)
    module.device = device_of  # pyright: ignore[reportAttributeAccessIssue]
    fixed = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": _C.sim_device_count(),
        "get_amp_supported_dtype": [torch.float16, torch.bfloat16],
    }
    for name, value in fixed.items():
        setattr(module, name, lambda value=value: value)
    module.current_device = lambda: _C.sim_current_device()  # pyright: ignore[reportAttributeAccessIssue]
    # operations without a generator draw from the CPU's default one, which has been seeded already
    module.manual_seed_all = lambda seed: None  # pyright: ignore[reportAttributeAccessIssue]
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # pyright: ignore[reportAttributeAccessIssue]
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # pyright: ignore[reportAttributeAccessIssue]
    return module


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_OVERRIDES = torch.library.Library("aten", "IMPL")  # they hold for as long as this is kept
for _key in ("AutogradPrivateUse1", "PrivateUse1"):
    _OVERRIDES.impl("scaled_dot_product_attention", _attention, _key)
