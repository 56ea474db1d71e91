"""A stage's named state between two iterations: what is put back when an iteration is made again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        cls, module: nn.Module, version: int, groups: Mapping[str, Mapping[str, Tensor]], whole: bool = False
    ) -> StageState:
        """Returns a copy of a module's weights (see export_weights for `whole`), with what belongs to them."""
        copied = {
            name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in group.items()}
            for name, group in groups.items()
        }
        return cls(export_weights(module, version, whole), copied, checksum(_flat(copied)))

    def install(self, module: nn.Module) -> _Groups:
        """Overwrites a module's weights and returns the groups.

        Raises:
            ObjectiveError: the bytes are not those that were kept, or belong to another module.
        """
        if checksum(_flat(self.groups)) != self.checksum:
            raise ObjectiveError(
                f"the state of version {self.weights.version} arrived damaged (another checksum): resume from the "
                "newest checkpoint with the same command"
            )
        install_weights(module, self.weights)
        return self.groups


def kept(states: Iterable[object]) -> StageState:
    """Returns the state that one of a stage's workers kept for all of them."""
    (state,) = (state for state in states if state is not None)
    assert isinstance(state, StageState)
    return state


def _flat(groups: _Groups) -> dict[str, Tensor]:
    return {f"{name}/{key}": tensor for name, group in groups.items() for key, tensor in group.items()}
