"""Adam on one flat gradient, bit-equal in every process.

The gradient is one vector because it was summed as one (reduce.py).  Norm, clipping and moments use this vector, so
that a step is a few large tensor operations, whatever the number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlinf_embodied.errors import CheckpointError, ObjectiveError
from rlinf_embodied.telemetry.progress import report_progress


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Adam's constants, as AdamSettings(1e-4, (0.9, 0.99), 1.0); see FlatOptimizer."""

    lr: float
    betas: tuple[float, float]
    max_grad_norm: float  # gradients are clipped to this norm; infinity: never
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(slots=True)
class ParameterGroup:
    """Parameters with the same settings: float32, on one device, in the order of the flat gradient."""

    parameters: Sequence[nn.Parameter]
    settings: AdamSettings
    span: slice = field(default_factory=lambda: slice(0))  # of the flat gradient
    steps: int = 0  # number of steps made


class FlatOptimizer:
    """Adam with decoupled weight decay (arXiv 1412.6980 and 1711.05101) and clipping by the global norm.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
        w = w - lr weight_decay w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Every parameter group has separate constants and a separate t.  Groups that step together are clipped by their
    joint norm, to the first group's bound.  Changes of `rates` (lr by group) apply from the next step on.
    """

    def __init__(self, groups: Mapping[str, ParameterGroup]) -> None:
        """Starts with moments of zero.

        Raises:
            ObjectiveError: a group is empty, or a parameter is of low precision or listed twice.
        """
        self.parameters = [parameter for group in groups.values() for parameter in group.parameters]
        if not all(group.parameters for group in groups.values()):
            raise ObjectiveError("the list of parameters is empty, so nothing would be trained: check what is frozen")
        low = {str(parameter.dtype) for parameter in self.parameters} - {"torch.float32"}
        if low:
            rule = "small steps are lost below float32: keep trained parameters in float32"
            raise ObjectiveError(f"parameters of {sorted(low)} are to be trained, but {rule}")
        if len({id(parameter) for parameter in self.parameters}) < len(self.parameters):
            raise ObjectiveError("a parameter is listed twice, so it would make two steps: list each parameter once")
        self.rates = {name: group.settings.lr for name, group in groups.items()}
        self._groups, start = dict(groups), 0
        for group in groups.values():
            group.span = slice(start, start + sum(parameter.numel() for parameter in group.parameters))
            start = group.span.stop
        self._mean = torch.zeros(start, device=self.parameters[0].device)
        self._square = torch.zeros_like(self._mean)

    @torch.no_grad()
    def step(self, gradient: Tensor, only: Collection[str] | None = None) -> float:
        """Makes one step, of all groups or `only` some adjacent ones, and returns the gradient's norm before clipping.

        No step is made if the norm is 0.  The gradient is float32 [D], in the order of the parameters; it is
        clipped in place.

        Raises:
            ObjectiveError: the gradient is NaN or infinite; nothing was changed.
        """
        assert gradient.shape == self._mean.shape, f"the gradient has {len(gradient)} entries, not {len(self._mean)}"
        groups = {name: group for name, group in self._groups.items() if only is None or name in only}
        chosen = list(groups.values())
        view, bound = gradient[chosen[0].span.start : chosen[-1].span.stop], chosen[0].settings.max_grad_norm
        norm = float(torch.linalg.vector_norm(view, dtype=torch.float64))
        require_finite(norm)
        if norm == 0:
            return norm
        if norm > bound:
            view.mul_(bound / norm)
        for name, group in groups.items():
            direction = self._direction(group, gradient[group.span])
            weights: list[Tensor] = [*group.parameters]
            cut = direction.split([weight.numel() for weight in weights])
            parts = [part.view_as(w) for w, part in zip(weights, cut, strict=True)]
            if decay := group.settings.weight_decay:
                torch._foreach_mul_(weights, 1 - self.rates[name] * decay)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_sub_(weights, parts, alpha=self.rates[name])  # pyright: ignore[reportPrivateImportUsage]
        report_progress()
        return norm

    def _direction(self, group: ParameterGroup, gradient: Tensor) -> Tensor:
        """Updates the moments of a group and returns its step direction, to be multiplied by lr."""
        group.steps += 1
        settings, mean, square = group.settings, self._mean[group.span], self._square[group.span]
        first, second = settings.betas
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = (square / (1 - second**group.steps)).sqrt_().add_(settings.eps)
        return (mean / (1 - first**group.steps)).div_(scale)

    def move_state(self, device: str) -> None:
        """Moves the moments to a device; steps need them on the parameters' device."""
        self._mean, self._square = self._mean.to(device), self._square.to(device)

    def export_state(self, share: tuple[int, int] = (0, 1)) -> dict[str, Tensor]:
        """Returns the state, not a copy: "steps" int64 [G] by group, "mean" and "square" float32 [D], on the CPU.

        With a share (k, n) the moments are the k-th of n slices.
        """
        moments = {"mean": self._mean, "square": self._square}
        slices = {name: whole.tensor_split(share[1])[share[0]] for name, whole in moments.items()}
        steps = torch.tensor([group.steps for group in self._groups.values()])
        return {"steps": steps} | {name: own.cpu() for name, own in slices.items()}

    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state of `export_state`.

        Raises:
            CheckpointError: the state is missing or that of other parameters; nothing was changed.
        """
        require_state(state, len(self._mean), len(self._groups))
        for group, steps in zip(self._groups.values(), state["steps"].tolist(), strict=True):
            group.steps = steps
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])


def require_finite(norm: float) -> None:
    """Checks the norm of a gradient before a step."""
    if not math.isfinite(norm):
        raise ObjectiveError(
            f"the gradient's norm is {norm}, so the weights would be lost: go back to a checkpoint and use a "
            "smaller learning rate (nothing was changed)"
        )


def require_state(state: Mapping[str, Tensor], size: int, groups: int = 1) -> None:
    """Checks that a state belongs to `groups` parameter groups with `size` entries in total."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    expected = {"steps": (groups,), "mean": (size,), "square": (size,)}
    if shapes != expected:
        raise CheckpointError(
            f"the optimizer state has {shapes or 'no tensors'}, but these parameters need {expected}: it is of another "
            "policy or algorithm; resume with its own configuration, or use another run.dir"
        )


def linear_decay(iteration: int, num_iterations: int, lr: float, end_fraction: float, warmup: int = 0) -> float:
    """Returns the learning rate of an iteration: from lr at the first down to end_fraction * lr at the last.

    It rises over the first `warmup` iterations, since Adam's first steps are as large as later ones although its
    moments are not yet reliable.
    """
    done = min(1.0, iteration / max(1, num_iterations - 1))
    return lr * (1 - (1 - end_fraction) * done) * min(1.0, (iteration + 1) / (warmup + 1))


def one_cycle(step: int, num_steps: int, lr: float, warmup: float = 0.1) -> float:
    """Returns the learning rate of a step, by cosines: from lr / 25 up to lr, then down to lr / 250,000.

    `warmup` is the share of the steps with a rising rate.  (Smith and Topin, "Super-Convergence", arXiv 1708.07120; the
    constants are those of torch's OneCycleLR.)
    """
    peak, last = warmup * num_steps - 1, num_steps - 1
    if step <= peak or last <= peak:
        start, end, fraction = lr / 25, lr, step / max(peak, 1e-9)
    else:
        start, end, fraction = lr, lr / 25 / 1e4, (step - peak) / (last - peak)
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, max(0.0, fraction)))) / 2
