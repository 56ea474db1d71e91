from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlinf_embodied.errors import ConfigError, HangError
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.process_group import TorchGroup

REPOSITORY = Path(__file__).resolve().parents[2]
PREAMBLE = """
import sys, time
import torch
from rlinf_embodied.errors import RlinfError
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.process_group import TorchGroup
torch.set_num_threads(1)
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
blocks = torch.load(folder + "/blocks.pt")
"""


def run_processes(folder: Path, size: int, body: str, timeout_s: float = 90) -> list[str]:
    """Runs `body` in `size` processes (names: rank, size, folder, blocks) and returns what each printed."""
    code = PREAMBLE + textwrap.dedent(body)
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        for rank in range(size)
    ]
    try:
        return [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture
def blocks(tmp_path: Path) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randn(7, 100, generator=draw) * 10.0 ** torch.randint(-4, 5, (7, 1), generator=draw)
    torch.save(blocks, tmp_path / "blocks.pt")
    return blocks


def test_gloo_processes_get_the_bits_of_one_process_and_regroup_when_a_peer_dies(tmp_path, blocks):
    # the last rank dies after the first sums; the others learn of it at once and form a smaller group
    body = """
    import os
    def work(name, rank, owners, rendezvous):
        group = TorchGroup(rank, max(owners) + 1, rendezvous, timeout_s=60)
        own = {b: blocks[b] for b, owner in enumerate(owners) if owner == rank}
        exact = Reducer(group, owners)
        result = {"exact": exact.sum_blocks(own), "fast": Reducer(group, owners, exact=False).sum_blocks(own),
                  "double": exact.sum_blocks({b: t.double() for b, t in own.items()}),
                  "gathered": exact.gather_blocks({b: t > 0 for b, t in own.items()})}
        torch.save(result, f"{folder}/{name}{rank}.pt")
        return group
    group = work("first", rank, [0, 0, 1, 0, 1, 2, 2], f"file://{folder}/store")
    if rank == 2:
        os._exit(0)
    start = time.monotonic()
    try:
        group.all_reduce(torch.ones(1))
    except RlinfError as error:
        print(type(error).__name__, str(error).split(":")[0], time.monotonic() - start < 20)
    group.close()
    work("second", 1 - rank, [1, 1, 0, 0, 0, 1, 1], "tcp://127.0.0.1:PORT").close()
    assert not torch.distributed.is_initialized()
    """
    printed = run_processes(tmp_path, 3, body.replace("PORT", str(_free_port())))
    assert printed == [f"PeerError rank {rank} of 3 lost the others in all_reduce True\n" for rank in range(2)] + [""]
    alone = dict(enumerate(blocks))
    expected = Reducer(SoloGroup(), [0] * 7).sum_blocks(alone)
    double = Reducer(SoloGroup(), [0] * 7).sum_blocks({b: t.double() for b, t in alone.items()})
    for name, size in (("first", 3), ("second", 2)):
        results = [torch.load(tmp_path / f"{name}{rank}.pt") for rank in range(size)]
        for result in results:
            assert torch.equal(result["exact"], expected)
            assert torch.equal(result["double"], double)
            assert torch.equal(result["fast"], results[0]["fast"])
            torch.testing.assert_close(result["fast"], expected, rtol=1e-4, atol=1e-2)
            assert all(torch.equal(result["gathered"][b], blocks[b] > 0) for b in range(7))


def test_a_peer_that_hangs_is_reported_after_the_timeout(tmp_path):
    # nothing is global, so that both members of a group fit into one process
    with ThreadPoolExecutor(2) as pool:
        make = lambda rank: TorchGroup(rank, 2, f"file://{tmp_path}/store", timeout_s=2)  # noqa: E731
        waiting, silent = pool.map(make, range(2))
    with pytest.raises(HangError, match="rank 0 of 2 waited 2 s for the others in exchange"):
        waiting.exchange([torch.ones(1)], [1, 1])
    waiting.close()
    silent.close()


@pytest.mark.parametrize("rendezvous", ["/tmp/store", "tcp://host", "http://host:1"])
def test_a_rendezvous_of_another_form_is_refused(rendezvous):
    with pytest.raises(ConfigError, match="must be file://"):
        TorchGroup(0, 1, rendezvous)


@pytest.mark.gpu
def test_nccl_sums_on_the_gpu(tmp_path):
    group = TorchGroup(0, 1, f"file://{tmp_path}/store", timeout_s=60, device="cuda:0")
    tensor = torch.arange(4.0, device="cuda:0")
    assert torch.equal(Reducer(group, [0], exact=False).sum_blocks({0: tensor}), tensor)
    ((returned,),) = group.exchange([tensor], [1])
    assert torch.equal(returned, tensor)
    group.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_processes_get_the_sums_of_one_process(tmp_path, blocks):
    body = """
    owners = [0, 0, 0, 0, 1, 1, 1]
    group = TorchGroup(rank, size, f"file://{folder}/store", timeout_s=60, device=f"cuda:{rank}")
    own = {b: blocks[b].to(f"cuda:{rank}") for b, owner in enumerate(owners) if owner == rank}
    sums = [Reducer(group, owners, exact).sum_blocks(own).cpu() for exact in (True, False)]
    torch.save(sums, f"{folder}/sums{rank}.pt")
    group.close()
    """
    run_processes(tmp_path, 2, body)
    expected = Reducer(SoloGroup(), [0] * 7).sum_blocks(dict(enumerate(blocks)))
    for rank in range(2):
        exact, fast = torch.load(tmp_path / f"sums{rank}.pt")
        torch.testing.assert_close(exact, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(fast, expected, rtol=1e-4, atol=1e-2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
