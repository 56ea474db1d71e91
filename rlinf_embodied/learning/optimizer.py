"""Adam over a fixed list of parameters: one flat gradient in, one step out, the same bits in every process.

The gradient arrives as one vector because it was summed as one (reduce.py); norm, clipping and moments work on it as it
is, so that a step is a handful of large tensor operations however many parameters there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rlinf_embodied.config import Schedule
from rlinf_embodied.errors import CheckpointError, ObjectiveError
from rlinf_embodied.telemetry.progress import report_progress


class FlatOptimizer:
    """Adam with decoupled weight decay (arXiv 1412.6980 and 1711.05101) and clipping by the global norm.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
        w = w - lr weight_decay w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    `lr` may be set at any time and counts from the next step on.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
    ) -> None:
        """Starts with moments of zero.

        Args:
            parameters: float32, on one device; their order is that of the flat gradient.
            lr: learning rate.
            betas: decay of the two moments per step.
            eps: added to the root of the second moment.
            weight_decay: per unit of lr.
            max_grad_norm: gradients with a larger norm are scaled down to it; None: never.

        Raises:
            ObjectiveError: there is nothing to train, or a parameter is of low precision or listed twice.
        """
        self.parameters = list(parameters)
        self.lr = lr
        _require_trainable(self.parameters)
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self._steps = 0
        self._mean = torch.zeros(sum(self._sizes), device=self.parameters[0].device)
        self._square = torch.zeros_like(self._mean)

    @torch.no_grad()
    def step(self, gradient: Tensor) -> float:
        """Makes one step and returns the gradient's norm before clipping.

        Args:
            gradient: float32 [D], in the order of the parameters; it is clipped where it lies.

        Raises:
            ObjectiveError: the gradient is NaN or infinite; nothing was changed.
        """
        assert gradient.shape == self._mean.shape, f"the gradient has {len(gradient)} entries, not {len(self._mean)}"
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not math.isfinite(norm):
            raise ObjectiveError(
                f"the gradient's norm is {norm} in step {self._steps + 1}, so the weights would be lost: go back to a "
                "checkpoint and use a smaller learning rate (nothing was changed)"
            )
        if norm > self._max_grad_norm:
            gradient.mul_(self._max_grad_norm / norm)
        self._apply(self._direction(gradient))
        report_progress()
        return norm

    def _direction(self, gradient: Tensor) -> Tensor:
        """Updates the moments and returns what lr is multiplied with, [D]."""
        self._steps += 1
        first, second = self._betas
        self._mean.mul_(first).add_(gradient, alpha=1 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = (self._square / (1 - second**self._steps)).sqrt_().add_(self._eps)
        return (self._mean / (1 - first**self._steps)).div_(scale)

    def _apply(self, direction: Tensor) -> None:
        weights: list[Tensor] = [*self.parameters]
        parts = [part.view_as(w) for w, part in zip(weights, direction.split(self._sizes), strict=True)]
        if self._weight_decay:
            torch._foreach_mul_(weights, 1 - self.lr * self._weight_decay)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_sub_(weights, parts, alpha=self.lr)  # pyright: ignore[reportPrivateImportUsage]

    def move_state(self, device: str) -> None:
        """Moves the moments to a device; steps need them where the parameters are."""
        self._mean, self._square = self._mean.to(device), self._square.to(device)

    def export_state(self) -> dict[str, Tensor]:
        """Returns a copy of all state beside lr: "steps" int64 [1], "mean" and "square" float32 [D], on CPU."""
        return {
            "steps": torch.tensor([self._steps]),
            "mean": self._mean.to("cpu", copy=True),
            "square": self._square.to("cpu", copy=True),
        }

    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `export_state` returned.

        Raises:
            CheckpointError: the state is missing or that of other parameters; nothing was changed.
        """
        require_state(state, len(self._mean))
        self._steps = int(state["steps"][0])
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])


def require_state(state: Mapping[str, Tensor], size: int) -> None:
    """Checks that a state is that of parameters with `size` entries in all.

    Raises:
        CheckpointError: it is missing or that of other parameters.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    expected = {"steps": (1,), "mean": (size,), "square": (size,)}
    if shapes != expected:
        raise CheckpointError(
            f"the optimizer state has {shapes or 'no tensors'}, but these parameters need {expected}: the "
            "checkpoint is of another policy or algorithm; resume with its own configuration, or use resume=never"
        )


def _require_trainable(parameters: Sequence[nn.Parameter]) -> None:
    if not parameters:
        raise ObjectiveError("the list of parameters is empty, so nothing would be trained: check what is frozen")
    low = {str(parameter.dtype) for parameter in parameters} - {"torch.float32"}
    if low:
        raise ObjectiveError(
            f"parameters of {sorted(low)} are to be trained, but small steps are lost below float32: "
            "keep trained parameters in float32"
        )
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise ObjectiveError("a parameter is listed twice, so it would make two steps: list each parameter once")


def linear_decay(iteration: int, num_iterations: int, lr: float, end_fraction: float, warmup: int = 0) -> float:
    """Returns the learning rate of an iteration: from lr at the first down to end_fraction * lr at the last.

    It rises over the first `warmup` iterations: Adam's first steps are as large as its later ones, whatever the
    gradient, as its moments know nothing yet.
    """
    done = min(1.0, iteration / max(1, num_iterations - 1))
    return lr * (1 - (1 - end_fraction) * done) * min(1.0, (iteration + 1) / (warmup + 1))


def one_cycle(step: int, num_steps: int, lr: float, warmup: float = 0.1) -> float:
    """Returns the learning rate of a step, by cosines: from lr / 25 up to lr, then down to lr / 250,000.

    `warmup` is the share of the steps that go up.  (Smith and Topin, "Super-Convergence", arXiv 1708.07120; the
    constants are those of torch's OneCycleLR.)
    """
    peak, last = warmup * num_steps - 1, num_steps - 1
    if step <= peak or last <= peak:
        return _cosine(lr / 25, lr, step / max(peak, 1e-9))
    return _cosine(lr, lr / 25 / 1e4, (step - peak) / (last - peak))


def scheduled(schedule: Schedule, step: int, num_steps: int, lr: float, warmup: float = 0.1) -> float:
    """Returns the learning rate of a step under a schedule; all but one_cycle rise linearly over the first steps.

    `warmup` is the share of the steps that go up; then cosine falls to 0 as a half cosine, linear as a straight line,
    and constant stays.
    """
    if schedule is Schedule.one_cycle:
        return one_cycle(step, num_steps, lr, warmup)
    rising = round(warmup * num_steps)
    if step < rising:
        return lr * (step + 1) / rising
    done = (step - rising) / max(1, num_steps - rising)
    return lr * _FALLS[schedule](done)


_FALLS: dict[Schedule, Callable[[float], float]] = {  # of the share of the remaining steps that is done
    Schedule.cosine: lambda done: _cosine(1.0, 0.0, done),
    Schedule.linear: lambda done: 1.0 - done,
    Schedule.constant: lambda done: 1.0,
}


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, max(0.0, fraction)))) / 2
