"""Passes compiled by torch: forward and backward pass as one graph, in which autograd has nothing left to do.

What a pass of a small network costs is mostly Python and the start of small operations; compiled, a few fused kernels
are left of it.  Kernels are a function of the pass and of all shapes, and therefore the same in every worker and under
every plan; they round otherwise than the operations that they replace.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.device import kind_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning.gradients import Differentiate, LossSums, differentiated

_RULE, _WAY_OUT = "algorithm.compile is true, but", "use algorithm.compile=false"


def compiled(device: str) -> Differentiate:
    """Returns what compiles a pass when it meets it first, and then runs it, or raises a ConfigError.

    A pass is a `functools.partial` of a method, whose arguments change from call to call; tensors of other shapes are
    recompiled, eight times at most.
    """
    _keep_apart()
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    on_cpu = kind_of(device) == "cpu"  # where kernels are called from C++, not one by one from Python
    graph = torch.compile(
        differentiated,
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,
        options={"cpp_wrapper": on_cpu},  # pyright: ignore[reportCallIssue]
    )

    def run(one: Callable[[], LossSums], parameters: Sequence[nn.Parameter]) -> Tensor:
        torch._dynamo.config.trace_autograd_ops = True  # of this thread
        try:
            return graph(one, parameters)
        except (TorchDynamoException, InductorError) as error:
            said = str(error).strip().splitlines()[0]
            raise ConfigError(f"{_RULE} torch cannot compile a pass of this policy: {said}: {_WAY_OUT}") from error

    return run


def _keep_apart() -> None:
    """Lets the kernels that torch keeps in files be those of the instructions that it uses in this process.

    It finds them by the program alone (2.14), and one made for AVX-512 computes half of every vector with AVX2.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    level = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    folder = Path(cache_dir())
    if folder.name != level:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / level)


def require_compiler(compile: bool, cluster: Cluster) -> None:
    """Checks, as well as this machine knows, that passes can be compiled on a cluster's devices if they are to be."""
    if not compile or cluster.emulated:
        return
    import torch._dynamo.config
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if not hasattr(torch._dynamo.config, "trace_autograd_ops") or "isolate_recompiles" not in (
        inspect.signature(torch.compile).parameters
    ):
        raise ConfigError(f"{_RULE} torch {torch.__version__} does not compile whole passes, 2.14 does: {_WAY_OUT}")
    if cluster.kind not in ("cpu", "cuda"):
        raise ConfigError(f"{_RULE} nobody has tried it on a device of the kind {cluster.kind}: {_WAY_OUT}")
    if cluster.kind == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            said = "torch finds no C++ compiler here: install g++ (or name another in CXX), or"
            raise ConfigError(f"{_RULE} {said} {_WAY_OUT}") from error
