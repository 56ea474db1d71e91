"""A block's contribution to a minibatch: the gradient of its summed loss, its weight, and statistics.

Losses are sums; the learner forms means from global weights.  A block is computed in passes, each differentiated before
the next one starts, so that memory holds the activations of only one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlinf_embodied.device import kind_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.progress import report_progress


@dataclass(frozen=True, slots=True)
class LossSums:
    """The result of a pass: the loss to differentiate (a sum), its weight, and statistics, all of which are summed."""

    loss: Tensor  # scalar
    weight: Tensor  # scalar, the denominator of the loss
    statistics: Tensor  # [S], sums


def microbatches(rows: Mapping[int, Tensor], most: int | None) -> list[dict[int, Tensor]]:
    """Cuts row indices [R] of blocks, in order, into parts of `most` rows and a rest; None: one part. Empty ones go."""
    parts: list[dict[int, Tensor]] = [{}]
    room = limit = most or sum(map(len, rows.values()))
    for block, index in rows.items():
        while len(index):
            if not room:
                parts.append({})
                room = limit
            parts[-1][block], index = index[:room], index[room:]
            room -= len(parts[-1][block])
    return [part for part in parts if part]


def loss_sums(loss: Tensor, number: int, *statistics: Tensor, reported: Tensor | None = None) -> LossSums:
    """Returns sums over a number of rows; metrics have `reported` instead of the loss, then the other statistics."""
    first = loss.detach() if reported is None else reported
    return LossSums(loss, loss.new_tensor(float(number)), torch.stack([first, *statistics]))


@dataclass(frozen=True, slots=True)
class Pass:
    """A pending forward pass, with its contribution to the loss's denominator."""

    weight: float
    run: Callable[[], LossSums]
    trains: bool = True  # false: only for its weight and statistics, without a gradient


Passes = Callable[[Mapping[int, Tensor]], Sequence[Pass]]  # row indices [R] of blocks -> passes over parts of them
Differentiate = Callable[[Callable[[], LossSums], Sequence[nn.Parameter], Tensor | None], Tensor]


def differentiated(
    run: Callable[[], LossSums], parameters: Sequence[nn.Parameter], total: Tensor | None = None
) -> Tensor:
    """Runs a pass and returns gradient, weight and statistics, [D + 1 + S]; unused parameters have gradient 0.

    The result is added to `total` if given.  Autograd adds each gradient to its place there as soon as it is complete,
    so that there is no second copy of all gradients.
    """
    with torch.enable_grad():
        part = run()
    counted, sizes = _counted(part), [parameter.numel() for parameter in parameters]
    if total is None:
        total = torch.zeros(sum(sizes) + len(counted), device=parameters[0].device)
    *views, tail = total.split([*sizes, len(counted)])
    try:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)
        part.loss.backward(inputs=list(parameters))
    finally:
        for parameter in parameters:
            parameter.grad = None
    tail.add_(counted)
    return total


def _joined(run: Callable[[], LossSums], parameters: Sequence[nn.Parameter]) -> Tensor:
    """Computes `differentiated` with operations that torch can compile."""
    with torch.enable_grad():
        part = run()
        gradients = torch.autograd.grad(part.loss, list(parameters), allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return torch.cat([*(part.reshape(-1) for part in parts), _counted(part)])


def compiled(device: str) -> Differentiate:
    """Returns a function that compiles a pass at its first call and runs it; it raises a ConfigError on failure.

    The cost of a small network's pass is mostly Python and the launch of small operations; compiled, it is a few fused
    kernels that include the gradient.  Kernels depend on the pass and all shapes, and so are the same in every worker
    and under every plan; they round differently from the operations that they replace.

    A pass is a `functools.partial` of a method with varying arguments; new shapes are recompiled, eight times at most.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # torch's cache identifies kernels by the program alone (2.14), and one compiled for AVX-512 computes only half of
    # each vector with AVX2: each instruction set has a separate folder
    level = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    folder = Path(cache_dir())
    if folder.name != level:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / level)
    # on a CPU, C++ calls the kernels instead of Python
    options = {"cpp_wrapper": kind_of(device) == "cpu"}
    graph = torch.compile(
        _joined,
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,
        options=options,  # pyright: ignore[reportCallIssue]
    )

    def run(forward: Callable[[], LossSums], parameters: Sequence[nn.Parameter], total: Tensor | None = None) -> Tensor:
        torch._dynamo.config.trace_autograd_ops = True  # of this thread
        try:
            gradient = graph(forward, parameters)
        except (TorchDynamoException, InductorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"algorithm.compile is true, but torch cannot compile a pass of this policy here: {reason}: "
                "install g++ if it is missing, or use algorithm.compile=false"
            ) from error
        return gradient if total is None else total.add_(gradient)

    return run


def block_sums(
    passes: Iterable[Pass],
    parameters: Sequence[nn.Parameter],
    num_statistics: int,
    differentiate: Differentiate = differentiated,
) -> Tensor:
    """Returns a block's contribution to a minibatch, [D + 1 + S]: gradient of its summed loss, weight, S statistics.

    D is the number of entries of all parameters; `differentiate` runs a pass with its gradient.
    """
    size, total = sum(p.numel() for p in parameters), None
    zeros = lambda: torch.zeros(size + 1 + num_statistics, device=parameters[0].device)  # noqa: E731
    for loss_pass in passes:
        if loss_pass.trains:
            total = differentiate(loss_pass.run, parameters, total)
        else:
            total = zeros() if total is None else total
            with torch.no_grad():
                total[size:] += _counted(loss_pass.run())
        report_progress()
    return zeros() if total is None else total


def _counted(part: LossSums) -> Tensor:
    return torch.cat([part.weight.detach().reshape(1), part.statistics.detach()])


def layers_of(module: nn.Module) -> Iterable[nn.Module]:
    """Returns a model's layers: the entries of its largest ModuleList, if it has one."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=())


def checkpoint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Makes blocks recompute their activations in the backward pass; repeated calls have no further effect."""
    for block in blocks:
        if "forward" not in vars(block):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
