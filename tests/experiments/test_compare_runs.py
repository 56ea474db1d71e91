"""Finished runs side by side: what the table says of them, and what is refused."""

import json
from pathlib import Path

from scripts import call


def finished(folder: Path, before: float, after: float) -> str:
    def evaluated(share: float) -> dict:
        interval = [share - 0.05, share + 0.05]
        found = {"success_once": share, "success_once_interval": interval, "num_episodes": 100}
        return found | {"success_at_end": share - 0.02, "success_at_end_interval": interval}

    summary = {"before": evaluated(before), "after": evaluated(after), "plan": "collocated", "env_steps": 51_200}
    summary |= {"rl_s": 90.0, "env_steps_per_s": 570.4, "iterations": 2}
    manifest = {"seed": 3, "hardware": {"devices": 2, "description": "two cores"}, "versions": {"torch": "2.14.1"}}
    manifest["command"] = ["experiments/train_vla.py", "run.seed=3"]
    rows = [{"iteration": k, "global_step": 25_600 * k, "rollout/success_once": 0.4 * k} for k in (1, 2)]
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row | {"charts/SPS": 570.4}) + "\n" for row in rows))
    return str(folder)


def test_a_row_has_intervals_and_says_whether_they_overlap(monkeypatch, capsys, tmp_path: Path) -> None:
    folders = [finished(tmp_path / "a", 0.5, 0.9), finished(tmp_path / "b", 0.5, 0.55)]
    code, out, _ = call(monkeypatch, capsys, "compare_runs", f"runs={','.join(folders)}", f"out={tmp_path}/pages/both")
    assert code == 0
    header, _, first, second, _, command, _ = out.splitlines()
    assert header.startswith("| run | seed | plan | success_once before |")
    assert first.startswith("| a | 3 | collocated on 2 | 50.0 % [45.0, 55.0] of 100 | 90.0 % [85.0, 95.0] of 100 |")
    assert first.endswith("| 51,200 | 1.5 | 570 | no |")
    assert second.endswith("| yes |")
    assert command == "- `a`: `python experiments/train_vla.py run.seed=3`, two cores, torch 2.14.1"
    assert (tmp_path / "pages/both.md").read_text() == out
    assert (tmp_path / "pages/both.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_cannot_be_compared_are_refused(monkeypatch, capsys, tmp_path: Path) -> None:
    ours, target = finished(tmp_path / "a", 0.5, 0.9), str(tmp_path / "both")
    unfinished = Path(finished(tmp_path / "b", 0.5, 0.9))
    (unfinished / "summary.json").unlink()
    code, _, err = call(monkeypatch, capsys, "compare_runs", f"runs={ours},{unfinished}", f"out={target}")
    assert (code, "b is no finished run: give run folders with summary.json" in err) == (2, True)
    other = Path(finished(tmp_path / "c", 0.5, 0.9))
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps(summary | {"accuracy_before": 0.5}))
    code, _, err = call(monkeypatch, capsys, "compare_runs", f"runs={ours},{other}", f"out={target}")
    assert (code, "the runs are of two workflows" in err) == (2, True)
    assert not (tmp_path / "both.md").exists()
