"""What stages are built from stays when old checkpoints are dropped."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlinf_embodied.training.resume import outliving


def checkpoint(folder: Path, text: str) -> Path:
    (folder / "training_state").mkdir(parents=True)
    (folder / "training_state" / "moments").write_text(text)
    return folder


def test_a_checkpoint_of_the_run_itself_is_kept_beside_it_and_one_of_another_run_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = checkpoint(run / "checkpoints" / "step_000001", "one")
    (run / "checkpoints" / "latest").symlink_to(first.name, target_is_directory=True)
    kept = outliving(run / "checkpoints" / "latest", run)
    assert not kept.is_symlink()
    shutil.rmtree(first)
    assert (kept / "training_state" / "moments").read_text() == "one"
    assert outliving(kept, run) == kept
    second = outliving(checkpoint(run / "checkpoints" / "step_000002", "two"), run)
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", second.name]
    other = checkpoint(tmp_path / "other", "two")
    assert outliving(other, run) == other
