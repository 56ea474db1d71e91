"""Groups over sockets: everybody gets everything, and nobody waits for ever."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from rlinf_embodied.errors import HangError
from rlinf_embodied.runtime.rendezvous import MeetingPlace, Rendezvous, connect, interface_of
from rlinf_embodied.runtime.socket_group import SocketGroup


@pytest.fixture
def place() -> MeetingPlace:
    return MeetingPlace("127.0.0.1")


def together(size: int, place: MeetingPlace, member) -> list:
    join = lambda rank: SocketGroup(rank, size, place.rendezvous if rank else place, 20.0)  # noqa: E731
    with ThreadPoolExecutor(size) as pool:
        jobs = [pool.submit(lambda rank: member(join(rank)), rank) for rank in range(size)]
        return [job.result(timeout=30) for job in jobs]


def test_everybody_gets_what_everybody_gave_by_rank(place: MeetingPlace) -> None:
    answers = together(3, place, lambda g: [g.exchange([g.rank, turn], [2, 2, 2]) for turn in range(2)])
    assert answers == [[[[0, 0], [1, 0], [2, 0]], [[0, 1], [1, 1], [2, 1]]]] * 3
    with pytest.raises(ConnectionRefusedError):  # the door is closed behind the members
        connect(place.rendezvous, 1.0)


def test_a_meeting_place_is_at_the_address_that_it_is_given_and_nowhere_else(place: MeetingPlace) -> None:
    assert place.socket.getsockname() == ("127.0.0.1", place.rendezvous.port)
    assert place.rendezvous.url == f"tcp://127.0.0.1:{place.rendezvous.port}"
    assert str(place.rendezvous.key) not in repr(place.rendezvous)
    place.socket.close()


def test_a_stranger_is_not_let_in_and_nothing_of_it_is_unpickled(place: MeetingPlace, tmp_path) -> None:
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "entered"),)

    def member(group: SocketGroup) -> list:
        return group.exchange([group.rank], [1, 1])

    with socket.create_connection((place.rendezvous.host, place.rendezvous.port)) as stranger:  # first in the queue
        stranger.sendall(bytes(32))  # no answer to the challenge
        Connection(os.dup(stranger.fileno())).send_bytes(pickle.dumps(Payload()))
        assert together(2, place, member) == [[[0], [1]]] * 2
    assert not (tmp_path / "entered").exists()


def test_the_interface_of_an_address_is_the_one_that_has_it() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert interface_of("192.0.2.1") is None  # an address of documentation's own


def test_a_member_that_never_comes_is_a_hang(place: MeetingPlace) -> None:
    with pytest.raises(HangError, match=r"rank 0 of 2 waited up to 0.2 s for a member to join"):
        SocketGroup(0, 2, place, 0.2)
    with pytest.raises(HangError, match=r"rank 1 of 2 waited up to 0.2 s for rank 0 to listen"):
        SocketGroup(1, 2, Rendezvous("127.0.0.1", place.rendezvous.port, b""), 0.2)


def test_a_member_that_is_gone_is_a_hang_of_the_others(place: MeetingPlace) -> None:
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

    assert together(2, place, member) == ["noticed", "left"]
