"""Weights: one copy per worker for all stages, and messages that transfer them between stages, nodes and iterations.

Messages have a version and a checksum that the receiver verifies.  Large models are sent in parts, so that copies of
only one part exist at a time.  A receiver with a copy in another precision gets only the entries whose bits changed
since the previous version (`WeightsSender`): in bfloat16 a few per cent.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_embodied.errors import ObjectiveError

Groups = dict[str, dict[str, Tensor]]  # tensors by name, by the name of their group, such as an optimizer
WHOLE_STAGE = ""  # name of the policy if a stage holds only one
_PAGE = 4096  # bytes
_BLOCK = 1 << 16  # entries, so that positions within a block take 2 bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an entry
Places = tuple[np.ndarray, np.ndarray]  # changed entries per _BLOCK, uint32, and their positions in it, uint16
EARLIER, VERSIONS = "earlier_weights", "earlier_versions"  # in a checkpoint: groups of tensors, a plain value


def move(module: nn.Module, device: str) -> None:
    """Moves a module to a device; its parameters stay the same objects, which learners and tied modules share.

    `nn.Module.to` alone would replace the parameters for device kinds between which torch cannot swap data, such as
    those of plug-ins: a learner would keep training the old ones, and tied weights would be separated.
    """
    target = torch.device(device)
    for parameter in module.parameters():
        if parameter.device != target:
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(target), parameter.requires_grad))
    module.to(target)  # buffers


class _HasModule(Protocol):
    module: nn.Module


_Policy = TypeVar("_Policy", bound=_HasModule)


@dataclass(slots=True)
class SharedPolicy(Generic[_Policy]):
    """A worker's only copy of a policy, with the version of its weights.

    It is on its device while it has users, otherwise on the CPU.
    """

    policy: _Policy
    version: int = 0
    device: str = "cpu"
    users: set[str] = field(default_factory=set)

    def enter(self, user: str) -> None:
        """Adds a stage to the users, and moves the policy to its device."""
        self.users.add(user)
        move(self.policy.module, self.device)

    def leave(self, user: str) -> None:
        """Removes a stage from the users; without users the policy moves to the CPU."""
        self.users.discard(user)
        if not self.users:
            move(self.policy.module, "cpu")


@dataclass(frozen=True, slots=True)
class WeightsMessage:
    """All parameters and buffers of a module or one part of them, or only the trainable ones; receivers only read them.

    With a `base` the tensors are changes to this version: a tensor with `places` has the new entries [n] at these
    positions, one without is whole.  The checksum is that of all tensors of the part after the changes.
    """

    READ_ONLY: ClassVar[bool] = True  # see runtime/tensor_wire.py
    version: int
    tensors: dict[str, Tensor]
    checksum: int
    policy: str = WHOLE_STAGE  # name of the policy, if a stage holds several
    base: int | None = None
    places: dict[str, Places] = field(default_factory=dict)
    part: tuple[int, int] = (0, 1)  # its number, and how many parts there are

    @property
    def is_last(self) -> bool:
        return self.part[0] == self.part[1] - 1

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes, without names."""
        parts = [*self.tensors.values(), *(part for pair in self.places.values() for part in pair)]
        return sum(part.nbytes for part in parts)


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Returns the CRC-32 over names and over the sums of pages of bytes, in the order of the names.

    Sums run at the speed of memory, a CRC of all bytes at a tenth of it.  They do not detect words that are swapped
    within a page of 4 KiB, which no transport does.
    """
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        tensor = tensors[name].detach().cpu().contiguous().reshape(-1)
        tensor = tensor if len(tensor) else torch.empty(0)  # an empty tensor may have any stride
        data = tensor.view(torch.uint8).numpy()
        whole = data.size // _PAGE * _PAGE
        sums = data[:whole].view(np.uint64).reshape(-1, _PAGE // 8).sum(1, dtype=np.uint64)
        value = zlib.crc32(data[whole:].data, zlib.crc32(sums.data, value))
    return value


def export_weights(
    module: nn.Module, version: int, whole: bool = True, policy: str = WHOLE_STAGE, part: tuple[int, int] = (0, 1)
) -> WeightsMessage:
    """Returns a module's state, or its k-th of n parts, as a message; on a CPU its tensors are the module's.

    Without `whole`, frozen parameters, which receivers have already, are left out: of a model with adapters only these
    are sent.
    """
    state = _part(_once(module) if whole else _changing(module), part)
    tensors = {name: tensor.detach().cpu() for name, tensor in state.items()}
    return WeightsMessage(version, tensors, checksum(tensors), policy, part=part)


def _part(state: dict[str, Tensor], part: tuple[int, int]) -> dict[str, Tensor]:
    """Returns the k-th of n parts of a state: successive tensors, of at most 1 / n of all entries and another tensor.

    It depends on names and shapes only.  A part is empty if the tensor before it is larger than a part.
    """
    number, parts = part
    total, start, chosen = sum(tensor.numel() for tensor in state.values()), 0, {}
    for name, tensor in state.items():
        if start * parts // max(1, total) == number:
            chosen[name] = tensor
        start += tensor.numel()
    return chosen


class WeightsSender:
    """Sends a module's weights in a precision: all of them, or the entries whose bits changed since the last message.

    It keeps a copy of the sent weights, which it compares and overwrites tensor by tensor, without further memory of
    the model's size.  A message refers to this copy, so it must be read before the next one is created.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sent: dict[str, Tensor] = {}
        self._version = 0

    def export(self, module: nn.Module, version: int, follows: bool, part: tuple[int, int] = (0, 1)) -> WeightsMessage:
        """Returns the changes if `follows`, that is, the receivers have the last version; otherwise all weights.

        All parts of a version are exported one after the other.
        """
        held, tensors, places = _part(_once(module), part), {}, {}
        base = self._version if follows and held.keys() <= self._sent.keys() else None
        for name, tensor in held.items():
            if base is None:
                dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
                tensors[name] = self._sent[name] = tensor.detach().to("cpu", dtype, copy=True)
                continue
            sent = self._sent[name]
            tensors[name], changed_places = _changed(sent, tensor.detach().to("cpu", sent.dtype))
            if changed_places is not None:
                places[name] = changed_places
        value = checksum({name: self._sent[name] for name in held})
        message = WeightsMessage(version, tensors, value, base=base, places=places, part=part)
        self._version = version if message.is_last else self._version
        return message


