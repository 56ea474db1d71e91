"""Weights on the wire arrive whole, or are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.learning.weights import (
    SharedPolicy,
    WeightsSender,
    WeightsUser,
    checksum,
    export_weights,
    install_weights,
)
from rlinf_embodied.runtime.tensor_wire import pack, unpack


def module(seed: int, width: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))


def test_a_module_takes_over_every_parameter_and_buffer() -> None:
    source, target = module(0), module(1)
    source(torch.randn(8, 4))  # moves the running statistics
    message = export_weights(source, version=5)
    install_weights(target, message)
    assert message.version == 5
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, target.state_dict()[name]), name


def test_frozen_parameters_stay_where_they_are() -> None:
    source, target = module(0), module(1)
    for one in (source, target):
        one[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    message = export_weights(source, 0, whole=False)
    assert set(message.tensors) == {name for name in source.state_dict() if name.startswith("1.")}
    mine = target.state_dict()["0.weight"].clone()
    install_weights(target, message)
    assert torch.equal(target.state_dict()["0.weight"], mine)
    assert torch.equal(target.state_dict()["1.weight"], source.state_dict()["1.weight"])
    with pytest.raises(ObjectiveError, match=r"of another module: \['0.bias', '0.weight'\]"):
        install_weights(module(1), message)
    install_weights(target, export_weights(source, 0))
    assert torch.equal(target.state_dict()["0.weight"], source.state_dict()["0.weight"])


def test_a_tensor_without_entries_has_a_checksum_whatever_its_stride() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    assert checksum({"w": empty.as_strided((0,), (0,))}) == checksum({"w": empty})


def test_the_checksum_sees_names_but_not_their_order() -> None:
    tensors = export_weights(module(0), 0).tensors
    expected = checksum(tensors)
    assert checksum(dict(reversed(tensors.items()))) == expected
    tensors["0.bios"] = tensors.pop("0.bias")
    assert checksum(tensors) != expected


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.uint8), (1024, torch.float32), (5000, torch.bfloat16)])
def test_the_checksum_sees_every_byte_of_large_tensors_and_where_their_pages_are(size: int, dtype: torch.dtype) -> None:
    buffer = torch.randint(0, 255, (size + 1,), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = checksum({"w": buffer[1:]})  # not aligned to words
    assert checksum({"w": buffer[1:].clone()}) == expected
    for place in {0, size // 2, size - 1}:
        changed = buffer[1:].clone()
        changed.view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert checksum({"w": changed}) != expected, place
    pages = torch.arange(3 * 1024, dtype=torch.float32)
    assert checksum({"w": pages}) != checksum({"w": pages.view(3, 1024).flip(0)})


def test_damaged_weights_are_refused_and_nothing_is_installed() -> None:
    message = export_weights(module(0), 7)
    message.tensors["0.weight"][1, 2] += 1e-6
    target = module(1)
    before = checksum(target.state_dict())
    with pytest.raises(ObjectiveError, match=r"version 7 arrived damaged"):
        install_weights(target, message)
    assert checksum(target.state_dict()) == before


def test_weights_of_another_module_are_refused() -> None:
    message = export_weights(nn.Linear(4, 3), 1)
    with pytest.raises(ObjectiveError, match=r"of another module: \['0.bias', '0.weight'"):
        install_weights(module(0), replace(message))


def tied() -> nn.Module:
    made = nn.Sequential(nn.Embedding(3000, 32), nn.Linear(32, 3000), nn.LayerNorm(32))  # more than a block of entries
    made[1].weight = made[0].weight  # pyright: ignore[reportArgumentType]
    return made


def test_changes_sent_over_twenty_updates_give_the_bits_of_the_weights_rounded() -> None:
    torch.manual_seed(0)
    source, target, sender = tied(), tied().to(torch.bfloat16), WeightsSender(torch.bfloat16)
    share, bits = [], lambda tensor: tensor.view(torch.int16)
    for version in range(21):
        message = unpack(pack(sender.export(source, version, follows=version > 0)))
        install_weights(target, message)
        share.append(message.nbytes / sum(p.nbytes for p in target.parameters()))
        for name, tensor in source.state_dict().items():
            assert torch.equal(bits(tensor.to(torch.bfloat16)), bits(target.state_dict()[name])), (version, name)
        with torch.no_grad():
            for p in source.parameters():
                p.add_(1e-5 * torch.randn_like(p).sign() if version < 19 else torch.randn_like(p))  # at last all change
    assert share[0] == 1
    assert max(share[1:-1]) < 0.2
    assert 1 <= share[-1] < 1.1  # never more than whole


@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_parts_hold_every_tensor_once_and_little_more_than_their_share(parts: int) -> None:
    torch.manual_seed(0)
    source, user = nn.Sequential(tied(), *(nn.Linear(64, 64) for _ in range(20))), WeightsUser()
    user._shared = SharedPolicy(SimpleNamespace(module=nn.Sequential(tied(), *(nn.Linear(64, 64) for _ in range(20)))))
    messages = [unpack(pack(export_weights(source, 7, part=(part, parts)))) for part in range(parts)]
    names = [name for message in messages for name in message.tensors]
    sizes = {name: parameter.nbytes for name, parameter in source.named_parameters()}
    assert names == [*sizes]
    most, largest = sum(sizes.values()) / parts, max(sizes.values())
    assert all(message.nbytes < most + largest for message in messages)
    reports = []
    for message in messages:
        assert user._shared.version == 0
        reports.append(user.install_weights(None, message))
    assert user._shared.version == 7
    assert sum(whole for _, whole in reports) == sum(sizes.values())
    assert checksum(user._shared.policy.module.state_dict()) == checksum(source.state_dict())
    if parts > 1:
        with pytest.raises(ObjectiveError, match="of another module"):
            install_weights(source, replace(messages[0], part=(1, parts)))


def test_changes_sent_in_parts_give_the_bits_of_the_weights_rounded() -> None:
    torch.manual_seed(0)
    source, user, sender = tied(), WeightsUser(), WeightsSender(torch.bfloat16)
    user._shared = SharedPolicy(SimpleNamespace(module=tied().to(torch.bfloat16)))
    for version in range(5):
        for part in range(3):
            user.install_weights(None, unpack(pack(sender.export(source, version, version > 0, (part, 3)))))
        for name, tensor in source.state_dict().items():
            assert torch.equal(tensor.to(torch.bfloat16), user._shared.policy.module.state_dict()[name]), name
        with torch.no_grad():
            for p in source.parameters():
                p.add_(1e-5 * torch.randn_like(p).sign())


def test_changes_to_another_version_are_refused() -> None:
    sender, user, source = WeightsSender(torch.bfloat16), WeightsUser(), tied()
    user._shared = SharedPolicy(SimpleNamespace(module=tied().to(torch.bfloat16)))
    sender.export(source, 0, False)
    message = sender.export(source, 1, True)
    with pytest.raises(ObjectiveError, match=r"do not give those of the learner \(another checksum\)"):
        user.install_weights(None, message)  # version 0, but of another draw
    user.install_weights(None, sender.export(source, 3, False))
    with pytest.raises(ObjectiveError, match="came as changes to version 0, but this copy has version 3"):
        user.install_weights(None, message)
