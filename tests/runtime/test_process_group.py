"""Members of torch's groups, as threads of one process: nothing of a group is global."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlinf_embodied.errors import PeerError
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.process_group import TorchGroup, listen


def members(size: int, member: Callable[[int], object]) -> list:
    """Returns what each member of a group does, by rank."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


@pytest.fixture
def blocks() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(7, 100, generator=draw) * 10.0 ** torch.randint(-4, 5, (7, 1), generator=draw)


def sums(group: TorchGroup, owners: list[int], blocks: torch.Tensor, device: str = "cpu") -> dict:
    own = {b: blocks[b].to(device) for b, owner in enumerate(owners) if owner == group.rank}
    exact = Reducer(group, owners)
    return {
        "exact": exact.sum_blocks(own).cpu(),
        "fast": Reducer(group, owners, exact=False).sum_blocks(own).cpu(),
        "double": exact.sum_blocks({b: t.double() for b, t in own.items()}).cpu(),
        "gathered": exact.gather_blocks({b: t > 0 for b, t in own.items()}),
    }


def require_sums(found: list[dict], blocks: torch.Tensor) -> None:
    alone = dict(enumerate(blocks))
    expected = Reducer(SoloGroup(), [0] * 7).sum_blocks(alone)
    double = Reducer(SoloGroup(), [0] * 7).sum_blocks({b: t.double() for b, t in alone.items()})
    for result in found:
        assert torch.equal(result["exact"], expected)
        assert torch.equal(result["double"], double)
        assert torch.equal(result["fast"], found[0]["fast"])
        torch.testing.assert_close(result["fast"], expected, rtol=1e-4, atol=1e-2)
        assert all(torch.equal(result["gathered"][b].cpu(), blocks[b] > 0) for b in range(7))


@pytest.mark.parametrize("operation", ["all_reduce", "exchange"])
def test_gloo_gives_the_bits_of_one_process_and_regroups_when_a_peer_is_gone(tmp_path, blocks, operation) -> None:
    def first(rank: int) -> tuple[dict, float]:
        group = TorchGroup(rank, 3, f"file://{tmp_path}/store")
        found = sums(group, [0, 0, 1, 0, 1, 2, 2], blocks)
        start = time.monotonic()
        if rank != 2:
            with pytest.raises(PeerError, match=f"rank {rank} of 3 lost the others in {operation}"):
                group.all_reduce(torch.ones(1)) if operation == "all_reduce" else group.exchange([blocks], [1, 1, 1])
        group.close()
        return found, time.monotonic() - start

    listener, rendezvous = listen("127.0.0.1")

    def second(rank: int) -> dict:
        group = TorchGroup(rank, 2, rendezvous, listener=listener if rank == 0 else None)
        found = sums(group, [1, 1, 0, 0, 0, 1, 1], blocks)
        group.close()
        return found

    found = members(3, first)
    assert all(waited < 20 for _, waited in found)
    require_sums([result for result, _ in found], blocks)
    require_sums(members(2, second), blocks)
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
def test_nccl_sums_on_the_gpu(tmp_path) -> None:
    group = TorchGroup(0, 1, f"file://{tmp_path}/store", device="cuda:0")
    tensor = torch.arange(4.0, device="cuda:0")
    assert torch.equal(Reducer(group, [0], exact=False).sum_blocks({0: tensor}), tensor)
    ((returned,),) = group.exchange([tensor], [1])
    assert torch.equal(returned, tensor)
    group.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_members_get_the_sums_of_one_process(tmp_path, blocks) -> None:
    def member(rank: int) -> dict:
        group = TorchGroup(rank, 2, f"file://{tmp_path}/store", device=f"cuda:{rank}")
        found = sums(group, [0, 0, 0, 0, 1, 1, 1], blocks, f"cuda:{rank}")
        group.close()
        return found

    require_sums(members(2, member), blocks)
