"""A group of processes that exchange small plain values over sockets: collectives for workers without torch.

rank 0 listens;  the others send what they have, rank 0 answers each with everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar, cast

from rlinf_embodied.errors import HangError
from rlinf_embodied.runtime.rendezvous import MeetingPlace, Rendezvous, connect

_Result = TypeVar("_Result")


class SocketGroup:
    """One member of a group of processes, of one machine or several; see learning/groups.py for the protocol."""

    def __init__(self, rank: int, size: int, meeting: MeetingPlace | Rendezvous, timeout_s: float = 600.0) -> None:
        """Meets the other members.

        Args:
            rank: of this process, 0 <= rank < size.
            size: number of members.
            meeting: the place where rank 0 listens, which it closes; for the others, where that is.
            timeout_s: limit of this meeting and of every later exchange.

        Raises:
            HangError: not everyone came in time, or rank 0 is gone.
        """
        assert 0 <= rank < size, f"rank {rank} is not in a group of {size}"
        assert isinstance(meeting, MeetingPlace) == (rank == 0), "rank 0 listens, the others connect"
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._others = self._accept(meeting) if isinstance(meeting, MeetingPlace) else [self._connect(meeting)]

    def _accept(self, meeting: MeetingPlace) -> list[Connection]:
        """Returns rank 0's connections, by rank from 1."""
        found: dict[int, Connection] = {}
        with meeting.socket as listener:
            listener.settimeout(self._timeout_s)
            while len(found) < self.size - 1:
                connected = self._within_limit(meeting.accept, "a member to join")
                if connected is not None:
                    connection = Connection(connected.detach())
                    found[cast(int, self._receive(connection, "a member's rank"))] = connection
        return [found[rank] for rank in range(1, self.size)]

    def _connect(self, rendezvous: Rendezvous) -> Connection:
        connected = self._within_limit(lambda: connect(rendezvous, self._timeout_s), "rank 0 to listen")
        connection = Connection(connected.detach())
        connection.send(self.rank)
        return connection

    def exchange(self, values: Sequence[object], counts: Sequence[int]) -> list[list[object]]:
        """See Group; the values are whatever can be pickled.

        Raises:
            HangError: a member did not answer within the timeout, or is gone.
        """
        assert counts[self.rank] == len(values), f"rank {self.rank} gives {len(values)} of {counts[self.rank]} values"
        if self.rank:
            self._within_limit(lambda: self._others[0].send(list(values)), "rank 0")
            return cast("list[list[object]]", self._receive(self._others[0], "rank 0"))
        given = [self._receive(connection, f"rank {i + 1}") for i, connection in enumerate(self._others)]
        everything = [list(values), *cast("list[list[object]]", given)]
        for rank, connection in enumerate(self._others):
            self._within_limit(lambda to=connection: to.send(everything), f"rank {rank + 1}")
        return everything

    def close(self) -> None:
        """Leaves; the others find out at their next exchange."""
        for connection in self._others:
            connection.close()

    def _receive(self, connection: Connection, whom: str) -> object:
        def receive() -> object:
            if not connection.poll(self._timeout_s):
                raise TimeoutError
            return connection.recv()

        return self._within_limit(receive, whom)

    def _within_limit(self, wait: Callable[[], _Result], whom: str) -> _Result:
        try:
            return wait()
        except (TimeoutError, EOFError, ConnectionError):
            raise self._hang(whom) from None

    def _hang(self, whom: str) -> HangError:
        return HangError(
            f"rank {self.rank} of {self.size} waited up to {self._timeout_s:g} s for {whom}: it failed, hangs, or "
            "makes other calls; look for its error"
        )
