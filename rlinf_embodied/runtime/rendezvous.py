"""Where the members of a group meet: a socket at which rank 0 listens, on its own node's address.

    rank 0    MeetingPlace(host)     listens, at a port that the system picks; gives a Rendezvous
    driver                           hands that on to the others, by reference: it need not read it
    others    connect(rendezvous)

No file system is shared.  Who does not know the key, which only the members get, does not get past the door of a
SocketGroup; torch's own store knows no keys, so its port belongs behind a firewall (docs/clusters.md).
"""

from __future__ import annotations

import hmac
import os
import socket
from dataclasses import dataclass, field

import psutil

_BACKLOG = 4096  # members of a large group knock at the same time
_KEY_BYTES = 32  # as many as the digest has
_DIGEST = "sha256"
_GREETING_S = 10.0  # who connects and then says nothing keeps the door shut no longer
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # of torch's collectives; torch knows no other way


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """An address and the members' secret, for example Rendezvous("10.0.0.2", 40123, b"...")."""

    host: str
    port: int
    key: bytes = field(repr=False)

    @property
    def url(self) -> str:
        """The address in torch's form."""
        return f"tcp://{self.host}:{self.port}"


class MeetingPlace:
    """A listening socket of this process; the group that meets here takes it over."""

    def __init__(self, host: str) -> None:
        """Listens at a free port of one of this machine's addresses."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.rendezvous = Rendezvous(host, self.socket.getsockname()[1], os.urandom(_KEY_BYTES))

    def accept(self) -> socket.socket | None:
        """Returns the connection of the next who knocks, None if that is no member."""
        connected, _ = self.socket.accept()
        try:
            connected.settimeout(_GREETING_S)
            challenge = os.urandom(_KEY_BYTES)
            connected.sendall(challenge)
            answer = _read(connected, _KEY_BYTES)
            if hmac.compare_digest(answer, hmac.digest(self.rendezvous.key, challenge, _DIGEST)):
                return _for_small_messages(connected)
        except OSError:
            pass
        connected.close()
        return None


def connect(rendezvous: Rendezvous, timeout_s: float) -> socket.socket:
    """Returns a member's connection to rank 0.

    Raises:
        OSError: nobody listens there, or says nothing for so long.
    """
    connected = socket.create_connection((rendezvous.host, rendezvous.port), timeout=timeout_s)
    connected.sendall(hmac.digest(rendezvous.key, _read(connected, _KEY_BYTES), _DIGEST))
    return _for_small_messages(connected)


def _read(connected: socket.socket, size: int) -> bytes:
    """Returns exactly so many bytes."""
    received = b""
    while len(received) < size:
        part = connected.recv(size - len(received))
        if not part:
            raise ConnectionError("closed while it was read")
        received += part
    return received


def _for_small_messages(connected: socket.socket) -> socket.socket:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each is waited for
    return connected


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface that has an address, None if none of this machine has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


def use_interface_of(address: str) -> None:
    """Lets torch's collectives of this process talk over the interface that has an address.

    Without it gloo takes what the host's name resolves to, which on many machines is a loopback address that no other
    node reaches.  What the environment says already is left alone.
    """
    interface = interface_of(address)
    for variable in _INTERFACES if interface else ():
        os.environ.setdefault(variable, str(interface))
