"""Passes compiled by torch: forward and backward pass as one graph, in which autograd has nothing left to do.

What a pass of a small network costs is mostly Python and the start of small operations; compiled, a few fused kernels
are left of it.  Kernels are a function of the pass and of all shapes, and therefore the same in every worker and under
every plan; they round otherwise than the operations that they replace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_embodied.device import kind_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning.gradients import Differentiate, LossSums, differentiated


def compiled(device: str) -> Differentiate:
    """Returns what compiles a pass when it meets it first, and then runs it, or raises a ConfigError.

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
        differentiated,
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,
        options=options,  # pyright: ignore[reportCallIssue]
    )

    def run(one: Callable[[], LossSums], parameters: Sequence[nn.Parameter]) -> Tensor:
        torch._dynamo.config.trace_autograd_ops = True  # of this thread
        try:
            return graph(one, parameters)
        except (TorchDynamoException, InductorError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"algorithm.compile is true, but torch cannot compile a pass of this policy here: {reason}: "
                "install g++ if it is missing, or use algorithm.compile=false"
            ) from error

    return run
