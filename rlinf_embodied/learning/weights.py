"""Weights in a worker, which has one copy for all stages, and between stages, nodes and iterations.

They travel in messages with a version and a checksum that the receiver verifies.  A receiver with a copy in another
precision gets the entries whose bits changed since the version before (`WeightsSender`): in bfloat16 a few per cent.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.learning.checkpoint import load_state

Groups = dict[str, dict[str, Tensor]]  # tensors by the name of their group, such as an optimizer, and their own
WHOLE_STAGE = ""  # whose weights they are where a stage holds one model
_PAGE = 4096  # bytes
_BLOCK = 1 << 16  # entries whose places within it take 2 bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an entry
Places = tuple[np.ndarray, np.ndarray]  # how many entries of each _BLOCK changed, and where in it: uint32, uint16
EARLIER, VERSIONS = "earlier_weights", "earlier_versions"  # in a checkpoint: groups of tensors, a plain value


def move(module: nn.Module, device: str) -> None:
    """Moves a module to a device; its parameters stay the objects that learners hold and that its parts share.

    `nn.Module.to` alone would put new ones in their place where torch does not exchange data between the two kinds of
    device, as for every kind that a plug-in brings: a learner would keep training the old ones, and an embedding that
    is the head's weight too would become two.
    """
    there = torch.device(device)
    for parameter in module.parameters():
        if parameter.device != there:
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(there), parameter.requires_grad))
    module.to(there)  # what are no parameters


class _HasModule(Protocol):
    module: nn.Module


_Policy = TypeVar("_Policy", bound=_HasModule)


@dataclass(slots=True)
class SharedPolicy(Generic[_Policy]):
    """A worker's one copy of a policy, with the version of its weights.

    It is on its device as long as one of its users is.
    """

    policy: _Policy
    version: int = 0
    device: str = "cpu"
    users: set[str] = field(default_factory=set)

    def enter(self, user: str) -> None:
        """Notes that a stage works with it, and brings it to its device."""
        self.users.add(user)
        move(self.policy.module, self.device)

    def leave(self, user: str) -> None:
        """Notes that a stage no longer does; the last one sends it to the CPU's memory."""
        self.users.discard(user)
        if not self.users:
            move(self.policy.module, "cpu")


