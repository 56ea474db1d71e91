"""Whatever a file holds, reading it ends with its content or with an error of ours that says what to do."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import embodied, parse

from rlinf_embodied.compose import CONFIG_DIR, load, read_mapping
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.errors import CheckpointError, ConfigError, PlanError
from rlinf_embodied.learning import checkpoint
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.profile import load_profile, parse_profile
from rlinf_embodied.tools.plans import described_cluster

FEW = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([10**400, 2**63, -(2**70)]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["all", "0:1", "0:1/2", "0:1e999999999", "1/0:1", "../../etc/passwd", "${x}", "env", "actor"]),
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def changed(tree: object) -> st.SearchStrategy[object]:
    """Returns what draws a tree with one value at any depth replaced or taken out."""
    places = list(_places(tree))

    def apply(drawn: tuple[tuple[object, ...], object, bool]) -> object:
        place, value, drop = drawn
        return _replaced(tree, place, value, drop)

    return st.tuples(st.sampled_from(places), PLAIN, st.booleans()).map(apply)


def _places(tree: object, at: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    inside = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, value in inside for place in _places(value, (*at, key)))]


def _replaced(tree: object, place: tuple[object, ...], value: object, drop: bool) -> object:
    if not place:
        return value
    key, *rest = place
    copy = dict(tree) if isinstance(tree, Mapping) else list(tree)  # pyright: ignore[reportArgumentType]
    if not rest and drop:
        copy.pop(key)
    else:
        copy[key] = _replaced(copy[key], tuple(rest), value, drop)
    return copy


# ------------------------------------------------------------------------------------------------------------ profiles
PROFILE = json.loads((CONFIG_DIR / "profiles/maniskill_openvla.json").read_text())


@FEW
@given(PLAIN | changed(PROFILE))
def test_a_profile(data) -> None:
    try:
        parse_profile(data)
    except ConfigError as error:
        assert ":" in str(error)  # noqa: PT017


TEXTS = [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"format": ' + b"9" * 5000 + b"}", b"null", b"NaN", b"2001-13-01"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_files_of_any_bytes(tmp_path, text: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"file\.json"):
        load_profile(path)
    with pytest.raises(ConfigError, match=r"file\.json"):
        read_mapping(path)


# --------------------------------------------------------------------------------------------------------------- plans
WORKFLOW, _ = embodied((1.0, 0.0), (1.0, 0.0), (1.0, 0.0))
PLAN = {"items": ["env on 0:1/2 | policy on 1 in 2 shards", "actor on all"], "exclusive": ["actor / env+policy"]}
PIECES = [
    *("env", "policy", "actor", " on ", "all", "0-1", "1/2:1"),
    *("+", " | ", " > ", " in ", "2", " chunks", "(3:5)", "?"),
]


@FEW
@given(PLAIN | changed(PLAN), st.integers(1, 4))
def test_a_plan(variant, num_devices: int) -> None:
    try:
        resolve("fuzzed", [variant if isinstance(variant, dict) else {"items": variant}], num_devices, WORKFLOW)
    except PlanError as error:
        assert "plan" in str(error)  # noqa: PT017


def test_a_plan_as_it_is_meant_is_taken() -> None:
    assert resolve("meant", [PLAN], 2, WORKFLOW).devices() == (0, 1)


@FEW
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_the_text_of_a_plan(text: str) -> None:
    try:
        parse(text, 2, WORKFLOW)
    except PlanError as error:
        assert "plan" in str(error)  # noqa: PT017


CLUSTER = yaml.safe_load((CONFIG_DIR / "described_clusters/mixed.yaml").read_text())


@FEW
@given(PLAIN | changed(CLUSTER))
def test_a_cluster(data) -> None:
    try:
        described_cluster(data if isinstance(data, Mapping) else {"nodes": data}, "cluster")
    except ConfigError as error:
        assert "cluster" in str(error)  # noqa: PT017


# ------------------------------------------------------------------------------------------------------------- configs
CONFIG = {"env": {"num_envs": 64, "cameras": ["a"], "options": {"x": 1.0}}, "run": {"seed": 0, "exact": True}}


@FEW
@given(PLAIN | changed(CONFIG))
def test_a_config(data) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(yaml.safe_dump(data), encoding="utf-8")
        with pytest.raises(ConfigError):  # a whole one needs more sections than there are here
            load(path, TrainConfig)


# --------------------------------------------------------------------------------------------------------- checkpoints
MANIFEST = {
    "format": "rlinf_embodied checkpoint 1",
    "step": 3,
    "sequence": 1,
    "files": {"state.json": {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}},
}


def sealed(root: Path, manifest: bytes) -> Path:
    """Returns a checkpoint with a manifest of these bytes."""
    path = root / "step_000003"
    path.mkdir()
    (path / "state.json").write_text("{}")
    (path / "manifest.json").write_bytes(manifest)
    return path


def test_a_manifest_as_it_is_meant_is_taken(tmp_path) -> None:
    path = sealed(tmp_path, json.dumps(MANIFEST).encode())
    assert checkpoint.verify(path).step == 3
    assert checkpoint.load_state(path) == {}


@FEW
@given((PLAIN | changed(MANIFEST)).map(lambda data: json.dumps(data).encode()) | st.binary(max_size=20))
def test_a_manifest(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = sealed(Path(folder), data)
        for read in (checkpoint.verify, checkpoint.load_state, lambda path: checkpoint.load_tensors(path, "x")):
            try:
                read(path)
            except CheckpointError as error:
                assert str(path) in str(error)  # noqa: PT017
        assert checkpoint.find_latest(Path(folder)) in (path, None)


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../x", "./state.json", "", "a\0b", "a//b", "\ud800"])
def test_a_manifest_does_not_leave_its_folder(tmp_path, name: str) -> None:
    (tmp_path / "root").mkdir()
    files = MANIFEST["files"] | {name: {"bytes": 2, "sha256": "0"}}
    path = sealed(tmp_path / "root", json.dumps(MANIFEST | {"files": files}).encode())
    with pytest.raises(CheckpointError, match="which leads out of the checkpoint"):
        checkpoint.verify(path)


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_link_does_not_lead_out_of_a_checkpoint(tmp_path, where: str) -> None:
    """The link's target has the very content that the manifest asks for."""
    (tmp_path / "root").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_text("{}")
    name = "file" if where == "file" else "folder/file"
    files = MANIFEST["files"] | {name: MANIFEST["files"]["state.json"]}
    path = sealed(tmp_path / "root", json.dumps(MANIFEST | {"files": files}).encode())
    (path / where).symlink_to(tmp_path / "elsewhere" / ("file" if where == "file" else ""))
    with pytest.raises(CheckpointError, match=rf"{name} is a link that leads elsewhere"):
        checkpoint.verify(path)
