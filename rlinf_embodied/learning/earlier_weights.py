"""Weights of versions before the learner's own, as a checkpoint keeps them: data under way was begun with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from torch import Tensor

from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.weights import WeightsMessage, checksum

GROUP = "earlier_weights"  # of a checkpoint's tensors
_VERSIONS = "earlier_versions"  # of its plain values


def to_save(messages: Sequence[WeightsMessage]) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
    """Returns what a checkpoint holds of them: groups of tensors, and plain values; nothing for none."""
    if not messages:
        return {}, {}
    tensors = {f"{n}/{name}": tensor for n, message in enumerate(messages) for name, tensor in message.tensors.items()}
    return {GROUP: tensors}, {_VERSIONS: [message.version for message in messages]}


def earlier_versions(state: Mapping[str, object]) -> list[int]:
    """Returns the versions of what a checkpoint holds, from its plain values."""
    return [int(version) for version in cast("list[int]", state.get(_VERSIONS, []))]


def read(folder: Path, number: int, version: int) -> WeightsMessage:
    """Returns one of them."""
    prefix = f"{number}/"
    found = load_tensors(folder, GROUP)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    return WeightsMessage(version, tensors, checksum(tensors))
