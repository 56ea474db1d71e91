"""PhysX's approximate reciprocals are replaced where the simulation uses them, and only once."""

from __future__ import annotations

import ctypes
import struct

import pytest

from rlinf_embodied.errors import SimulatorError
from rlinf_embodied.portable import exact_reciprocals


def test_both_places_jump_to_a_division_and_back() -> None:
    assert exact_reciprocals.make_reciprocals_exact()
    assert exact_reciprocals.make_reciprocals_exact()  # nothing is done twice
    base = exact_reciprocals._base_of("libsapien.so")
    assert base is not None
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
    monkeypatch.setattr(exact_reciprocals, "_base_of", lambda name: None)
    with pytest.raises(SimulatorError, match=r"not that of sapien 3.0.3.*run.exact=exact"):
        exact_reciprocals.make_reciprocals_exact.__wrapped__()
