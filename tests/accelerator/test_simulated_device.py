"""The simulated accelerator is strict where CUDA is, counts its bytes, and computes what the CPU does."""

from __future__ import annotations

import gc
import io
import pickle

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
        lambda a, b: b + a,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a @ b,
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: a.add_(b),
        lambda a, b: b.add_(a),
        lambda a, b: a.index_select(0, torch.tensor([1])),
        lambda a, b: a.gather(0, torch.zeros(1, 3, dtype=torch.long)),
        lambda a, b: b[torch.tensor([1], device="sim")],
        lambda a, b: F.linear(a, b),
        lambda a, b: torch.stack([a[0], b[0]]),
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


def test_scalars_and_the_indices_of_a_tensor_may_lie_on_the_cpu() -> None:
    a = torch.arange(6.0, device="sim").reshape(2, 3)
    assert (a * torch.tensor(2.0))[torch.tensor([1])].tolist() == [[6, 8, 10]]
    a[torch.tensor([0])] = torch.tensor(7.0)
    assert a[0].tolist() == [7, 7, 7]
    with pytest.raises(RuntimeError, match="same device"):
        a[torch.tensor([0])] = torch.ones(1, 3)


def test_numpy_is_refused_as_memory_of_a_device() -> None:
    with pytest.raises(TypeError, match="convert sim:0 device type tensor to numpy"):
        torch.ones(2, device="sim").numpy()


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


def test_what_does_not_fit_raises_as_on_cuda_and_the_device_goes_on(sim) -> None:
    kept = torch.ones(100, device="sim")
    sim.set_limit(sim.memory_allocated() + 1000)
    with pytest.raises(torch.OutOfMemoryError, match=r"sim out of memory. Tried to allocate 4000 bytes"):
        torch.empty(1000, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        kept.repeat(10)
    assert (kept + 1)[0] == 2


def test_memory_that_nothing_was_written_to_is_not_zero() -> None:
    assert torch.empty(3, device="sim").isnan().all()


def test_outputs_in_place_and_of_another_size_are_the_devices() -> None:
    out = torch.empty(0, device="sim")
    assert torch.add(torch.ones(3, device="sim"), 1, out=out) is out
    assert out.tolist() == [2, 2, 2]
    transposed = torch.arange(6.0, device="sim").reshape(2, 3).t()
    transposed.mul_(2)
    assert transposed.contiguous().tolist() == [[0, 6], [2, 8], [4, 10]]
    values, order = torch.sort(transposed.reshape(-1), descending=True)
    assert values.device == order.device == torch.device("sim:0")


def test_tensors_are_saved_and_come_back_wherever_they_are_wanted() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3.0, device="sim:0")}, file)
    for wanted, found in (("cpu", "cpu"), (None, "sim:0"), ("sim:1", "sim:1")):
        file.seek(0)
        tensor = torch.load(file, map_location=wanted)["a"]
        assert tensor.device == torch.device(found)
        assert tensor.tolist() == [0, 1, 2]
    assert pickle.loads(pickle.dumps(torch.ones(2, device="sim"))).device == torch.device("sim:0")


def test_autocast_multiplies_in_bfloat16_and_takes_softmax_in_float32() -> None:
    a = torch.randn(4, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = a @ a
        assert product.dtype is torch.bfloat16
        assert product.softmax(-1).dtype is torch.float32
    assert torch.equal((a.cpu().bfloat16() @ a.cpu().bfloat16()), product.cpu())


def test_a_generator_is_of_the_device_that_draws() -> None:
    drawn = torch.randn(3, device="sim", generator=torch.Generator("sim").manual_seed(1))
    assert torch.equal(drawn.cpu(), torch.randn(3, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(3, device="sim", generator=torch.Generator())
