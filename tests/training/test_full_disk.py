"""A full disk of the driver ends a run with one line that says which file, and the same command goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import metric_rows, tiny, train

from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.errors import RunFileError
from rlinf_embodied.telemetry.metrics import MetricsWriter
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.trace import write_trace

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
SAID = r"{} cannot be written \(No space left on device\): free space .* give the same command again"
SHORT = [
    *("run.num_iterations=3", "checkpoint.every=1", "env.num_envs=8", "algorithm.epochs=1", "algorithm.value_epochs=1"),
    *("eval.num_episodes=2", "eval.num_envs=2", "warm_start.from_nothing=true", "cluster.session=serial"),
]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "recoveries.jsonl", "trace.json"])
def test_the_file_is_named_and_what_to_do(tmp_path: Path, name: str) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, 0, {"a": 1.0})
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(FULL)
    write = {
        "metrics.jsonl": lambda: writer.write(2, 1, {"a": 1.0}),
        "samples.jsonl": lambda: writer.write_samples(2, 1, [{"a": 1.0}]),
        "recoveries.jsonl": lambda: RunFolder(tmp_path).append_json(name, {"a": 1}),
        "trace.json": lambda: write_trace(tmp_path / name, []),
    }[name]
    with pytest.raises(RunFileError, match=SAID.format(f".*{name}")):
        write()


def test_a_file_that_is_replaced_as_a_whole_stays_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_text("plan.json", "{}")
    (tmp_path / ".plan.json.partial").symlink_to(FULL)
    with pytest.raises(RunFileError, match=SAID.format("plan.json")):
        folder.write_text("plan.json", "[]")
    assert (tmp_path / "plan.json").read_text() == "{}"


@pytest.mark.slow
def test_a_run_that_ended_so_goes_on_and_gives_what_an_undisturbed_one_gives(tmp_path: Path, monkeypatch) -> None:
    straight = train(tiny(f"run.dir={tmp_path / 'straight'}", *SHORT))
    folder, run_iteration = tmp_path / "full", EmbodiedJob.run_iteration
    metrics, kept = folder / "metrics.jsonl", folder / "kept.jsonl"

    def filled(self, executor, progress):
        if progress.iteration == 2:
            metrics.rename(kept)
            metrics.symlink_to(FULL)
        return run_iteration(self, executor, progress)

    monkeypatch.setattr(EmbodiedJob, "run_iteration", filled)
    with pytest.raises(RunFileError, match=SAID.format("metrics.jsonl")):
        train(tiny(f"run.dir={folder}", *SHORT))
    monkeypatch.undo()
    kept.rename(metrics)
    found = train(tiny(f"run.dir={folder}", *SHORT))
    assert found["weights_sha256"] == straight["weights_sha256"]
    assert metric_rows(folder) == metric_rows(tmp_path / "straight")
