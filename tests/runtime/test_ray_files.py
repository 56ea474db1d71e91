"""Files between nodes, with folders in the place of nodes: what is sent, and what need not be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf_embodied.errors import DataError
from rlinf_embodied.runtime import ray_files
from rlinf_embodied.runtime.ray_files import RayFiles


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


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch) -> Nodes:
    monkeypatch.setattr(ray_files, "_here", lambda: "a")
    monkeypatch.setattr(ray_files, "_address", lambda node: f"10.0.0.{node}")
    monkeypatch.setattr(ray_files.ray, "get", lambda value: value)
    return Nodes(tmp_path / "nodes")


def test_what_stages_read_is_sent_to_the_nodes_that_lack_it_and_once(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    nodes.provide(folder, ["a", "b", "b", "c"])
    for name in ("b", "c"):
        assert Path(f"{nodes.root / name}{folder}", "config.json").read_text() == "{}"
    assert [what for what in nodes.done if what[1] != "listing"] == [
        *(("a", "read"), ("b", "write")),
        *(("a", "read"), ("c", "write")),
    ]
    nodes.done.clear()
    nodes.provide(folder, ["b"])
    assert nodes.done == [("b", "listing")]
    (folder / "config.json").write_text("{ }")
    nodes.provide(folder, ["b"])
    assert Path(f"{nodes.root / 'b'}{folder}", "config.json").read_text() == "{ }"


def test_what_workers_write_is_brought_what_seals_it_last(nodes: Nodes, tmp_path: Path, monkeypatch) -> None:
    there, here = Path(f"{nodes.root / 'b'}{tmp_path / 'step'}"), tmp_path / "step"
    there.mkdir(parents=True)
    for number, name in enumerate(("weights", "manifest.json", "COMPLETE")):
        (there / name).write_text(name)
        ray_files.node_files.os.utime(there / name, ns=(number, number))
    written = []
    replace = ray_files.node_files.os.replace
    monkeypatch.setattr(ray_files.node_files.os, "replace", lambda a, b: (written.append(Path(b).name), replace(a, b)))
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
