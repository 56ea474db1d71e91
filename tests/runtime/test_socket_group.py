"""Groups over sockets: everybody gets everything, and nobody waits for ever."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlinf_embodied.errors import HangError
from rlinf_embodied.runtime.socket_group import SocketGroup


@pytest.fixture
def rendezvous(tmp_path_factory) -> str:
    return f"file:///tmp/rlinf-test-{uuid.uuid4().hex}"  # short: a socket's path has at most 107 characters


def together(size: int, rendezvous: str, member) -> list:
    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(lambda rank: member(SocketGroup(rank, size, rendezvous, 20.0)), k) for k in range(size)]
        return [job.result(timeout=30) for job in jobs]


def test_everybody_gets_what_everybody_gave_by_rank(rendezvous: str) -> None:
    answers = together(3, rendezvous, lambda g: [g.exchange([g.rank, turn], [2, 2, 2]) for turn in range(2)])
    assert answers == [[[[0, 0], [1, 0], [2, 0]], [[0, 1], [1, 1], [2, 1]]]] * 3
    assert not Path(rendezvous.removeprefix("file://")).exists()  # nothing is left behind


def test_a_member_that_never_comes_is_a_hang(rendezvous: str) -> None:
    for rank, missing in ((0, "a member to join"), (1, "rank 0 to listen")):
        with pytest.raises(HangError, match=rf"rank {rank} of 2 waited up to 0.2 s for {missing}"):
            SocketGroup(rank, 2, rendezvous, 0.2)


def test_a_member_that_is_gone_is_a_hang_of_the_others(rendezvous: str) -> None:
    left = threading.Event()

    def member(group: SocketGroup) -> str:
        if group.rank == 1:
            group.close()
            left.set()
            return "left"
        left.wait(10)
        with pytest.raises(HangError, match="rank 0 of 2 waited up to 20 s for rank 1"):
            group.exchange([1.0], [1, 1])
        return "noticed"

    assert together(2, rendezvous, member) == ["noticed", "left"]
