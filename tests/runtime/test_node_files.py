"""Files that are sent from node to node: whole, once, and to the same place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlinf_embodied.errors import DataError
from rlinf_embodied.runtime.node_files import listing, paths_in, portions, read, work_in, write


def fill(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(100)))
    (folder / "empty").touch()
    (folder / "inner" / "b.bin").write_bytes(bytes(reversed(range(50))))
    (folder / "inner" / "b.bin").chmod(0o640)
    return folder


@pytest.mark.parametrize("most_bytes", [1 << 20, 64, 7])
def test_a_folder_arrives_as_it_was_whatever_it_is_cut_into(tmp_path: Path, most_bytes: int) -> None:
    source, target = fill(tmp_path / "source"), tmp_path / "target"
    entries = listing(str(source))
    for parts in portions(entries, most_bytes):
        assert sum(part.size for part in parts) <= most_bytes
        write(str(target), parts, read(str(source), parts))
    assert listing(str(target)) == entries  # sizes, times and modes
    for entry in entries:
        assert (target / entry.path).read_bytes() == (source / entry.path).read_bytes()


def test_a_single_file_is_sent_as_well_and_nothing_is_no_file(tmp_path: Path) -> None:
    file = fill(tmp_path / "source") / "a.bin"
    (parts,) = portions(listing(str(file)))
    write(str(tmp_path / "deep" / "copy.bin"), parts, read(str(file), parts))
    assert (tmp_path / "deep" / "copy.bin").read_bytes() == file.read_bytes()
    assert listing(str(tmp_path / "nothing")) == ()


def test_a_file_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    file = fill(tmp_path / "source") / "a.bin"
    first, *_ = portions(listing(str(file)), 64)
    write(str(tmp_path / "copy"), first, read(str(file), first))
    assert not (tmp_path / "copy").exists()


def test_a_place_that_takes_no_file_is_named(tmp_path: Path) -> None:
    file = fill(tmp_path / "source") / "a.bin"
    (parts,) = portions(listing(str(file)))
    with pytest.raises(DataError, match=rf"node \S+ cannot write {file}/x, which the run needs there"):
        write(str(file / "x"), parts, read(str(file), parts))
    with pytest.raises(DataError, match=rf"node \S+ cannot have the folder {file}/x in which the run was started"):
        work_in(str(file / "x"))


def test_a_process_works_in_the_folder_that_it_is_told_even_if_it_has_to_make_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    work_in(str(tmp_path / "new" / "folder"))
    assert Path(os.getcwd()) == tmp_path / "new" / "folder"


@dataclass
class Config:
    policy_folder: str
    data: list[Path]
    options: dict[str, object]
    name: str = "data/inner"


def test_only_paths_that_a_config_declares_are_sent(tmp_path: Path, monkeypatch) -> None:
    """Any other text may name a file or a home folder that is nobody else's business."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "data")
    data = [tmp_path / "data" / "a.bin", tmp_path / "none"]
    config = Config("data/inner", data, {"dir": str(tmp_path / "data"), "files": {"train": "./data/inner/b.bin"}})
    fill(tmp_path / "data" / "inner")
    (tmp_path / "data" / "inner" / "b.bin").touch()
    found = [tmp_path / "data" / "inner", tmp_path / "data" / "a.bin", tmp_path / "data" / "inner" / "b.bin"]
    assert paths_in(config) == found
    assert paths_in({"cache_dir": str(tmp_path / "data"), "videos": str(tmp_path / "data")}) == []
    assert paths_in({"folder": "/", "path": str(tmp_path)}) == []
