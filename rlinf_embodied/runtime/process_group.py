"""Collectives between processes over torch.distributed: gloo on CPU, nccl on GPU; nothing global is touched.

A TorchGroup owns its store and backend.  `torch.distributed`'s default group stays unset, so a process may hold
several groups, close one, and build another after a peer has died.  (Sharded tensors need a default group;
learning/sharded.py makes one over the same store.)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from rlinf_embodied.device import has_nccl, synchronize, use
from rlinf_embodied.errors import PeerError

_NEVER = timedelta(days=30)  # no time limit: health checks detect a member that hangs
_BACKLOG = 4096  # members of a large group connect at the same time
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # torch takes the network interface from these only


class TorchGroup:
    """One member of a group of processes; see learning/groups.py for the protocol.

    Other code may use `store`, under a separate prefix.  After a PeerError the group cannot be used: close it and build
    a new one with another rendezvous.
    """

    def __init__(
        self, rank: int, size: int, rendezvous: str, device: str = "cpu", listener: socket.socket | None = None
    ) -> None:
        """Connects to the other members; without NCCL for the kind of device, tensors go through host memory, by gloo.

        Args:
            rank: of this process, 0 <= rank < size.
            size: number of members.
            rendezvous: "file:///shared/path" (a file that does not exist yet) or "tcp://host:port" (rank 0 listens).
            device: torch's name.
            listener: of rank 0, a socket that already listens there, of which this takes ownership.

        Raises:
            PeerError: a member died before it connected.
        """
        assert 0 <= rank < size, f"rank {rank} is not in a group of {size}"
        self.rank, self.size = rank, size
        self._device = device if has_nccl(device) else "cpu"  # where tensors are sent from and arrive
        with self._guarded("rendezvous"):
            self.store = _store(rank, size, rendezvous, listener)
            self._backend = self._connect()

    def _connect(self) -> dist.ProcessGroup:
        self.store.set_timeout(_NEVER)
        if has_nccl(self._device):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NEVER
            use(self._device)
            return cast(dist.ProcessGroup, dist.ProcessGroupNCCL(self.store, self.rank, self.size, options))
        return cast(dist.ProcessGroup, dist.ProcessGroupGloo(self.store, self.rank, self.size, _NEVER))

    def exchange(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        assert counts[self.rank] == len(tensors) > 0, f"rank {self.rank} gives {len(tensors)} of {counts} tensors"
        sent = [tensor.detach().to(self._device).contiguous() for tensor in tensors]
        received = self._gathered(sent, counts) if has_nccl(self._device) else self._from_each(sent, counts)
        answers = [[tensor.to(tensors[0].device) for tensor in part] for part in received]
        answers[self.rank] = list(tensors)
        return answers

    def _from_each(self, sent: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        """Exchanges tensors rank by rank, by gloo, whose gather copies all of them again and takes twice as long."""
        received = [[torch.empty_like(sent[0]) for _ in range(count)] for count in counts]
        others = [rank for rank in range(self.size) if rank != self.rank]

        def start() -> list[dist.Work]:
            receive, send = self._backend.recv, self._backend.send
            works = [receive([part], rank, k) for rank in others for k, part in enumerate(received[rank])]
            return works + [send([part], rank, k) for rank in others for k, part in enumerate(sent)]

        self._run("exchange", start)
        return received

    def _gathered(self, sent: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
        """Gathers the tensors of all ranks, by NCCL; those with fewer pad, since it gathers equal sizes only."""
        first = sent[0]
        padded = torch.empty(max(counts), first.numel() * first.element_size(), dtype=torch.uint8, device=self._device)
        for row, tensor in zip(padded, sent, strict=False):
            row.copy_(tensor.reshape(-1).view(torch.uint8))  # as bytes: any dtype, bit for bit
        received = [torch.empty_like(padded) for _ in range(self.size)]
        self._run("exchange", lambda: [self._backend.allgather([received], [padded])])
        typed = lambda row: row.view(first.dtype).reshape(first.shape)  # noqa: E731
        return [[typed(part[k]) for k in range(count)] for part, count in zip(received, counts, strict=True)]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        summed = tensor.detach().to(self._device, copy=True).contiguous()
        self._run("all_reduce", lambda: [self._backend.allreduce([summed])])
        return summed.to(tensor.device)

    def close(self) -> None:
        """Releases sockets and threads; the group cannot be used afterwards."""
        self._backend.shutdown()
        del self._backend, self.store

    def wake(self) -> None:
        """Ends this member's wait from another thread: NCCL's does not end with a peer, as gloo's does."""
        if has_nccl(self._device):
            self._backend.abort()

    def _run(self, operation: str, start: Callable[[], Sequence[dist.Work]]) -> None:
        with self._guarded(operation):
            for work in start():
                work.wait(_NEVER)
            synchronize(self._device)

    @contextmanager
    def _guarded(self, operation: str) -> Iterator[None]:
        """Turns a lost connection within the block into a PeerError."""
        try:
            yield
        except RuntimeError as error:  # torch raises DistError, its child, and the plain one
            raise PeerError(
                f"rank {self.rank} of {self.size} lost the others in {operation}: one of them died; close this group "
                f"and build a new one ({str(error).splitlines()[0]})"
            ) from error


def _store(rank: int, size: int, rendezvous: str, listener: socket.socket | None) -> Store:
    kind, _, place = rendezvous.partition("://")
    if kind == "file":
        return dist.FileStore(place, size)  # pyright: ignore[reportPrivateImportUsage]
    host, _, port = place.rpartition(":")
    taken = None if listener is None else listener.detach()
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, int(port), size, is_master=rank == 0, timeout=_NEVER, master_listen_fd=taken
    )


def listen(host: str) -> tuple[socket.socket, str]:
    """Returns a socket that listens at a free port of one of this machine's addresses, and its rendezvous."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    return listener, f"tcp://{host}:{listener.getsockname()[1]}"


def use_interface_of(address: str) -> None:
    """Makes torch's collectives of this process use the network interface with this address, if there is one.

    By default gloo uses the address to which the host's name resolves, which on many machines is a loopback address
    that other nodes cannot reach.  Environment variables that are already set are not changed.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            for variable in _INTERFACES:
                os.environ.setdefault(variable, name)
            return
