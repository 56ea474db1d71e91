"""Files between nodes, with folders in the place of nodes: sent whole, once, and to the same place."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_embodied.errors import DataError
from rlinf_embodied.runtime import ray_files
from rlinf_embodied.runtime.ray_files import RayFiles, listing, paths_in, read, work_in, write


def fill(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(100)))
    (folder / "empty").touch()
    (folder / "inner" / "b.bin").write_bytes(bytes(reversed(range(50))))
    (folder / "inner" / "b.bin").chmod(0o640)
    return folder


class Nodes(RayFiles):
    """Node "a" is the driver's; the files of another are those below a folder of its name."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.done = root, []
        self.kept: dict[str, list] = {}

    def _clerk(self, node: str):  # pyright: ignore[reportIncompatibleMethodOverride]
        def remote(function: Callable[..., object], path: str, *arguments: object) -> object:
            self.done.append((node, function.__name__))
            return function(path if node == "a" else f"{self.root / node}{path}", *arguments)

        keep = SimpleNamespace(remote=lambda refs: self.kept.update({node: refs}))
        return SimpleNamespace(do=SimpleNamespace(remote=remote), keep=keep)

    def there(self, node: str, path: Path) -> Path:
        return Path(f"{self.root / node}{path}")


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch) -> Nodes:
    monkeypatch.setattr(ray_files, "here", lambda: "a")
    monkeypatch.setattr(ray_files, "_address", lambda node: f"10.0.0.{node}")
    monkeypatch.setattr(ray_files.ray, "get", lambda value: value)
    return Nodes(tmp_path / "nodes")


@pytest.mark.parametrize("portion", [1 << 20, 64, 7])
def test_a_folder_arrives_as_it_was_whatever_it_is_cut_into(nodes: Nodes, tmp_path, monkeypatch, portion: int) -> None:
    monkeypatch.setattr(ray_files, "PORTION_BYTES", portion)
    folder = fill(tmp_path / "source")
    nodes.provide(folder, ["a", "b"])
    target = nodes.there("b", folder)
    assert listing(str(target)) == listing(str(folder))  # sizes, times and modes
    for entry in listing(str(folder)):
        assert (target / entry.path).read_bytes() == (folder / entry.path).read_bytes()
    nodes.provide(folder / "a.bin", ["c"])  # a single file
    assert nodes.there("c", folder / "a.bin").read_bytes() == (folder / "a.bin").read_bytes()
    assert listing(str(tmp_path / "nothing")) == ()


def test_a_file_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    file = fill(tmp_path / "source") / "a.bin"
    (entry,) = listing(str(file))
    write(str(tmp_path / "copy"), entry, 0, read(str(file), "", 0, 64))
    assert not (tmp_path / "copy").exists()
    write(str(tmp_path / "copy"), entry, 64, read(str(file), "", 64, 64))
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


def test_a_place_that_takes_no_file_is_named(tmp_path: Path) -> None:
    file = fill(tmp_path / "source") / "a.bin"
    (entry,) = listing(str(file))
    with pytest.raises(DataError, match=rf"node \S+ cannot write {file}/x, which the run needs there"):
        write(str(file / "x"), entry, 0, read(str(file), "", 0, 64))
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
    found = [tmp_path / "data" / "inner", tmp_path / "data" / "a.bin", tmp_path / "data" / "inner" / "b.bin"]
    assert paths_in(config) == found
    assert paths_in({"cache_dir": str(tmp_path / "data"), "videos": str(tmp_path / "data")}) == []
    assert paths_in({"folder": "/", "path": str(tmp_path)}) == []


def test_what_stages_read_is_sent_to_the_nodes_that_lack_it_and_once(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    nodes.provide(folder, ["a", "b", "b", "c"])
    sent = [what for what in nodes.done if what[1] != "listing"]
    assert sent == [("a", "read"), ("b", "write"), ("a", "read"), ("c", "write")]
    nodes.done.clear()
    nodes.provide(folder, ["b"])
    assert nodes.done == [("b", "listing")]
    (folder / "config.json").write_text("{ }")
    nodes.provide(folder, ["b"])
    assert nodes.there("b", folder / "config.json").read_text() == "{ }"


def test_what_workers_write_is_brought_what_seals_it_last(nodes: Nodes, tmp_path: Path, monkeypatch) -> None:
    there, here = nodes.there("b", tmp_path / "step"), tmp_path / "step"
    there.mkdir(parents=True)
    for number, name in enumerate(("weights", "manifest.json", "COMPLETE")):
        (there / name).write_text(name)
        os.utime(there / name, ns=(number, number))
    written, replace = [], os.replace
    monkeypatch.setattr(ray_files.os, "replace", lambda a, b: (written.append(Path(b).name), replace(a, b)))
    assert nodes.collect(here, ["a", "b"]) == 3
    assert written == ["weights", "manifest.json", "COMPLETE"]
    assert nodes.collect(here, ["a", "b"]) == 0
    assert nodes.collect(tmp_path / "nothing", ["b"]) == 0


def test_the_node_of_the_driver_alone_costs_nothing(nodes: Nodes, tmp_path: Path) -> None:
    nodes.provide(tmp_path, [])
    nodes.provide(tmp_path, ["a"])
    assert nodes.collect(tmp_path, ["a"]) == 0
    assert nodes.done == []


def test_more_than_can_be_sent_at_each_start_is_refused(nodes: Nodes, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "data").write_bytes(bytes(100))
    monkeypatch.setattr(ray_files, "_MOST_BYTES", 99)
    with pytest.raises(DataError, match=r"data holds 0 GB that node 10.0.0.b does not have.*copy it to the same path"):
        nodes.provide(tmp_path / "data", ["b"])


def test_each_value_is_held_on_another_node_than_its_own_and_no_node_holds_all(nodes: Nodes, monkeypatch) -> None:
    made = {"of a": ["a"], "of b": ["b"], "of b, too": ["b"], "of c": ["c"], "small": []}
    places = {ref: {"node_ids": where} for ref, where in made.items()}
    monkeypatch.setattr(ray_files, "get_object_locations", lambda refs: {ref: places[ref] for ref in refs})
    nodes.keep(list(made), ["b", "c"])  # pyright: ignore[reportArgumentType]
    held = {ref: node for node, refs in nodes.kept.items() for ref in refs}
    assert sorted(held) == ["of a", "of b", "of b, too", "of c"]
    assert all(held[ref] not in made[ref] for ref in held)
    assert len(set(held.values())) > 1
    nodes.kept.clear()
    nodes.keep(list(made), [])  # one node
    assert nodes.kept == {}
