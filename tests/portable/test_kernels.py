"""The definition of a product's bits, held against its own words; and that torch's calls end in these kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

SHAPES = [(1, 1, 1), (3, 5, 7), (17, 33, 300), (64, 64, 520), (7, 40, 257), (40, 5, 31), (1, 64, 256), (64, 1, 30)]
ALL_OPERATIONS = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(24, 40)
found = [x @ torch.randn(40, 33), torch.addmm(torch.randn(33), x, torch.randn(33, 40).t()), x @ torch.randn(40)]
found += [torch.randn(6, 5, 40) @ torch.randn(6, 40, 9), x.double() @ torch.randn(40, 3).double()]
found += [getattr(x.abs() + 0.1, name)() for name in ("exp", "log", "sin", "cos", "tan", "tanh", "erf", "sqrt")]
found += [getattr(x.double().abs() + 0.1, name)() for name in ("exp", "log", "tanh")]
found += [torch.nn.functional.gelu(x), torch.nn.functional.silu(x), x.softmax(-1), x.log_softmax(-1), x.std(), x.sum()]
image, weight = torch.randn(2, 3, 12, 12, requires_grad=True), torch.randn(8, 3, 3, 3, requires_grad=True)
mapped = torch.nn.functional.group_norm(torch.conv2d(image, weight, stride=2, padding=1), 4)
found += [mapped, *torch.autograd.grad(mapped.square().sum(), [image, weight])]
q = torch.randn(2, 2, 9, 16, requires_grad=True)
read = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
found += [read, torch.autograd.grad(read.square().sum(), q)[0]]
import hashlib
for value in found:
    print(hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()[:16])
"""
PINNED = "from rlinf_embodied import portable; portable.pin(); portable.verify()\n"


def fused(a: float, b: float, c: float) -> np.float32:
    """One fused multiply-add, rounded once to float32."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = np.float32(float(exact))
    candidates = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    distance = [abs(Fraction(float(value)) - exact) for value in candidates]
    best = [value for value, far in zip(candidates, distance, strict=True) if far == min(distance)]
    return next((value for value in best if not value.view(np.uint32) & 1), best[0])  # ties to even


def by_definition(row: Tensor, column: Tensor, chunk: int = 256) -> float:
    total: np.float32 | None = None
    for start in range(0, len(row), chunk):
        chain = np.float32(0)
        for a, b in zip(row[start : start + chunk].tolist(), column[start : start + chunk].tolist(), strict=True):
            chain = fused(a, b, float(chain))
        total = chain if total is None else np.float32(total + chain)
    return float(total if total is not None else 0.0)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_each_element_of_a_product_is_one_chain(m: int, n: int, k: int, turned: tuple[bool, bool]) -> None:
    draw = torch.Generator().manual_seed(m * n * k)
    a = torch.randn(k, m, generator=draw).t() if turned[0] else torch.randn(m, k, generator=draw)
    b = torch.randn(n, k, generator=draw).t() if turned[1] else torch.randn(k, n, generator=draw)
    product = a @ b
    places = {(0, 0), (m - 1, n - 1), (m // 2, n // 2), (0, n - 1)}
    for i, j in places:
        assert float(product[i, j]) == by_definition(a[i], b[:, j])


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_row_does_not_depend_on_how_many_there_are_or_how_wide_vectors_are(m: int, n: int, k: int) -> None:
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(m, k, generator=draw), torch.randn(n, k, generator=draw)
    whole = F.linear(a, b)
    choose = ctypes.CDLL(None).rlinf_portable_vectors
    try:
        choose(256)
        assert torch.equal(whole, F.linear(a, b))
        assert torch.equal(whole, torch.cat([F.linear(row[None], b) for row in a]))
        assert torch.equal(whole, torch.bmm(a.expand(3, m, k), b.t().expand(3, k, n))[2]) or m * n * k < 400
    finally:
        choose(512)


def test_products_are_accurate() -> None:
    a, b, c = torch.randn(50, 700), torch.randn(700, 30), torch.randn(50, 30)
    exact = torch.addmm(c.double(), a.double(), b.double(), beta=0.5, alpha=2.0)
    torch.testing.assert_close(torch.addmm(c, a, b, beta=0.5, alpha=2.0).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "tan", "tanh", "erf", "erfc", "atan", "sqrt", "log2"])
def test_functions_of_one_variable_are_accurate_at_every_length(name: str) -> None:
    for size in (1, 7, 8, 100):
        x = torch.rand(size) + 0.1
        exact = getattr(x.double(), name)()
        torch.testing.assert_close(getattr(x, name)().double(), exact, rtol=1e-6, atol=1e-7)
        assert torch.equal(getattr(x, name)(), torch.cat([getattr(x[i : i + 1], name)() for i in range(size)]))


def digests(start: str, **variables: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if key not in UNPINNED} | variables
    done = subprocess.run(
        [*start.split(), "-c", PINNED + ALL_OPERATIONS if "RLINF_UNPINNED" not in variables else ALL_OPERATIONS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    return done.stdout.split()


UNPINNED = {"ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "LD_PRELOAD", "RLINF_PORTABLE_LIBRARY"}
UNPINNED |= {"NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE", "LP_NATIVE_VECTOR_WIDTH"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64 (Debian: apt-get install qemu-user)")
@pytest.mark.parametrize("processor", ["Haswell", "EPYC"])
def test_an_emulated_processor_gives_the_same_bits(processor: str) -> None:
    here = digests(sys.executable)
    assert digests(f"qemu-x86_64 -cpu {processor} {sys.executable}") == here


@pytest.mark.slow
def test_without_pins_other_instruction_sets_give_other_bits() -> None:
    pinned = digests(sys.executable)
    free = digests(sys.executable, RLINF_UNPINNED="1")
    narrow = digests(sys.executable, RLINF_UNPINNED="1", ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")
    assert len(pinned) == len(free) == len(narrow)
    assert free != narrow  # so the comparison above can fail
