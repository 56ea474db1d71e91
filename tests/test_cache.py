"""The cache may be read-only, or nowhere: said before the work, or the work goes elsewhere."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from rlinf_embodied.cache import cache_root, writable_place
from rlinf_embodied.errors import ConfigError


def no_user(uid):
    raise KeyError(uid)


def test_without_a_home_the_way_out_is_named(monkeypatch) -> None:
    monkeypatch.delenv("RLINF_EMBODIED_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_user)
    with pytest.raises(ConfigError, match=r"HOME is not set .* set HOME, or RLINF_EMBODIED_CACHE=<a folder"):
        cache_root()
    assert cache_root("/some/where") == Path("/some/where")
    monkeypatch.setenv("RLINF_EMBODIED_CACHE", "/else/where")
    assert cache_root() == Path("/else/where")


def test_what_cannot_go_into_the_cache_goes_to_the_spare_place(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    cached = tmp_path / "file/cache/profiles/x.json"
    with pytest.raises(
        ConfigError, match=r"the cache .*profiles cannot be written \(Not a directory\).* would be lost"
    ):
        writable_place(cached, None)
    with caplog.at_level(logging.WARNING):
        place = writable_place(cached, tmp_path / "run")
    assert place == tmp_path / "run/cache/profiles/x.json"
    assert str(place) in caplog.text
    place.write_text("{}")
    assert writable_place(cached, tmp_path / "run") == place
    assert writable_place(tmp_path / "cache/x", None) == tmp_path / "cache/x"


def test_a_full_disk_takes_an_empty_file_but_no_clone(tmp_path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a disk on which so much is left
    try:
        with pytest.raises(ConfigError, match="would be lost"):
            writable_place(tmp_path / "cache/x", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
