"""Training with sharded weights and moments, by torch's FSDP2 over the workers of a group.

    worker 0                            worker 1
    slices of all weights, moments      slices of all weights, moments        as DTensors
    pass over its rows                  pass over its rows                    layers are gathered, used, and dropped
        \\------------- reduce-scatter -------------/                          layer by layer: slices of the gradient
    norm over workers, AdamW            norm over workers, AdamW
    the view: a full copy               the view: a full copy                 `publish`, once per iteration

With P float32 parameters on N workers, a worker holds 12 P / N bytes of weights and moments, 4 P / N of gradients
during its passes, and weights and gradient of the current layer.  Other stages read the *view* (4 P bytes, on the CPU
while no other stage uses it), so messages, checkpoints and generation are those of an unsharded model.

Reduce-scatter computes the sums, so their last bits depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from rlinf_embodied.config import Precision
from rlinf_embodied.config.checks import require
from rlinf_embodied.device import has_nccl, kind_of, use
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.learning.gradients import Pass, Passes, layers_of
from rlinf_embodied.learning.groups import Group
from rlinf_embodied.learning.learner import AdamSettings, EarlyStop, Learner, Step
from rlinf_embodied.learning.optimizer import require_finite, require_state
from rlinf_embodied.telemetry.progress import report_progress

_MOMENTS = {"mean": "exp_avg", "square": "exp_avg_sq"}  # name in a checkpoint -> in torch's optimizer


def device_mesh(group: Group, device: str) -> DeviceMesh:
    """Returns torch's device mesh of a group of processes.

    It becomes the process's default group, since torch only shards over registered groups; the default group of an
    earlier plan is closed.
    """
    store = dist.HashStore() if group.size == 1 else getattr(group, "store", None)  # pyright: ignore[reportPrivateImportUsage]
    if store is None:
        raise ConfigError(
            f"algorithm.sharding is 'fsdp2', but the {group.size} workers of the actor are threads of one process: "
            "use cluster.session=ray, a plan with one actor worker, or algorithm.sharding=none"
        )
    if dist.is_initialized():
        dist.destroy_process_group()
    use(device)
    dist.init_process_group(
        "nccl" if has_nccl(device) else "gloo",
        store=dist.PrefixStore("sharding", store),  # pyright: ignore[reportPrivateImportUsage]
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=getattr(group, "timeout_s", 600.0)),
    )
    return DeviceMesh.from_group(cast(dist.ProcessGroup, dist.group.WORLD), kind_of(device))


def shard(module: nn.Module, mesh: DeviceMesh, precision: Precision = Precision.float32) -> None:
    """Shards a module in place; each entry of its largest ModuleList (the layers) is gathered as a unit, and the rest.

    Gradients are summed over workers, not averaged.  With bfloat16, weights are gathered in this precision, while
    shards, and the sums and communication of gradients, stay float32.
    """
    for unit in (*layers_of(module), module):
        policy = MixedPrecisionPolicy()
        if precision is Precision.bfloat16:
            # layers cast their inputs, to add them to bfloat16 outputs; inputs of the whole module may be choices to
            # score; frozen layers may never run (a cached prefix), but torch reads their gradients if sums have a dtype
            sums = torch.float32 if any(p.requires_grad for p in unit.parameters()) else None
            policy = MixedPrecisionPolicy(torch.bfloat16, sums, cast_forward_inputs=unit is not module)
        sharded = cast(FSDPModule, fully_shard(unit, mesh=mesh, mp_policy=policy))
        # per unit, since these two calls are not recursive; gloo supports neither AVG nor scaled sums
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    for name in getattr(module, "called_as_forward", ()):
        register_fsdp_forward_method(module, name)


class ShardedLearner(Learner):
    """A learner by FSDP2; `step`, `publish` and `export_state` are collective."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Callable[[], Sequence[nn.Parameter]],
        view: nn.Module,
        settings: AdamSettings,
        statistics: Sequence[str],
        *,
        zero_loss: Callable[[], Tensor],
        group: Group,
        device: str,
        precision: Precision = Precision.float32,
        exact: bool = False,
    ) -> None:
        """Shards `module`, which only the learner may use from now on; starts with moments of zero.

        The module is on the CPU, equal in all workers; `view` is another copy, which other stages read.  `parameters`
        returns the trained parameters of the sharded module, in the order of the checkpoint.  `zero_loss` returns a
        loss of 0 from a forward pass, because all workers must join each pass.  Only a single worker can be `exact`.

        Raises:
            ConfigError: there are several workers in an exact run, or they are threads of one process.
        """
        rule = f"run.exact needs sums in a fixed order, and those of {group.size} sharded workers are not"
        action = "set run.exact=false, algorithm.sharding=none, or use a plan with one actor worker"
        require(group.size == 1 or not exact, "algorithm.sharding", "fsdp2", rule, action)
        self.rates = {"main": settings.lr}
        self.statistics, self._max_norm = tuple(statistics), settings.max_grad_norm
        self._group, self._device, self._zero_loss = group, device, zero_loss
        self._mesh = device_mesh(group, device)
        shard(module, self._mesh, precision)
        self._module, self._view = cast(FSDPModule, module), dict(view.named_parameters())
        chosen = {id(parameter) for parameter in parameters()}
        self._named = {name: p for name, p in module.named_parameters() if id(p) in chosen}
        self._parameters = list(self._named.values())
        constants = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
        self._optimizer = torch.optim.AdamW(self._parameters, **constants, weight_decay=settings.weight_decay)
        for parameter in self._parameters:  # also before the first step, so that states are exported in the same form
            zeros = {key: torch.zeros_like(parameter) for key in _MOMENTS.values()}
            self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}

    def start(self) -> None:
        self._optimizer.zero_grad()

    def add(self, block: int, rows: Tensor, passes: Passes) -> None:
        """Does nothing yet, since passes are collective and their weight in the mean is not known."""

    def step(
        self,
        rows: Mapping[int, Tensor],
        passes: Passes,
        early_stop: EarlyStop | None = None,
        only: Collection[str] | None = None,
    ) -> Step:
        """A sharded model has one group of parameters."""
        present = {block: index for block, index in rows.items() if len(index)}
        own_passes = passes(present) if present else ()
        local = torch.tensor([sum(loss_pass.weight for loss_pass in own_passes), len(own_passes)], dtype=torch.float64)
        agreed = torch.stack([part[0] for part in self._group.exchange([local], [1] * self._group.size)])
        weight, rounds = float(agreed[:, 0].sum()), int(agreed[:, 1].max())  # all join the passes of the busiest worker
        statistics = self._accumulated(own_passes, rounds, weight)
        sums = self._group.all_reduce(statistics).tolist()
        step = Step(dict(zip(self.statistics, sums, strict=True)), weight)
        stopped = weight > 0 and early_stop is not None and early_stop(step)
        if weight == 0 or stopped:
            self._optimizer.zero_grad()
            return replace(step, stopped=stopped)
        return replace(step, norm=self._apply())

    def _accumulated(self, own_passes: Sequence[Pass], rounds: int, weight: float) -> Tensor:
        """Accumulates gradients of the mean loss, and returns this worker's sums of the statistics, [S]."""
        total = torch.zeros(len(self.statistics), device=self._device)
        for number in range(rounds):
            if number < len(own_passes):
                sums = own_passes[number].run()
                report_progress()
                total += sums.statistics
                loss = sums.loss / weight if weight and own_passes[number].trains else sums.loss * 0.0
            else:
                loss = self._zero_loss()
            loss.backward()
        return total

    @torch.no_grad()
    def _apply(self) -> float | None:
        """Clips and steps; returns the norm before clipping, or None if it is 0 and no step is made."""
        for parameter in self._parameters:
            if parameter.grad is None:  # moments decay nevertheless
                parameter.grad = torch.zeros_like(parameter)
        norm = float(_whole(nn.utils.clip_grad_norm_(self._parameters, self._max_norm)))
        if norm == 0 or not math.isfinite(norm):
            self._optimizer.zero_grad()
            require_finite(norm)
            return None
        self._optimizer.param_groups[0]["lr"] = self.lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Gathers the trained weights into the view; each worker receives 4 P bytes per iteration."""
        for name, parameter in self._named.items():
            self._view[name].copy_(_whole(parameter))

    @torch.no_grad()
    def adopt(self) -> None:
        """Copies the view into the shards, including frozen weights."""
        for name, parameter in cast(nn.Module, self._module).named_parameters():
            self._fill(parameter, self._view[name])

    def move_state(self, device: str) -> None:
        """Moves the weights' shards, which only the learner uses, and the moments."""
        cast(nn.Module, self._module).to(device)
        for state in self._optimizer.state.values():
            state |= {key: state[key].to(device) for key in _MOMENTS.values()}

    @torch.no_grad()
    def export_state(self) -> dict[str, Tensor]:
        """Returns the full state on the CPU of the first worker; collective."""
        first, state = self._group.rank == 0, {"steps": self._steps()}
        for name, key in _MOMENTS.items():
            wholes = (_whole(self._optimizer.state[parameter][key]).reshape(-1) for parameter in self._parameters)
            state[name] = torch.cat([whole.cpu() if first else whole[:0] for whole in wholes])
        return state if first else {}

    def _steps(self) -> Tensor:
        return torch.tensor([int(self._optimizer.state[self._parameters[0]]["step"])])

    def export_part(self) -> dict[str, Tensor]:
        """Returns the shards of this worker, by moment and parameter."""
        parts = {"steps": self._steps()}
        for label, parameter in self._named.items():
            for name, key in _MOMENTS.items():
                parts[f"{name}/{label}"] = _own(self._optimizer.state[parameter][key]).cpu()
        return parts

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        joined = {"steps": parts[0]["steps"]}
        for name in _MOMENTS:
            wholes = [torch.cat([part[f"{name}/{label}"] for part in parts]) for label in self._named]
            joined[name] = torch.cat([whole.reshape(-1) for whole in wholes])
        return joined

    @torch.no_grad()
    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state; every worker reads all of it and keeps its shard."""
        self.start()
        sizes = [parameter.numel() for parameter in self._parameters]
        require_state(state, sum(sizes))
        for name, key in _MOMENTS.items():
            for parameter, part in zip(self._parameters, state[name].split(sizes), strict=True):
                self._fill(self._optimizer.state[parameter][key], part.view(parameter.shape))
        for parameter in self._parameters:
            self._optimizer.state[parameter]["step"].fill_(float(state["steps"][0]))

    def _fill(self, target: Tensor, whole: Tensor) -> None:
        """Overwrites this worker's shard, without communication, as every worker has the whole tensor."""
        places = cast(DTensor, target).placements
        _own(target).copy_(_own(distribute_tensor(whole.to(self._device), self._mesh, places, src_data_rank=None)))


def _own(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor).to_local()  # a worker's shard: the memory itself


def _whole(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor).full_tensor()  # collective
