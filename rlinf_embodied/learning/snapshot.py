"""A stage's named state between two iterations: what is put back when an iteration is made again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.learning.weights import WeightsMessage, checksum, export_weights, install_weights

_Groups = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class StageState:
    """The weights, or those that training may change, and groups of other tensors by name, all of one version."""

    weights: WeightsMessage
    groups: _Groups
    checksum: int  # of the groups; the weights have their own

    @classmethod
    def of(
        cls,
        module: nn.Module,
        version: int,
        groups: Mapping[str, Mapping[str, Tensor]],
        whole: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> StageState:
        """Returns a copy of a module's weights, with what belongs to them; `whole`, `share`: see export_weights."""
        copied = {
            name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in group.items()}
            for name, group in groups.items()
        }
        return cls(export_weights(module, version, whole, share=share), copied, checksum(_flat(copied)))

    def install(self, module: nn.Module) -> _Groups:
        """Overwrites a module's weights and returns the groups; raises as `install_parts`."""
        return install_parts([self], module)[0]


def install_parts(states: Sequence[StageState], module: nn.Module) -> list[_Groups]:
    """Overwrites a module's weights with those that the states hold together; returns the groups of each.

    Raises:
        ObjectiveError: the bytes are not those that were kept, or belong to another module.
    """
    tensors: dict[str, Tensor] = {}
    for state in states:
        weights = state.weights
        if (checksum(_flat(state.groups)), checksum(weights.tensors)) != (state.checksum, weights.checksum):
            raise ObjectiveError(
                f"the state of version {weights.version} arrived damaged (another checksum): resume from the "
                "newest checkpoint with the same command"
            )
        tensors |= weights.tensors
    install_weights(module, WeightsMessage(states[0].weights.version, tensors, checksum(tensors)))
    return [state.groups for state in states]


def kept(states: Iterable[object]) -> StageState:
    """Returns the state that one of a stage's workers kept for all of them."""
    (state,) = (state for state in states if state is not None)
    assert isinstance(state, StageState)
    return state


def _flat(groups: _Groups) -> dict[str, Tensor]:
    return {f"{name}/{key}": tensor for name, group in groups.items() for key, tensor in group.items()}
