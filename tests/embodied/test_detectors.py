"""Each detector catches the fault that is planted for it, and is silent without."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from runs import clone, tiny, train

from envs.episodes import EpisodeEnv
from envs.point_reach import PointSimulator
from policies.tiny_vla import TinyVLA
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.embodied.detectors import Watch, WatchedEpisode, seeds_of_training, warnings
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.embodied.outcome import EvaluationResult, mostly_unsolved
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.envs import ChunkResult, EpisodeEnd, Observation
from rlinf_embodied.interfaces.policies import PolicyOutput
from tests.observations import env_spec, observed

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
    "the next row's image": (
        PointSimulator,
        "images",
        lambda self, rows, see=PointSimulator.images: see(self, [(row + 1) % self.num_rows for row in rows]),
        "1 of 16 episodes begin with other images in another row: rows may show another row's",
    ),
    "images in the order of the rows that are drawn": (
        *(PointSimulator, "images", lambda self, rows, see=PointSimulator.images: see(self, range(len(rows)))),
        "7 of 16 episodes begin with other images in another row",
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


@pytest.mark.parametrize("turn", [0, 1])
def test_instructions_of_other_tasks_are_warned_of(turn: int, tmp_path, monkeypatch) -> None:
    """Each row gets the next row's instruction (turn=1), or all get the first row's."""
    env = ["policy=random", "env=libero", "env.options.adapter=libero_stand_in.TwoAlike", "env.obs_size=4"]
    warned = lambda name, *more: evaluate(tmp_path / name, *env, "env.horizon=8", *more)["warnings"]  # noqa: E731
    assert not any("instruction" in text for text in warned("right")), "tasks 0 and 1 have one instruction"
    right = EpisodeEnv._instructions
    wrong = lambda self, rows: right(self, [(row + 1) % len(rows) if turn else 0 for row in rows])  # noqa: E731
    monkeypatch.setattr(EpisodeEnv, "_instructions", wrong)
    text = "episodes have an instruction that is not their task's: rows may get another row's"
    assert any(text in found for found in warned("wrong"))
    assert not any(text in found for found in warned("paraphrased", "env.perturb.instruction=true"))


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


def test_seeds_of_checks_of_the_choice_and_of_demonstrations_are_known(tmp_path) -> None:
    evaluation = {"every": 1, "seed": 9000, "num_episodes": 2, "check_seed": 50, "check_episodes": 1}
    (tmp_path / "a.json").write_text(json.dumps({"episodes": [{"episode_seed": 5}, {}]}))
    for folder, until, expected in (
        ("best/step_2", None, {"the choice of this checkpoint": {9000, 9001}, "demonstrations": {5}}),
        ("step_4", None, {"demonstrations": {5}}),
        ("step_4", 0.9, {"checks": {50}, "demonstrations": {5}}),
    ):
        config = {"run": {"until_success": until}, "eval": evaluation, "data": f"{tmp_path}/a.h5"}
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "state.json").write_text(json.dumps({"config": yaml.safe_dump(config)}))
        assert seeds_of_training(tmp_path / folder) == expected


# ------------------------------------------------------------------------------------------------- what is computed
def after(state: list[float], success: list[bool], given: Observation | None = None) -> ChunkResult:
    """Returns the result of chunks of two actions, of which the first is executed."""
    no, valid = torch.zeros(2, 2, dtype=torch.bool), torch.tensor([[True, False]] * 2)
    shown = observed(torch.tensor(state)[:, None], ("go", "stay")) if given is None else given
    return ChunkResult(no.float(), no, no, valid, torch.tensor(success)[:, None] & valid, None, (), None, shown)


def ended(row: int, seed: int) -> EpisodeEnd:
    return EpisodeEnd(row, seed, {})


def test_a_watch_notes_success_motion_and_the_actions_that_were_executed() -> None:
    watch = Watch(observed(torch.zeros(2, 1), ("go", "stay")), None)
    for state, solved, action in (([1.0, 0.0], False, 1.0), ([2.0, 0.0], True, 0.5), ([2.0, 0.0], True, 0.5)):
        executed = torch.tensor([[action, -action / 2], [0.0, 0.0]])
        watch.step(torch.stack([executed, torch.full((2, 2), 9.0)], 1), after(state, [solved, False]))
    one, other = watch.episode(ended(0, 7), 4, "7.mp4"), watch.episode(ended(1, 8), 5, "")
    assert (one.first_success, one.moved, one.instruction, one.video) == (2, True, "go", "7.mp4")
    assert one.actions == pytest.approx((0.5 - 0.5, 1.0 - 0.25, 1 / 6))
    assert (other.row, other.seed, other.first_success, other.moved, other.actions) == (
        5,
        8,
        None,
        False,
        (0.0, 0.0, 0.0),
    )


def test_a_watch_tells_states_and_images_of_all_cameras_apart() -> None:
    images = torch.zeros(3, 2, 4, 4, 3, dtype=torch.uint8)  # two cameras
    images[0, 0] = 1
    watch = Watch(
        observed(torch.tensor([[0.0], [0.0], [1.0]]), ("go",) * 3, images), torch.tensor([True, False, False])
    )
    one, two, three = (watch.episode(ended(row, row), row, "") for row in range(3))
    assert one.images != two.images == three.images
    assert one.state == two.state != three.state
    assert (one.first_success, two.first_success, one.actions) == (0, None, None)
    blind = observed(torch.zeros(2, 0), ("go",) * 2)
    watch = Watch(blind, None)
    watch.step(None, after([], [False, False], blind))
    assert watch.episode(ended(0, 0), 0, "").moved, "without a state vector nobody can tell"


def shows(rows: Sequence[int]) -> Observation:
    """Returns images that differ from row to row."""
    images = torch.tensor(rows, dtype=torch.uint8)[:, None, None, None, None].expand(-1, 1, 2, 2, 3)
    return observed(torch.zeros(len(rows), 1), ("go",) * len(rows), images)


def changed(first: Sequence[int], again: Sequence[int], rows: Sequence[int]) -> list[bool]:
    watch = Watch(shows(first), None)
    watch.compare_rows(rows, shows(again))
    return [watch.episode(ended(row, row), row, "").changed for row in rows]


def test_every_wrong_assignment_of_images_to_rows_is_detected() -> None:
    starts, again = [60, 120, 180, 240], [99, 60, 120, 180]  # row 0 stays where its episode ended
    for p in itertools.product(range(4), repeat=4):
        found = changed([starts[k] for k in p], [again[k] for k in p], range(4))
        assert any(found) == (p != (0, 1, 2, 3)), p
    assert not any(changed(starts, [99, 61, 119, 181], range(4))), "renders that are not exact"
    assert not any(changed([9, 9, 9], [9, 9, 9], range(3))), "all episodes look the same"
    assert changed([60, 0, 120, 180], [0, 0, 60, 99], [0, 2, 3]) == [False, True, False], "row 1 does not run"


def watched(seed: int, actions: tuple[float, float, float]) -> WatchedEpisode:
    shown = {"instruction": "go", "state": str(seed), "images": "", "changed": False}
    noted = {"first_success": None, "moved": True, "actions": actions}
    return WatchedEpisode(row=0, seed=seed, metrics={}, **shown, **noted)


def warned(episodes: list[WatchedEpisode], categorical: bool = False) -> list[str]:
    return warnings(episodes, 0.0, env_spec("Some-v0", 1, 1, 10, 1, 1, categorical=categorical), {})


@pytest.mark.parametrize(("number", "few", "enough"), [(4, 1, 2), (200, 3, 4)])
def test_a_fault_of_few_episodes_is_not_warned_of(number: int, few: int, enough: int) -> None:
    right = [watched(k, (-0.5, 0.5, 0.1)) for k in range(number)]
    solved = [replace(episode, first_success=0) for episode in right]
    assert warned([*solved[:few], *right[few:]]) == []
    assert warned([*solved[:enough], *right[enough:]]) == [f"{enough} of {number} episodes begin solved"]


def test_numbers_of_choices_have_no_range() -> None:
    episodes = [watched(k, (1.0, 1.0, 1.0)) for k in range(4)]
    assert warned(episodes) == ["all actions of all episodes are the same"]
    assert warned(episodes, categorical=True) == []


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
    with pytest.raises(ConfigError, match=r"film_failures is True, but eval.film_seeds selects other episodes"):
        compose_evaluate([*EXPERT, "film_failures=true", "eval.film_seeds=[9003]"])


def test_a_training_has_the_episodes_of_every_evaluation_in_one_table(tmp_path) -> None:
    train(tiny(f"run.dir={tmp_path}", "run.num_iterations=2", "eval.num_episodes=3"))
    assert [(row["iteration"], row["seed"]) for row in rows_of(tmp_path)] == [
        (step, str(seed)) for step in "02" for seed in range(9000, 9003)
    ]


def test_a_training_films_the_same_seeds_before_and_after_most_of_them_unsolved_before(tmp_path) -> None:
    films = ["eval.record_video=true", "eval.video_size=32", "eval.num_videos=3", "eval.num_episodes=16"]
    for number in (1, 2):  # the second training resumes the first one
        train(tiny(f"run.dir={tmp_path}", f"run.num_iterations={number}", *films))
    rows = rows_of(tmp_path)
    of = {step: [row for row in rows if row["iteration"] == step] for step in "012"}
    solved = {row["seed"]: float(row["success_once"]) > 0 for row in of["0"]}
    kinds = [[seed for seed in solved if solved[seed] is kind] for kind in (False, True)]
    assert min(map(len, kinds)) > 2
    chosen = sorted([*kinds[0][:2], kinds[1][0]])
    for step in of:
        filmed = [row for row in of[step] if row["video"]]
        assert [row["seed"] for row in filmed] == chosen, step
        for row in filmed:
            name = f"seed={row['seed']}--success={int(float(row['success_once']) > 0)}.mp4"
            assert row["video"].endswith(name)
            assert (tmp_path / "videos" / row["video"]).exists()
        assert len(list((tmp_path / f"videos/step_{step}").glob("*.mp4"))) == 3


@pytest.mark.parametrize(
    ("solved", "chosen"), [("0110100", [0, 3, 5, 6, 1, 2]), ("1111011", [4, 0, 1, 2, 3, 5]), ("0000", [0, 1, 2, 3])]
)
def test_films_are_of_four_failures_and_two_successes_or_more_where_one_kind_is_rare(solved: str, chosen) -> None:
    episodes = [EpisodeEnd(k, k, {"success_once": float(kind)}) for k, kind in enumerate(solved)]
    assert mostly_unsolved(episodes, 6) == chosen


def test_sampled_outcomes_are_reported_where_they_differ_from_greedy_ones(tmp_path, capsys) -> None:
    folder, episodes = clone(tiny()), ["eval.num_episodes=16", "eval.num_envs=8"]
    greedy = evaluate(tmp_path / "greedy", f"checkpoint={folder}", *episodes, "eval.sampled_episodes=0")
    both = evaluate(tmp_path / "both", f"checkpoint={folder}", *episodes, "eval.sampled_episodes=12")
    assert both["episodes"] == greedy["episodes"]
    assert both["sampled"]["num_episodes"] == 12
    assert "sampled" not in greedy
    low, high = both["sampled"]["success_once_difference_interval"]
    assert low <= both["sampled"]["success_once_difference"] <= high
    assert ("; sampled success_once" in capsys.readouterr().out) == (low > 0 or high < 0)


def test_the_last_evaluation_of_a_training_and_of_a_checkpoint_sample_some_episodes_by_default(tmp_path) -> None:
    summary = train(tiny(f"run.dir={tmp_path}/run", "run.num_iterations=1", "eval.num_episodes=3"))
    assert ("sampled" in summary["before"], summary["after"]["sampled"]["num_episodes"]) == (False, 3)
    start, few = f"checkpoint={tmp_path}/run/checkpoints/latest", ["eval.num_episodes=5"]
    assert evaluate(tmp_path / "one", start, *few)["sampled"]["num_episodes"] == 5
    assert "sampled" not in evaluate(tmp_path / "expert", *EXPERT, *few)
    evaluate_command(compose_evaluate([*few, "cluster=serial", f"run.dir={tmp_path}", "perturb.noise=0.1", start]))
    assert "sampled" not in json.loads((tmp_path / "a/eval_info.json").read_text())


def test_sampled_returns_are_reported_where_they_differ_and_a_task_has_no_success() -> None:
    def episodes(lowest: float) -> tuple[WatchedEpisode, ...]:
        return tuple(replace(watched(k, (0.0, 0.0, 0.0)), metrics={"return": lowest + k}) for k in range(4))

    result = EvaluationResult(None, None, 1.5, 8.0, episodes(0.0), sampled=episodes(-9.0))
    assert str(result).endswith("; sampled return -7.5 [-8.8, -6.2] of 4 episodes")
    assert str(replace(result, sampled=episodes(0.0))) == "return 1.5 [0.2, 2.8] of 4 episodes"
