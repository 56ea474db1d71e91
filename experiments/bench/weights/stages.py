"""Both ends of a weight edge: a module of so many bytes, sent and installed as an actor's and a rollout's are."""

from __future__ import annotations

import torch
from torch import nn

from rlinf_embodied.learning.weights import WeightsMessage, export_weights, install_weights
from rlinf_embodied.runtime.host import StageContext, StepContext

_MATRIX = 64 << 20  # bytes of a parameter: the size of a large model's matrices


class Holder:
    """Holds a module; every worker's begins with other values."""

    def __init__(self, config: int) -> None:
        self._bytes = config

    def setup(self, context: StageContext) -> None:
        """Makes the module."""
        sizes = [_MATRIX] * (self._bytes // _MATRIX) + [self._bytes % _MATRIX]
        made = [nn.Parameter(torch.full((size // 4,), float(context.worker))) for size in sizes if size >= 4]
        self._module = nn.ParameterList(made)

    def export_weights(self, step_context: StepContext) -> WeightsMessage:
        """Returns the weights, all of which are the number of the iteration."""
        with torch.no_grad():
            for parameter in self._module:
                parameter.fill_(float(step_context.iteration))
        return export_weights(self._module, step_context.iteration)

    def install_weights(self, step_context: StepContext, message: WeightsMessage) -> float:
        """Takes them, and reports a number of the last one."""
        install_weights(self._module, message)
        return float(self._module[-1][-1])
