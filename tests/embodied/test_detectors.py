"""Each detector catches the fault that is planted for it, and is silent without."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import clone, tiny, train

from envs.episodes import EpisodeEnv
from envs.point_reach import PointSimulator
from policies.tiny_vla import TinyVLA
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.embodied.detectors import seeds_of_training
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.interfaces.policies import PolicyOutput

EXPERT = ["env=point_reach", "env.obs_size=16", "env.chunk=4", "env.horizon=20", "env.block_size=4", "policy=expert"]


def evaluate(folder: Path, *overrides: str) -> dict:
    small = ["cluster=serial", "eval.num_envs=8", "eval.num_episodes=16", "eval.record_video=false"]
    given = {text.split("=", 1)[0] for text in overrides}
    small = [text for text in small if text.split("=", 1)[0] not in given]
    evaluate_command(compose_evaluate([*small, *overrides, f"run.dir={folder}"]))
    return json.loads((folder / "eval_info.json").read_text())


def acted(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., PolicyOutput]:
    act = TinyVLA.act

    def changed(*arguments: object) -> PolicyOutput:
        output = act(*arguments)
        return PolicyOutput(change(output.actions), output.record, output.log_probs)

    return changed


def begins_solved(simulator: PointSimulator, rows, seeds, reset=PointSimulator.reset) -> None:
    reset(simulator, rows, seeds)
    simulator._point[list(rows)] = simulator._goal[list(rows)]


FAULTS = {
    "solved at reset": (PointSimulator, "reset", begins_solved, "16 of 16 episodes begin solved"),
    "another row's observation": (
        *(TinyVLA, "encode", lambda self, seen, encode=TinyVLA.encode: encode(self, seen.rows([0] * len(seen)))),
        r"a row's action changes by \S+ with the other rows of a policy call: rows are mixed up",
    ),
    "another row's image": (
        *(PointSimulator, "images", lambda self, rows, see=PointSimulator.images: see(self, [0] * len(rows))),
        "14 of 16 episodes begin with the images of another state: rows may show another row's",
    ),
    "constant output": (
        *(TinyVLA, "act", acted(lambda actions: torch.full_like(actions, 0.3))),
        "all actions of all episodes are the same",
    ),
    "saturated output": (
        *(TinyVLA, "act", acted(lambda actions: torch.where(actions > 0, 3.0, -3.0))),
        r"100% of the actions' components are at the ends of \[-1, 1\]",
    ),
    "a state that does not react": (
        *(PointSimulator, "step", lambda self, actions, rows: None),
        "16 of 16 episodes end in the state they began in: actions may not reach the simulator",
    ),
    "repeated episodes": (
        *(PointSimulator, "reset", lambda self, rows, seeds, r=PointSimulator.reset: r(self, rows, [7] * len(rows))),
        "15 of 16 episodes begin as an earlier one does",
    ),
}


def test_nothing_is_wrong_with_a_right_evaluation(tmp_path) -> None:
    assert evaluate(tmp_path / "expert", *EXPERT)["warnings"] == []
    assert evaluate(tmp_path / "clone", f"checkpoint={clone(tiny())}")["warnings"] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_warned_of(fault: str, tmp_path, monkeypatch, capsys) -> None:
    owner, name, planted, says = FAULTS[fault]
    folder = clone(tiny())
    monkeypatch.setattr(owner, name, planted)
    found = evaluate(tmp_path, f"checkpoint={folder}")["warnings"]
    assert [text for text in found if re.match(says, text)], found
    assert f"warning: {found[0]}" in capsys.readouterr().out


def test_tasks_that_share_an_instruction_are_warned_of(tmp_path, monkeypatch) -> None:
    env = ["env=libero", "env.options.adapter=libero_stand_in.StandIn", "env.obs_size=4", "env.horizon=8"]
    words = "episodes of 10 tasks have 1 instructions: rows may get another row's"
    assert words not in evaluate(tmp_path / "right", "policy=random", *env)["warnings"]
    monkeypatch.setattr(EpisodeEnv, "_told", lambda self, rows: ("do it",) * len(rows))
    assert words in evaluate(tmp_path / "wrong", "policy=random", *env)["warnings"]


def test_a_horizon_that_cuts_is_warned_of(tmp_path) -> None:
    found = evaluate(tmp_path, *EXPERT, "env.horizon=4")["warnings"]
    assert "episodes are first solved in the last tenth of env.horizon=4: a longer one would solve more" in found[0]


def test_episodes_that_chose_a_checkpoint_are_warned_of(tmp_path) -> None:
    goal = ["run.until_success=1.0", "eval.check_episodes=8", "eval.check_every=1"]
    summary = train(tiny(f"run.dir={tmp_path / 'run'}", *goal))
    assert summary["best_note"].startswith("biased upwards: the highest of several checks; `after` is")
    latest = tmp_path / "run/checkpoints/latest"
    assert seeds_of_training(latest) == {"checks": set(range(1_000_000, 1_000_008))}
    found = evaluate(tmp_path / "check", f"checkpoint={latest}", "eval.seed=1000004", "eval.num_episodes=8")
    assert "4 of 8 episodes have seeds that were used before, for checks" in found["warnings"]


# ----------------------------------------------------------------------------------------------------- the episodes
def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "episodes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_episode_has_a_row_and_failures_are_filmed_by_seed(tmp_path) -> None:
    few = ["eval.video_size=32", "eval.num_videos=2"]
    info = evaluate(tmp_path, f"checkpoint={clone(tiny())}", "film_failures=true", *few)
    rows = rows_of(tmp_path)
    assert [(int(row["seed"]), float(row["return"])) for row in rows] == [
        (episode["seed"], episode["return"]) for episode in info["episodes"]
    ]
    failed = [row for row in rows if float(row["success_once"]) == 0]
    assert [bool(row["video"]) for row in failed] == [k < 2 for k in range(len(failed))]
    assert all((tmp_path / "videos" / row["video"]).exists() and "success=0" in row["video"] for row in failed[:2])
    assert all((row["first_success"] == "") == (float(row["success_once"]) == 0) for row in rows)
    assert {row["instruction"] for row in rows} == {"move the point to the goal"}
    evaluate(tmp_path / "seeds", *EXPERT, *few, "eval.record_video=true", "eval.film_seeds=[9003,9009]")
    assert [int(row["seed"]) for row in rows_of(tmp_path / "seeds") if row["video"]] == [9003, 9009]


def test_a_training_has_the_episodes_of_every_evaluation_in_one_table(tmp_path) -> None:
    train(tiny(f"run.dir={tmp_path}", "run.num_iterations=2", "eval.num_episodes=3"))
    assert [(row["iteration"], row["seed"]) for row in rows_of(tmp_path)] == [
        (step, str(seed)) for step in "02" for seed in range(9000, 9003)
    ]


def test_sampled_outcomes_are_reported_where_they_differ_from_greedy_ones(tmp_path, capsys) -> None:
    folder, episodes = clone(tiny()), ["eval.num_episodes=16", "eval.num_envs=8", "eval.sampled_episodes=12"]
    greedy = evaluate(tmp_path / "greedy", f"checkpoint={folder}", *episodes[:2])
    both = evaluate(tmp_path / "both", f"checkpoint={folder}", *episodes)
    assert both["episodes"] == greedy["episodes"]
    assert both["sampled"]["num_episodes"] == 12
    assert "sampled" not in greedy
    low, high = both["sampled"]["success_once_difference_interval"]
    assert low <= both["sampled"]["success_once_difference"] <= high
    assert ("; sampled success_once" in capsys.readouterr().out) == (low > 0 or high < 0)
