"""The cache may be read-only, or nowhere, which is reported before the work."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from rlinf_embodied.cache import cache_root, cached, require_writable
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


def test_a_cache_that_cannot_be_written_is_named_before_the_work(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = tmp_path / "file/cache/profiles/x.json"
    with pytest.raises(ConfigError, match=r"the cache .*profiles cannot be written \(Not a directory\)"):
        require_writable(result)
    with pytest.raises(ConfigError, match=r"the cache .* set RLINF_EMBODIED_CACHE"):
        cached(tmp_path / "file/kinematics/x", lambda path: pytest.fail("made in vain"))


def test_what_is_cached_is_made_once(tmp_path) -> None:
    for text in ("first", "second"):
        assert cached(tmp_path / "a/b.txt", lambda path, text=text: path.write_text(text)).read_text() == "first"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.txt"]


def test_a_folder_that_another_process_completes_meanwhile_stays(tmp_path, monkeypatch) -> None:
    final = tmp_path / "a/made"

    def complete(result: Path) -> None:
        result.mkdir(parents=True)
        (result / "marker").write_text("first")
        (result / "in_use").touch()

    monkeypatch.setattr("rlinf_embodied.cache.require_writable", complete)
    cached(final, lambda path: (path.mkdir(), (path / "marker").write_text("second")), "marker")
    assert (final / "marker").read_text() == "first"
    assert (final / "in_use").exists()


def test_a_full_disk_takes_an_empty_file_but_no_clone(tmp_path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a disk on which so much is left
    try:
        with pytest.raises(ConfigError, match="would be lost"):
            require_writable(tmp_path / "cache/x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
