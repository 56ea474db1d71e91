"""A device is a value: torch's name of it, and what is asked of it, alike for every kind of accelerator.

    driver    cluster.torch_device -> Cluster.torch_device(worker) -> "cuda:0", "npu:1", "cpu", ...
    worker    WorkerSpec.device; a kind that torch knows only by a module of others: cluster.device_module is imported
    stages    tensors made and moved by that name; memory, waiting and collectives by the functions here

A process that works without torch (a worker that only sleeps) may ask for the kind without torch being imported.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, cast

from rlinf_embodied.config import Precision
from rlinf_embodied.errors import ConfigError

_PEAKS = {  # dense bfloat16 FLOP/s by part of the device's name (NVIDIA's data sheets), the more exact names first
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}
_OWN_MEMORY_OF_NONE = ("cpu", "emulated")  # a core shares its machine's memory, an emulated device has none


def kind_of(device: str) -> str:
    """Returns the kind in torch's name of a device: "cuda" of "cuda:0"."""
    return device.partition(":")[0]


def peak_flop_per_s(device: str) -> float | None:
    """Returns the peak of a device in bfloat16; None where it is not known."""
    import torch

    name = torch.cuda.get_device_name(device) if kind_of(device) == "cuda" else ""
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def name_of(device: str) -> str:
    """Returns the name by which other processes see a device: for CUDA_VISIBLE_DEVICES, or torch's of another kind."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if kind_of(device) != "cuda":
        return device
    return visible.split(",")[_index(device)] if visible else str(_index(device))


def is_accelerator(device: str) -> bool:
    """Returns whether a device has separate memory, which data has to be moved to."""
    return kind_of(device) not in _OWN_MEMORY_OF_NONE


def import_kind(module: str | None) -> None:
    """Imports the module that makes a kind of device known to torch; None: torch knows it, or finds it by itself.

    Raises:
        ConfigError: there is no such module, or it fails.
    """
    if module is None:
        return
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"cluster.device_module is {module!r}, which cannot be imported ({type(error).__name__}: {error}): name an "
            "importable module that makes the device known to torch, or leave it out"
        ) from error


def require(device: str) -> None:
    """Checks that torch knows a device and sees it here.

    Raises:
        ConfigError: it does not.
    """
    import torch

    if not is_accelerator(device):
        return
    try:
        found = torch.device(device)
        number = _module(device).device_count()
    except (RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"cluster.torch_device is {kind_of(device)!r}, which this torch does not know "
            f"({str(error).splitlines()[0]}): use auto, cpu or cuda, or name the module that brings the device in "
            "cluster.device_module"
        ) from error
    if (found.index or 0) >= number:
        raise ConfigError(
            f"cluster.torch_device is {kind_of(device)!r}, but {device} is wanted and this process sees {number} of "
            f"them: use cluster.num_devices={max(number, 1)} or less, or cluster.torch_device=cpu"
        )


def computing(precision: Precision, device: str) -> AbstractContextManager[object]:
    """Returns a context for a forward pass on a device; in float32 it does nothing.

    In bfloat16 torch's autocast casts what enters matrix products and convolutions; a backward pass computes each
    operation in the precision of its forward pass.  Weights, moments, sums of gradients, log-probs and losses are
    float32 in either.
    """
    if precision is Precision.float32:
        return nullcontext()
    import torch

    return torch.autocast(kind_of(device), torch.bfloat16)


def require_precision(precision: Precision, device: str, module: str | None = None) -> None:
    """Checks that torch computes in a precision on a kind of device; a process that sees no GPU cannot tell of CUDA.

    Raises:
        ConfigError: it does not, or the module that makes the kind known cannot be imported.
    """
    if precision is Precision.float32:
        return
    import_kind(module)
    import torch

    kind = kind_of(device)
    if kind == "cuda" and not torch.cuda.is_available():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            torch.autocast(kind, torch.bfloat16)
        except (RuntimeError, AssertionError, Warning) as error:
            raise ConfigError(
                f"algorithm.precision is 'bfloat16', but torch has no autocast to it for devices of the kind {kind!r} "
                f"({str(error).splitlines()[0]}): use algorithm.precision=float32, or another cluster.torch_device"
            ) from error


def use(device: str) -> None:
    """Makes an accelerator the one that this thread allocates on where a tensor's place has no number."""
    if is_accelerator(device):
        _module(device).set_device(_index(device))


def synchronize(device: str) -> None:
    """Waits until an accelerator has completed all submitted work."""
    if is_accelerator(device):
        _module(device).synchronize(_index(device))


def empty_cache(device: str) -> None:
    """Gives memory back that torch's allocator keeps, though no tensor lies in it."""
    if is_accelerator(device):
        _module(device).empty_cache()


def reset_peak(device: str) -> None:
    """Starts a new maximum of an accelerator's memory."""
    _module(device).reset_peak_memory_stats(_index(device))


def used_bytes(device: str) -> tuple[float, float]:
    """Returns the bytes of an accelerator that are in use, and most since the last `reset_peak`.

    What others than torch hold there, such as a simulator, counts as it is now.
    """
    module, index = _module(device), _index(device)
    free, total = module.mem_get_info(index)
    used = float(total - free)
    return used, used + module.max_memory_allocated(index) - module.memory_allocated(index)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that a tensor did not fit into a device's memory."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def has_nccl(device: str) -> bool:
    """Returns whether collectives run on the device itself; those of other kinds go through the host's memory."""
    return kind_of(device) == "cuda"


def _module(device: str) -> Any:
    import torch

    return cast(ModuleType, torch.get_device_module(kind_of(device)))


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)
