"""What a block adds to a minibatch: the gradient of its summed loss, the weight it counts with, and statistics.

Losses are sums; means are formed by the learner, from global weights.  A block's part comes in passes, each of them
differentiated before the next one is asked for, so that the activations of only one are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
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
    """What a pass adds: the loss to differentiate (a sum), the weight it counts with, and statistics to add up."""

    loss: Tensor  # scalar
    weight: Tensor  # scalar, the denominator of the loss
    statistics: Tensor  # [S], sums


def loss_sums(loss: Tensor, number: int, *statistics: Tensor, reported: Tensor | None = None) -> LossSums:
    """Returns sums over a number of rows; `reported` takes the place of the loss in metrics, before further ones."""
    first = loss.detach() if reported is None else reported
    return LossSums(loss, loss.new_tensor(float(number)), torch.stack([first, *statistics]))


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass that is still to be made, with what it will add to the loss's denominator."""

    weight: float
    run: Callable[[], LossSums]
    trains: bool = True  # false: it is made for its weight and statistics, without a gradient


Passes = Callable[[int, Tensor], Sequence[Pass]]  # (block, row indices [R]) -> passes over parts of these rows
Differentiate = Callable[[Callable[[], LossSums], Sequence[nn.Parameter], Tensor | None], Tensor]


def differentiated(
    run: Callable[[], LossSums], parameters: Sequence[nn.Parameter], total: Tensor | None = None
) -> Tensor:
    """Makes a pass and returns what it adds, [D + 1 + S]; a parameter that the loss does not reach has gradient 0.

    It is added to `total` where that is given.  Each gradient is taken over when it is complete, so that there is no
    second copy of all of them.
    """
    with torch.enable_grad():
        part = run()
    counted, sizes, new = _counted(part), [parameter.numel() for parameter in parameters], total is None
    if total is None:
        total = torch.empty(sum(sizes) + len(counted), device=parameters[0].device)
    *places, rest = total.split([*sizes, len(counted)])
    waiting = dict(zip(map(id, parameters), places, strict=True))

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        place = waiting.pop(id(parameter)).view_as(parameter)
        place.copy_(parameter.grad) if new else place.add_(parameter.grad)
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
    try:
        part.loss.backward(inputs=list(parameters))
        for parameter in parameters:
            if parameter.grad is not None:  # torch calls no hook of some that have changed their device
                take(parameter)
    finally:
        for parameter, hook in zip(parameters, hooks, strict=True):
            hook.remove()
            parameter.grad = None
    if new:
        for place in waiting.values():
            place.zero_()
    rest.copy_(counted) if new else rest.add_(counted)
    return total


def _joined(run: Callable[[], LossSums], parameters: Sequence[nn.Parameter]) -> Tensor:
    """Does what `differentiated` does in operations that torch can compile."""
    with torch.enable_grad():
        part = run()
        gradients = torch.autograd.grad(part.loss, list(parameters), allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return torch.cat([*(part.reshape(-1) for part in parts), _counted(part)])


def compiled(device: str) -> Differentiate:
    """Returns what compiles a pass when it meets it first, and then runs it, or raises a ConfigError.

    What a pass of a small network costs is mostly Python and the start of small operations; compiled, a few fused
    kernels are left of it, in which autograd has nothing left to do.  Kernels are a function of the pass and of all
    shapes, and therefore the same in every worker and under every plan; they round otherwise than the operations that
    they replace.

    A pass is a `functools.partial` of a method, whose arguments change from call to call; tensors of other shapes are
    recompiled, eight times at most.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # torch finds kernels in its cache by the program alone (2.14), and one made for AVX-512 computes half of every
    # vector with AVX2: each set of instructions has a folder
    level = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    folder = Path(cache_dir())
    if folder.name != level:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / level)
    # on a CPU kernels are called from C++, not one by one from Python
    options = {"cpp_wrapper": kind_of(device) == "cpu"}
    graph = torch.compile(
        _joined,
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,
        options=options,  # pyright: ignore[reportCallIssue]
    )

    def run(one: Callable[[], LossSums], parameters: Sequence[nn.Parameter], total: Tensor | None = None) -> Tensor:
        torch._dynamo.config.trace_autograd_ops = True  # of this thread
        try:
            found = graph(one, parameters)
        except (TorchDynamoException, InductorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"algorithm.compile is true, but torch cannot compile a pass of this policy here: {reason}: "
                "install g++ if it is missing, or use algorithm.compile=false"
            ) from error
        return found if total is None else total.add_(found)

    return run


def block_sums(
    passes: Iterable[Pass],
    parameters: Sequence[nn.Parameter],
    num_statistics: int,
    differentiate: Differentiate = differentiated,
) -> Tensor:
    """Returns what a block adds to a minibatch, [D + 1 + S]: gradient of its summed loss, weight, S statistics.

    The parameters have D entries in all; `differentiate` makes a pass with its gradient.
    """
    size, total = sum(p.numel() for p in parameters), None
    nothing = lambda: torch.zeros(size + 1 + num_statistics, device=parameters[0].device)  # noqa: E731
    for one in passes:
        if one.trains:
            total = differentiate(one.run, parameters, total)
        else:
            total = nothing() if total is None else total
            with torch.no_grad():
                total[size:] += _counted(one.run())
        report_progress()
    return nothing() if total is None else total


def _counted(part: LossSums) -> Tensor:
    return torch.cat([part.weight.detach().reshape(1), part.statistics.detach()])


def layers_of(module: nn.Module) -> Iterable[nn.Module]:
    """Returns a model's layers: the entries of its largest ModuleList, if it has one."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=())


def checkpoint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Lets blocks, each of them once, forget their activations and compute them again in the backward pass."""
    for block in blocks:
        if "forward" not in vars(block):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
