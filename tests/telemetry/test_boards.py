"""What the boards get: TensorBoard as it is, W&B and trackio through fakes of their public interfaces, W&B offline."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import pytest

from rlinf_embodied.config import RunConfig, TrackioConfig, WandbConfig
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.boards import TensorBoard, Trackio, Wandb, require_boards, start_boards
from rlinf_embodied.telemetry.metrics import MetricsWriter


@pytest.fixture
def wandb(monkeypatch) -> list[object]:
    """A wandb that keeps what it is told."""
    log: list[object] = []
    run = types.SimpleNamespace(log=lambda data, step: log.append((step, data)), finish=lambda: log.append("finished"))
    fake = types.ModuleType("wandb")
    fake.init = lambda **given: log.append(given) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return log


class FakeTrackio(types.ModuleType):
    """`init`, and runs with `log`, `finish` and a name, as trackio documents them; runs are known by name."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.runs: dict[str, list[tuple[int, dict]]] = {}
        self.configs: list[dict] = []

    def init(self, project: str, name: str | None = None, config=None, resume: str = "never", embed: bool = True):
        assert (project, embed) == ("p", False)
        assert resume in ("must", "allow", "never")
        if resume == "never" and name in self.runs:
            name = f"{name}-{len(self.runs)}"
        self.configs.append(config)
        rows = self.runs.setdefault(name or "unnamed", [])
        log = lambda metrics, step=None: rows.append((step, metrics))  # noqa: E731
        return types.SimpleNamespace(name=name, log=log, finish=lambda: rows.append((-1, {})))


@pytest.fixture
def trackio(monkeypatch) -> FakeTrackio:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


def test_a_run_has_the_boards_that_it_asks_for(tmp_path, wandb, trackio) -> None:
    made = lambda **asked: [  # noqa: E731
        type(board)
        for board in start_boards(tmp_path, RunConfig(**asked), WandbConfig(), TrackioConfig(project="p"), {})
    ]
    assert made() == [TensorBoard]
    assert made(tensorboard=False) == []
    assert made(wandb=True, trackio=True) == [TensorBoard, Wandb, Trackio]


def test_weights_and_biases_gets_the_same_numbers_where_asked(tmp_path, wandb) -> None:
    board = Wandb(tmp_path, WandbConfig(project="p", name="n", id="17", resume="must"), {"seed": 1})
    writer = MetricsWriter(tmp_path, [board])
    writer.write(5, 1, {"charts/SPS": 2.0, "losses/entropy": math.inf})
    writer.close()
    named = {"project": "p", "name": "n", "id": "17", "resume": "must", "dir": str(tmp_path), "config": {"seed": 1}}
    assert wandb == [named, (5, {"charts/SPS": 2.0}), "finished"]
    Wandb(tmp_path, WandbConfig(), {})
    default = {"project": "rlinf_embodied", "name": tmp_path.name, "id": None, "resume": None}
    assert wandb[-1] == default | {"dir": str(tmp_path), "config": {}}


def test_weights_and_biases_goes_on_with_a_run_only_where_it_is_named() -> None:
    with pytest.raises(ConfigError, match=r"wandb.resume is 'must', but it looks for wandb.id, .* give wandb.id=<id>"):
        WandbConfig(resume="must")
    with pytest.raises(ConfigError, match=r"wandb.resume is 'yes', but it is allow, must"):
        WandbConfig(resume="yes", id="17")


def test_weights_and_biases_offline_keeps_the_run_in_its_folder(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    board = Wandb(tmp_path, WandbConfig(project="p", name="n"), {"seed": 1})
    board.log({"charts/SPS": 2.0}, 5)
    board.close()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"charts/SPS" in written.read_bytes()


def test_trackio_gets_the_same_numbers_where_asked(tmp_path, trackio) -> None:
    writer = MetricsWriter(tmp_path, [Trackio(tmp_path, TrackioConfig(project="p", name="n"), {"seed": 1})])
    writer.write(5, 1, {"charts/SPS": 2.0, "losses/entropy": math.inf})
    writer.close()
    assert trackio.runs["n"] == [(5, {"charts/SPS": 2.0}), (-1, {})]
    assert trackio.configs == [{"seed": 1}]


def test_a_run_finds_its_curves_in_trackio_again_and_no_other_run_does(tmp_path, trackio) -> None:
    names = TrackioConfig(project="p")
    folders = [tmp_path / "x/same", tmp_path / "y/same"]
    for folder in folders:
        folder.mkdir(parents=True)
        Trackio(folder, names, {}).log({"a": 1.0}, 1)
    Trackio(folders[1], names, {}).log({"a": 2.0}, 2)
    assert trackio.runs == {"same": [(1, {"a": 1.0})], "same-1": [(1, {"a": 1.0}), (2, {"a": 2.0})]}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_board_that_is_not_installed_is_named(monkeypatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    said = (
        rf"run.{name} is true, but {name} is not installed: pip install 'rlinf-embodied\[{name}\]', or use run.{name}=f"
    )
    with pytest.raises(ConfigError, match=said):
        require_boards(RunConfig(**{name: True}))


def test_no_board_is_started_where_one_is_missing(tmp_path: Path, monkeypatch, wandb) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"run.trackio is true"):
        start_boards(tmp_path, RunConfig(wandb=True, trackio=True), WandbConfig(), TrackioConfig(), {})
    assert wandb == []
