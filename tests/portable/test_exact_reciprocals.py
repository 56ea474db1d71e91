"""PhysX's approximate reciprocals are replaced where the simulation uses them, and only once."""

from __future__ import annotations

import contextlib
import ctypes
import struct

import pytest

from rlinf_embodied.errors import SimulatorError
from rlinf_embodied.portable import exact_reciprocals


def test_both_places_jump_to_a_division_and_back() -> None:
    assert exact_reciprocals.make_reciprocals_exact()
    assert exact_reciprocals.make_reciprocals_exact()  # nothing is done twice
    base = exact_reciprocals._mapped("libsapien.so")[0][0]
    for site in exact_reciprocals._SITES:
        start = base + site.address
        jump = ctypes.string_at(start, 6)
        assert (jump[0], jump[5]) == (0xE9, 0x90)
        code = start + 5 + struct.unpack("<i", jump[1:5])[0]
        body = ctypes.string_at(code, len(site.code) + 5)
        ones = code + site.load_at + 4 + struct.unpack("<i", body[site.load_at : site.load_at + 4])[0]
        assert struct.unpack("<4f", ctypes.string_at(ones, 16)) == (1.0, 1.0, 1.0, 1.0)
        back = code + len(body) + struct.unpack("<i", body[-4:])[0]
        assert back == start + 6


def test_another_library_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(exact_reciprocals, "_mapped", lambda name: [])
    with pytest.raises(SimulatorError, match=r"not that of sapien 3.0.3.*run.exact=exact"):
        exact_reciprocals.make_reciprocals_exact.__wrapped__()


def test_a_process_full_of_memory_near_the_library_has_a_page_left() -> None:
    import sapien  # noqa: F401 - loads the library

    base = exact_reciprocals._mapped("libsapien.so")[0][0]
    taken, page = [], exact_reciprocals._PAGE
    try:
        for step in range(1 << 24, (1 << 31) - (1 << 26), 1 << 22):  # a page in every 4 MB, on both sides
            for address in ((base + sign * step) & -page for sign in (-1, 1)):
                with contextlib.suppress(OSError):
                    flags = exact_reciprocals._PRIVATE_ANONYMOUS_AT_ADDRESS
                    taken.append(exact_reciprocals._call("mmap", address, page, 0, flags, -1, 0))
        found = exact_reciprocals._page_near(base)
        taken.append(found)
        assert abs(found - base) < 1 << 31
        ctypes.memmove(found, b"code", 4)
        assert ctypes.string_at(found, 4) == b"code"
    finally:
        for address in taken:
            exact_reciprocals._call("munmap", address, page)
