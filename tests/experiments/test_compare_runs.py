"""What experiments/compare_runs.py says of finished runs."""

from pathlib import Path

from experiments.compare_runs import Run, table


def finished(name: str, before: float, after: float) -> Run:
    def evaluated(share: float) -> dict:
        interval = [share - 0.05, share + 0.05]
        found = {"success_once": share, "success_once_interval": interval, "num_episodes": 100}
        return found | {"success_at_end": share - 0.02, "success_at_end_interval": interval}

    summary = {"before": evaluated(before), "after": evaluated(after), "plan": "collocated", "env_steps": 51_200}
    summary |= {"rl_s": 90.0, "env_steps_per_s": 570.4}
    return Run(Path("runs") / name, summary, {"seed": 3, "hardware": {"devices": 2}})


def test_a_row_has_intervals_and_says_whether_they_overlap() -> None:
    header, _, first, second = table([finished("a", 0.5, 0.9), finished("b", 0.5, 0.55)]).splitlines()
    assert header.startswith("| run | seed | plan | success_once before |")
    assert first.startswith("| a | 3 | collocated on 2 | 50.0 % [45.0, 55.0] of 100 | 90.0 % [85.0, 95.0] of 100 |")
    assert first.endswith("| 51,200 | 1.5 | 570 | no |")
    assert second.endswith("| yes |")
