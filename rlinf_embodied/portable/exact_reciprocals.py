"""PhysX without the processor's approximate reciprocals, which Intel and AMD answer with different bits.

SAPIEN's PhysX uses `rcpps` and `rsqrtps` (relative error up to 1.5 * 2^-12, the bits are the maker's own) in two places
of the simulation: where a box touches a box, and where a triangle's face touches a convex body.  The other uses are ray
casts and sweeps, which no env makes.  In portable runs the two instructions are replaced, in memory, by a jump to a
division, which IEEE 754 defines to the last bit:

    calculateContacts     rcpps  x4 -> x2    becomes  x2 = 1 / x4
    testPolyFaceNormal    rsqrtps x4 -> x4   becomes  x4 = 1 / sqrt(x4)     (x5 is not read behind it)

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
_PRIVATE_ANONYMOUS_THERE = 0x02 | 0x20 | 0x100000  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
_REACH = (1 << 31) - (1 << 26)  # of a jump, less what the library takes


@dataclass(frozen=True, slots=True)
class _Site:
    """An instruction of three bytes, and the one behind it, which moves with it: a jump takes five bytes."""

    address: int  # in the library
    found: bytes  # both, preceded by `before`
    before: bytes
    load_at: int  # where, in `code`, the address of four ones goes, relative to its end
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
    """Replaces both instructions where this process is pinned; returns whether they are replaced.

    Raises:
        SimulatorError: the library is another one than that of constraints.txt.
    """
    if not portable.is_pinned():
        return False
    import sapien  # noqa: F401 - loads the library

    ranges = _mapped(_LIBRARY)
    base = min((start for start, _ in ranges), default=0)
    mapped = all(any(start <= base + site.address < end for start, end in ranges) for site in _SITES)
    if not mapped or any(_bytes_at(base, site) != site.before + site.found for site in _SITES):
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
    back = start + len(site.found)
    body += b"\xe9" + struct.pack("<i", back - (code + len(body) + 5))
    ctypes.memmove(code, bytes(body), len(body))
    detour = b"\xe9" + struct.pack("<i", code - (start + 5)) + b"\x90" * (len(site.found) - 5)
    first, size = start & -_PAGE, 2 * _PAGE
    _call("mprotect", first, size, _READ_WRITE_EXECUTE)
    ctypes.memmove(start, detour, len(detour))
    _call("mprotect", first, size, _READ_EXECUTE)


def _bytes_at(base: int, site: _Site) -> bytes:
    return ctypes.string_at(base + site.address - len(site.before), len(site.before) + len(site.found))


def _mapped(name: str = "") -> list[tuple[int, int]]:
    """Returns the ranges of addresses that this process has mapped, ascending: all, or those of a library."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(name)]
    return [(int(start, 16), int(end, 16)) for start, end in (line.split()[0].split("-") for line in lines)]


def _page_near(base: int) -> int:
    """Returns an executable page within reach of a jump from the library, in the nearest gap that is free."""
    gaps = [(end, start) for (_, end), (start, _) in itertools.pairwise(_mapped()) if start - end >= _PAGE]
    pages = [page for gap in gaps for page in (gap[0], gap[1] - _PAGE) if abs(page - base) < _REACH]
    for wanted in sorted(pages, key=lambda page: abs(page - base)):
        try:
            found = _call("mmap", wanted, _PAGE, _READ_WRITE_EXECUTE, _PRIVATE_ANONYMOUS_THERE, -1, 0)
        except OSError:  # another thread was faster, or nothing may lie there
            continue
        if found == wanted:  # an old kernel takes the address for a hint
            return found
    raise SimulatorError(
        "run.exact is 'portable', but there is no free page near PhysX in this process: use run.exact=exact"
    )


def _call(name: str, *arguments: int) -> int:
    """Calls the C library; returns its answer, an address or a number, or raises an OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_ssize_t
    answer = int(function(*map(ctypes.c_ssize_t, arguments)))
    if answer in (-1, (1 << 32) - 1):  # as a word, or as an int in one
        raise OSError(ctypes.get_errno(), name)
    return answer