def _changed(old: Tensor, new: Tensor) -> tuple[Tensor, Places | None]:
    """Overwrites `old` with `new`; returns the changed entries and their positions, or all if that is smaller."""
    bits = lambda tensor: tensor.reshape(-1).view(_BITS[tensor.element_size()])  # noqa: E731
    index = (bits(old) != bits(new)).nonzero()[:, 0]
    old.copy_(new)
    if len(index) * (old.element_size() + 2) >= old.nbytes:
        return old, None
    positions = index.numpy()
    counts = np.bincount(positions // _BLOCK, minlength=-(-old.numel() // _BLOCK)).astype(np.uint32)
    return old.reshape(-1)[index], (counts, (positions % _BLOCK).astype(np.uint16))


def _install_changes(module: nn.Module, message: WeightsMessage) -> None:
    state = _once(module)
    for name, tensor in message.tensors.items():
        if name not in message.places:
            state[name].copy_(tensor)
            continue
        counts, offsets = message.places[name]
        index = torch.from_numpy(np.repeat(np.arange(len(counts)) * _BLOCK, counts) + offsets)
        state[name].view(-1)[index.to(state[name].device)] = tensor.to(state[name].device)
    if checksum({name: state[name] for name in message.tensors}) != message.checksum:
        raise ObjectiveError(
            f"weights of version {message.version}, sent as changes to version {message.base}, do not give those of "
            "the learner (another checksum): resume the run from its checkpoint, which sends them whole"
        )


def install_weights(module: nn.Module, message: WeightsMessage) -> None:
    """Overwrites a module's state by a message with all weights, the trainable ones, or changes.

    Raises:
        ObjectiveError: the checksum does not match, or the weights belong to another module.
    """
    if message.base is not None:
        return _install_changes(module, message)
    if checksum(message.tensors) != message.checksum:
        raise ObjectiveError(
            f"weights of version {message.version} arrived damaged (another checksum): send them again"
        )
    states = module.state_dict(), _once(module), _changing(module)
    sent, (expected, *others) = set(message.tensors), (set(_part(state, message.part)) for state in states)
    differing = sorted(sent ^ expected)
    if differing and sent not in others:
        raise ObjectiveError(f"weights of version {message.version} are of another module: {differing[:5]} differ")
    module.load_state_dict(message.tensors, strict=False)


def require_version(sampled: Collection[int], learner: int, staleness: int) -> None:
    """Checks that the versions of samples are exactly `staleness` behind the learner's.

    Raises:
        ObjectiveError: other weights sampled them.
    """
    if set(sampled) != {learner - staleness}:
        raise ObjectiveError(
            f"samples come from weights of version {sorted(sampled)}, but the learner has {learner} and expects "
            f"{learner - staleness} (a staleness of {staleness}): the weights were not installed"
        )


def _once(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a module, with tied parameters only once."""
    repeated = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    repeated -= {name for name, _ in module.named_parameters()}
    return {name: tensor for name, tensor in module.state_dict().items() if name not in repeated}


def state_bytes(module: nn.Module, whole: bool = True) -> int:
    """Returns the bytes of a module's parameters and buffers, without frozen parameters unless `whole`."""
    return sum(tensor.nbytes for tensor in (_once(module) if whole else _changing(module)).values())


def _changing(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a module without frozen parameters."""
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: tensor for name, tensor in _once(module).items() if name not in frozen}


class WeightsUser(Generic[_Policy]):
    """A stage that uses its worker's copy of a policy without training it."""

    _shared: SharedPolicy[_Policy]
    _user = ""  # its name in SharedPolicy.users

    def install_weights(self, step_context: object, message: WeightsMessage) -> tuple[int, int]:
        """Installs a part of a new version after verifying it; returns the message's bytes, and those of the weights.

        Raises:
            ObjectiveError: the weights are damaged, of another module, or changes to another version.
        """
        shared = self._shared
        if message.base not in (None, shared.version):
            raise ObjectiveError(
                f"weights of version {message.version} came as changes to version {message.base}, but this copy has "
                f"version {shared.version}: resume the run from its checkpoint, which sends them whole"
            )
        install_weights(shared.policy.module, message)
        shared.version = message.version if message.is_last else shared.version
        state = shared.policy.module.state_dict()
        return message.nbytes, sum(state[name].nbytes for name in message.tensors)

    def offload(self, step_context: object) -> None:
        """Moves the weights to the CPU's memory, unless another stage uses them."""
        self._shared.leave(self._user)

    def onload(self, step_context: object) -> None:
        self._shared.enter(self._user)