@dataclass(frozen=True, slots=True)
class WeightsMessage:
    """All parameters and buffers of a module, or those that training may change; its receivers only read them.

    With a `base` the tensors are changes to this version: a tensor with `places` has the new entries [n] of these
    places, one without is whole.  The checksum is that of the whole state thereafter.
    """

    READ_ONLY: ClassVar[bool] = True  # see runtime/tensor_wire.py
    version: int
    tensors: dict[str, Tensor]
    checksum: int
    policy: str = WHOLE_STAGE  # whose they are, where a stage holds several
    base: int | None = None
    places: dict[str, Places] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that travel, without names."""
        parts = [*self.tensors.values(), *(part for pair in self.places.values() for part in pair)]
        return sum(part.nbytes for part in parts)


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Returns the CRC-32 over names and over the sums of pages of bytes, in the order of the names.

    Sums are read at the speed of memory, a CRC of all bytes at a tenth of it.  They miss words that change places
    within a page of 4 KiB, which no transport does.
    """
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        tensor = tensors[name].detach().cpu().contiguous().reshape(-1)
        tensor = tensor if len(tensor) else torch.empty(0)  # one without entries may have come with any stride
        data = tensor.view(torch.uint8).numpy()
        whole = data.size // _PAGE * _PAGE
        sums = data[:whole].view(np.uint64).reshape(-1, _PAGE // 8).sum(1, dtype=np.uint64)
        value = zlib.crc32(data[whole:].data, zlib.crc32(sums.data, value))
    return value


def export_weights(
    module: nn.Module, version: int, whole: bool = True, policy: str = WHOLE_STAGE, share: tuple[int, int] = (0, 1)
) -> WeightsMessage:
    """Returns a copy of a module's state as a message; with a share (k, n) every n-th tensor from the k-th on.

    It is not whole where receivers hold the frozen parameters already: of a model with adapters these alone are sent.
    """
    chosen = _once(module) if whole else _changing(module)
    tensors = {name: chosen[name].detach().cpu().clone() for name in [*chosen][share[0] :: share[1]]}
    return WeightsMessage(version, tensors, checksum(tensors), policy)


class WeightsSender:
    """Sends a module's weights in a precision: whole, or the entries whose bits changed since it sent them last.

    It keeps a copy of what it sent, which it compares and overwrites tensor by tensor; nothing else of the size of the
    model is made.  A message holds parts of this copy: it is read before the next one is made.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sent: dict[str, Tensor] = {}
        self._version = 0

    def export(self, module: nn.Module, version: int, follows: bool) -> WeightsMessage:
        """Returns what changed if the receivers have the last message, which `follows` says, and otherwise all."""
        held, base, places = _once(module), self._version, {}
        self._version = version
        if not (follows and self._sent):
            dtype_of = lambda tensor: self._dtype if tensor.is_floating_point() else tensor.dtype  # noqa: E731
            self._sent = {name: tensor.detach().to("cpu", dtype_of(tensor), copy=True) for name, tensor in held.items()}
            return WeightsMessage(version, self._sent, checksum(self._sent))
        tensors = {}
        for name, sent in self._sent.items():
            tensors[name], found = _changed(sent, held[name].detach().to("cpu", sent.dtype))
            if found is not None:
                places[name] = found
        return WeightsMessage(version, tensors, checksum(self._sent), base=base, places=places)


def _changed(old: Tensor, new: Tensor) -> tuple[Tensor, Places | None]:
    """Overwrites `old` with `new`; returns the entries with other bits and their places, or all where that is less."""
    bits = lambda tensor: tensor.reshape(-1).view(_BITS[tensor.element_size()])  # noqa: E731
    index = (bits(old) != bits(new)).nonzero()[:, 0]
    old.copy_(new)
    if len(index) * (old.element_size() + 2) >= old.nbytes:
        return old, None
    where = index.numpy()
    counts = np.bincount(where // _BLOCK, minlength=-(-old.numel() // _BLOCK)).astype(np.uint32)
    return old.reshape(-1)[index], (counts, (where % _BLOCK).astype(np.uint16))


def _install_changes(module: nn.Module, message: WeightsMessage) -> None:
    held = _once(module)
    for name, tensor in message.tensors.items():
        if name not in message.places:
            held[name].copy_(tensor)
            continue
        counts, offsets = message.places[name]
        index = torch.from_numpy(np.repeat(np.arange(len(counts)) * _BLOCK, counts) + offsets)
        held[name].view(-1)[index.to(held[name].device)] = tensor.to(held[name].device)
    if checksum(held) != message.checksum:
        raise ObjectiveError(
            f"weights of version {message.version}, sent as changes to version {message.base}, do not give those of "
            "the learner (another checksum): resume the run from its checkpoint, which sends them whole"
        )


def install_weights(module: nn.Module, message: WeightsMessage) -> None:
    """Overwrites a module's state with all of it, or with all that training may change, or what changed.

    Raises:
        ObjectiveError: the bytes are not those that were sent, or belong to another module.
    """
    if message.base is not None:
        return _install_changes(module, message)
    if checksum(message.tensors) != message.checksum:
        raise ObjectiveError(
            f"weights of version {message.version} arrived damaged (another checksum): send them again"
        )
    sent, held = set(message.tensors), set(module.state_dict())
    unlike = sorted(sent ^ held)
    if unlike and sent not in (set(_changing(module)), set(_once(module))):
        raise ObjectiveError(f"weights of version {message.version} are of another module: {unlike[:5]} differ")
    module.load_state_dict(message.tensors, strict=False)


def require_version(sampled: Collection[int], learner: int, staleness: int) -> None:
    """Checks that the versions that samples name are the learner's, or exactly `staleness` behind it.

    Raises:
        ObjectiveError: other weights made them.
    """
    if set(sampled) != {learner - staleness}:
        raise ObjectiveError(
            f"samples come from weights of version {sorted(sampled)}, but the learner has {learner} and expects "
            f"{learner - staleness} (a staleness of {staleness}): the weights were not installed"
        )


def _once(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a module, with tied parameters under one of their names."""
    repeated = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    repeated -= {name for name, _ in module.named_parameters()}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in repeated}


def _changing(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a module less its frozen parameters."""
    every = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in every if not parameter.requires_grad}
    return {name: tensor for name, tensor in _once(module).items() if name not in frozen}


class WeightsUser(Generic[_Policy]):
    """A stage that works with its worker's copy of a policy, and does not train it."""

    _shared: SharedPolicy[_Policy]
    _user = ""  # its name among those who use the copy

    def install_weights(self, step_context: object, message: WeightsMessage) -> tuple[int, int]:
        """Installs a new version; checksum and names are verified.  Returns the bytes that came, and those of all.

        Raises:
            ObjectiveError: they are others than were sent, of another module, or changes to another version.
        """
        shared = self._shared
        if message.base not in (None, shared.version):
            raise ObjectiveError(
                f"weights of version {message.version} came as changes to version {message.base}, but this copy has "
                f"version {shared.version}: resume the run from its checkpoint, which sends them whole"
            )
        install_weights(shared.policy.module, message)
        shared.version = message.version
        return message.nbytes, sum(tensor.nbytes for tensor in _once(shared.policy.module).values())

    def offload(self, step_context: object) -> None:
        """Leaves the device's memory; the weights stay if another stage uses them."""
        self._shared.leave(self._user)

    def onload(self, step_context: object) -> None:
        self._shared.enter(self._user)


def earlier_versions(folder: Path) -> list[int]:
    """Returns the versions of the weights, older than the learner's, that a checkpoint holds."""
    return [int(version) for version in cast("list[int]", load_state(folder).get(VERSIONS, []))]
