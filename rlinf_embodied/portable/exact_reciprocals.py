"""Replaces PhysX's approximate reciprocals, whose bits differ between Intel and AMD processors.

SAPIEN's PhysX uses `rcpps` and `rsqrtps` (relative error up to 1.5 * 2^-12; the bits depend on the manufacturer) in two
places of the simulation: contacts between two boxes, and between a triangle's face and a convex body.  All other uses
are ray casts and sweeps, which no env makes.  In portable runs the two instructions are replaced, in memory, by a jump
to a division, which IEEE 754 defines to the last bit:

    calculateContacts     rcpps  x4 -> x2    becomes  x2 = 1 / x4
    testPolyFaceNormal    rsqrtps x4 -> x4   becomes  x4 = 1 / sqrt(x4)     (x5 is not read afterwards)

Contacts then differ from stock PhysX's within the error of the approximation.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.errors import SimulatorError

_LIBRARY = "libsapien.so"
_PAGE = 1 << 12
_READ_WRITE_EXECUTE, _READ_EXECUTE = 7, 5
_PRIVATE_ANONYMOUS_AT_ADDRESS = 0x02 | 0x20 | 0x100000  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
_REACH = (1 << 31) - (1 << 26)  # distance of a jump, less the size of the library


@dataclass(frozen=True, slots=True)
class _Site:
    """An instruction of three bytes, and the next one, which is moved as well because a jump takes five bytes."""

    address: int  # in the library
    original: bytes  # both instructions, preceded by `before`
    before: bytes
    load_at: int  # offset in `code` of the relative address of four ones; relative to the end of that field
    code: bytes


_SITES = (
    _Site(
        0x487E3A,
        bytes.fromhex("0f53d4 0f57ff"),  # rcpps xmm4 -> xmm2; xorps xmm7, xmm7
        bytes.fromhex("660fdbee 66410fdbe9"),
        3,
        bytes.fromhex("0f281500000000 0f5ed4 0f57ff"),  # movaps ones -> xmm2; divps xmm4; xorps xmm7, xmm7
    ),
    _Site(
        0x55453C,
        bytes.fromhex("0f52e4 0f59da"),  # rsqrtps xmm4; mulps xmm2 -> xmm3
        bytes.fromhex("0fc6e5b1 0f58e5"),
        6,
        # sqrtps xmm4; movaps ones -> xmm5; divps xmm4 -> xmm5; movaps xmm5 -> xmm4; mulps xmm2 -> xmm3
        bytes.fromhex("0f51e4 0f282d00000000 0f5eec 0f28e5 0f59da"),
    ),
)


@cache
def make_reciprocals_exact() -> bool:
    """Replaces both instructions if this process is pinned; returns whether it did.

    Raises:
        SimulatorError: the library is not the version of constraints.txt, or cannot be changed in memory.
    """
    if not portable.is_pinned():
        return False
    import sapien  # noqa: F401 - loads the library

    ranges = _mapped(_LIBRARY)
    base = min((start for start, _ in ranges), default=0)
    mapped = all(any(start <= base + site.address < end for start, end in ranges) for site in _SITES)
    if not mapped or any(_bytes_at(base, site) != site.before + site.original for site in _SITES):
        raise SimulatorError(
            f"run.exact is 'portable', but {_LIBRARY} is not that of sapien 3.0.3, whose approximate reciprocals are "
            "known: install the version of constraints.txt, or use run.exact=exact"
        )
    ones = _page_near(base)
    ctypes.memmove(ones, struct.pack("<4f", 1, 1, 1, 1), 16)
    try:
        for number, site in enumerate(_SITES):
            _write_detour(base + site.address, site, ones + 16 + 64 * number, ones)
    except OSError as error:
        raise SimulatorError(
            f"run.exact is 'portable', but this system does not let {_LIBRARY} be changed in memory ({error}): use "
            "run.exact=exact"
        ) from error
    return True


def _write_detour(start: int, site: _Site, code: int, ones: int) -> None:
    body = bytearray(site.code)
    body[site.load_at : site.load_at + 4] = struct.pack("<i", ones - (code + site.load_at + 4))
    back = start + len(site.original)
    body += b"\xe9" + struct.pack("<i", back - (code + len(body) + 5))
    ctypes.memmove(code, bytes(body), len(body))
    detour = b"\xe9" + struct.pack("<i", code - (start + 5)) + b"\x90" * (len(site.original) - 5)
    first, size = start & -_PAGE, 2 * _PAGE
    _call("mprotect", first, size, _READ_WRITE_EXECUTE)
    ctypes.memmove(start, detour, len(detour))
    _call("mprotect", first, size, _READ_EXECUTE)


def _bytes_at(base: int, site: _Site) -> bytes:
    return ctypes.string_at(base + site.address - len(site.before), len(site.before) + len(site.original))


def _mapped(name: str = "") -> list[tuple[int, int]]:
    """Returns the mapped address ranges of this process, ascending: all, or those of one library."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(name)]
    return [(int(start, 16), int(end, 16)) for start, end in (line.split()[0].split("-") for line in lines)]


def _page_near(base: int) -> int:
    """Maps an executable page in the nearest free gap within reach of a jump from the library; returns its address."""
    gaps = [(end, start) for (_, end), (start, _) in itertools.pairwise(_mapped()) if start - end >= _PAGE]
    pages = [page for gap in gaps for page in (gap[0], gap[1] - _PAGE) if abs(page - base) < _REACH]
    for address in sorted(pages, key=lambda page: abs(page - base)):
        try:
            mapped = _call("mmap", address, _PAGE, _READ_WRITE_EXECUTE, _PRIVATE_ANONYMOUS_AT_ADDRESS, -1, 0)
        except OSError:  # another thread mapped it first, or the address is reserved
            continue
        if mapped == address:  # old kernels treat the address as a hint
            return mapped
    raise SimulatorError(
        "run.exact is 'portable', but there is no free page near PhysX in this process: use run.exact=exact"
    )


def _call(name: str, *arguments: int) -> int:
    """Calls a function of the C library; returns its result, an address or a number, or raises an OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_ssize_t
    result = int(function(*map(ctypes.c_ssize_t, arguments)))
    if result in (-1, (1 << 32) - 1):  # -1 as a word, or as an int zero-extended to a word
        raise OSError(ctypes.get_errno(), name)
    return result
