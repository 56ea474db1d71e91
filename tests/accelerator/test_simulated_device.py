"""The simulated accelerator is strict where CUDA is, counts its bytes, and computes what the CPU does."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.accelerator


def net() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Flatten(), nn.LayerNorm(4 * 36))
    return nn.Sequential(conv, nn.Linear(4 * 36, 12))


def losses(module: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    hidden = module(images).reshape(-1, 2, 3, 2)
    loss = F.scaled_dot_product_attention(hidden, hidden, hidden).softmax(-1).square().sum()
    return loss, list(torch.autograd.grad(loss, list(module.parameters())))


def test_it_computes_bit_for_bit_what_the_cpu_does_forward_and_backward() -> None:
    images = torch.randn(5, 3, 6, 6)
    here, there = net(), net().to("sim")
    loss, gradients = losses(here, images)
    on_sim, theirs = losses(there, images.to("sim:0"))
    assert on_sim.device == torch.device("sim:0")
    assert torch.equal(on_sim.cpu(), loss)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(theirs, gradients, strict=True))


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: a.add_(b),
        lambda a, b: a.gather(0, torch.zeros(1, 3, dtype=torch.long)),
        lambda a, b: b[torch.tensor([1], device="sim")],
    ],
)
def test_tensors_of_the_cpu_among_those_of_the_device_are_refused(mix) -> None:
    with pytest.raises(RuntimeError, match=r"same device"):
        mix(torch.ones(3, 3, device="sim"), torch.ones(3, 3))


def test_two_devices_do_not_mix_and_copies_go_between_them() -> None:
    a, b = torch.ones(3, device="sim:0"), torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="is on sim:1, different from other tensors on sim:0"):
        a + b
    assert (a + b.to(a.device)).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.ones(1, device="sim:8")


def test_bytes_are_counted_and_given_back_results_of_the_cpus_kernels_included(sim) -> None:
    gc.collect()
    before = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    a = torch.ones(1000, device="sim")
    b = a * 2
    assert sim.memory_allocated() - before == 8000
    view = b[10:].view(-1, 10)  # shares
    del a
    assert sim.memory_allocated() - before == 4000
    assert sim.max_memory_allocated() - before >= 8000
    del b
    assert sim.memory_allocated() - before == 4000
    del view
    assert sim.memory_allocated() == before
    free, total = sim.mem_get_info()
    assert total - free == before
    elsewhere = sim.memory_allocated(1)
    torch.ones(5, device="sim:1")
    assert sim.memory_allocated(1) == elsewhere


def test_what_does_not_fit_raises_as_on_cuda_and_the_device_continues(sim) -> None:
    kept = torch.ones(100, device="sim")
    sim.set_limit(sim.memory_allocated() + 1000)
    with pytest.raises(torch.OutOfMemoryError, match=r"sim out of memory. Tried to allocate 4000 bytes"):
        torch.empty(1000, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        kept.repeat(10)
    assert (kept + 1)[0] == 2
