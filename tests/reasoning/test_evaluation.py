"""Held-out problems: which ones, how they are answered, pass@k, and what a checkpoint's evaluation writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from math_runs import tiny_math
from model_folders import gsm8k_rows, model_folder, write_rows
from runs import clone, cluster, train

from rlinf_embodied.compose import compose_answers
from rlinf_embodied.config import MathConfig
from rlinf_embodied.data.problems import Split, split_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning.answers import majority_is_right
from rlinf_embodied.reasoning.batch import ScoredGroup
from rlinf_embodied.reasoning.evaluation import (
    GREEDY,
    AnswerEvaluation,
    AnswerResult,
    evaluate_command,
    problem_sets,
    sampled_result,
)
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.telemetry.metrics import Rate

NUMBER = 20


def evaluated(config: MathConfig, devices: int = 1, step: int = 0) -> AnswerResult:
    made = StageConfig(config, str(clone(tiny_math())))
    return AnswerEvaluation(made, SerialSession(), cluster(devices)).run(step, last=step == 7)


def settings(*overrides: str) -> MathConfig:
    return tiny_math(f"eval.num_problems={NUMBER}", "eval.num_samples=4", "eval.num_shown=20", *overrides)


@pytest.fixture(scope="module")
def plain() -> AnswerResult:
    return evaluated(settings())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of one iteration."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny_math(f"run.dir={folder}", "run.num_iterations=1", f"eval.num_problems={NUMBER}"))
    return folder


# ------------------------------------------------------------------------------------------------------------- problems
@pytest.mark.parametrize(("devices", "overrides"), [(1, ["eval.problems_per_block=20"]), (3, [])])
def test_neither_devices_nor_blocks_change_an_answer(plain, devices: int, overrides: list[str]) -> None:
    found = evaluated(settings(*overrides), devices)
    assert found.summary() == plain.summary()
    assert found.samples == plain.samples


def test_accuracy_is_that_of_the_answers_that_are_shown(plain) -> None:
    right = [a.correct for a in plain.samples]
    assert plain.accuracy == Rate(sum(right), NUMBER)
    for answer in plain.samples:  # the compact form ends with # and the answer
        assert answer.correct == (answer.completion.rpartition("#")[2] == answer.answer)
    table = plain.table().splitlines()
    assert len(table) == 2 + NUMBER
    assert table[2].endswith("| yes |" if right[0] else "| no |")


def test_samples_are_drawn_before_and_after_only() -> None:
    config = settings("eval.num_problems=8", "eval.num_samples=2")
    assert evaluated(config, step=3).sampled == {}
    assert set(evaluated(config, step=7).sampled) >= {"num_samples", "pass@1", "pass@2"}


# ----------------------------------------------------------------------------------------------------------- named sets
SETS = [
    *("eval.sets.sums={data: {level: sum1-2-9}, num_problems: 20, num_samples: 4}", "eval.num_samples=0"),
    "eval.sets.chains={data: {level: chain1-1}, greedy: true, num_problems: 5, generation: {max_new_tokens: 9}}",
]


def test_each_evaluation_answers_the_named_sets_in_their_own_way(plain) -> None:
    found = evaluated(settings(*SETS), devices=2, step=3)
    assert found.accuracy == plain.accuracy
    sums, chains = found.sets["sums"], found.sets["chains"]
    assert (sums["num_problems"], sums["num_samples"], chains["num_problems"], chains["num_samples"]) == (20, 4, 5, 1)
    assert set(sums) >= {"avg@4", "avg@4_interval", "maj@4", "pass@1", "pass@2", "pass@4", "length", "truncated"}
    assert sums["avg@4"] == pytest.approx(sums["pass@1"])
    assert chains["length"] <= 9
    metrics = found.metrics()
    assert metrics["eval/sums/maj@4"] == sums["maj@4"]
    assert "; sums: avg@4 " in str(found)
    same = evaluated(settings(*SETS, "eval.problems_per_block=20"))
    assert same.summary() == found.summary()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("data={levl: a}", r"eval\.sets\.a\.data is .*data has no levl: use some of level"),
        ("generation={top_p: 2}", r"eval\.sets\.a: generation\.top_p is 2, but it must lie in"),
        ("generation={top_p: high}", r"eval\.sets\.a: "),
    ],
)
def test_a_wrong_set_is_refused(given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        problem_sets(settings(f"eval.sets.a.{given}"), None)


def test_a_question_that_a_small_level_draws_again_counts_once() -> None:
    sets = problem_sets(settings("data.level=sum1-1-9", "eval.num_problems=200", "eval.problems_per_block=4"), None)
    asked = [problem.question for block in range(sets[GREEDY].num_blocks) for problem, _ in sets[GREEDY].block(block)]
    sums = [f"{a}{sign}{b}=" for a in range(1, 10) for sign in "+-" for b in range(1, 10) if sign == "+" or a >= b]
    assert sorted(asked) == sorted(question for question in sums if split_of(question) is Split.test)


def test_a_majority_is_of_equal_answers_and_the_first_of_equals() -> None:
    assert majority_is_right(["7", "6", "$6$", None], [False, True, True, False])
    assert not majority_is_right(["7", "6", None], [False, True, False])
    assert not majority_is_right([None, None], [False, False])


# --------------------------------------------------------------------------------------------------------------- pass@k
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    correct = [(True, False, False, True), (False,) * 4, (True, True, True, False), (True,) * 4]
    found = sampled_result([ScoredGroup(0, k, row, False, 0.0, 0, majority=k == 2) for k, row in enumerate(correct)])
    assert found["avg@4"] == pytest.approx(9 / 16)
    assert found["maj@4"] == 0.25
    low, high = found["avg@4_interval"]
    assert 0 < low < found["avg@4"] < high < 1
    for k in (1, 2, 4):
        subsets = [list(itertools.combinations(row, k)) for row in correct]
        expected = sum(sum(map(any, parts)) / len(parts) for parts in subsets) / len(correct)
        assert found[f"pass@{k}"] == pytest.approx(expected)
    assert found["num_samples"] == 4


# ---------------------------------------------------------------------------------------------------------- the command
def evaluate(folder: Path, checkpoint: Path, *overrides: str) -> dict:
    config = compose_answers([f"checkpoint={checkpoint}", "cluster=serial", f"run.dir={folder}", *overrides])
    assert config is not None
    evaluate_command(config)
    return json.loads((folder / "eval_info.json").read_text())


def test_a_checkpoint_is_evaluated_as_its_run_did_it(trained, tmp_path, capsys) -> None:
    chosen = [f"eval.num_problems={NUMBER}", "eval.num_samples=2", "run.seed=3"]
    info = evaluate(tmp_path, trained / "checkpoints/latest", *chosen)
    after = json.loads((trained / "summary.json").read_text())["after"]
    assert {key: info[key] for key in after} == after
    assert info["data"]["level"] == "sum1-2-9"
    assert info["agent"]["_target_"] is None
    out = capsys.readouterr().out
    assert f"sum1-2-9: greedy {100 * after['accuracy']:.1f} % [" in out
    assert f"of {NUMBER} problems, pass@1" in out
    assert (tmp_path / "samples.md").read_text().startswith("| problem | answer | completion | right |")


def test_an_agent_that_cannot_be_imported_is_named_before_anything_starts(tmp_path) -> None:
    model = model_folder(tmp_path / "model", "qwen2")
    with pytest.raises(ConfigError, match=r"agent\._target_ is 'no\.agent'"):
        evaluate(tmp_path / "out", model, "data.level=sum1-2-9", "agent._target_=no.agent")
    assert not (tmp_path / "out").exists()


def test_a_plain_folder_of_hugging_face_is_evaluated_on_ones_own_problems(tmp_path, capsys) -> None:
    model = model_folder(tmp_path / "model", "qwen2")
    file = write_rows(tmp_path / "mine.jsonl", gsm8k_rows(0, 60))
    config = compose_answers([f"checkpoint={model}", f"data.files.all={file}"])
    assert config is not None
    assert (config.generation.max_new_tokens, config.data.prompt_template, config.data.level) == (512, "natural", "")
    sizes = ["eval.num_problems=3", "eval.problems_per_block=2", "eval.num_samples=0", "generation.max_new_tokens=12"]
    info = evaluate(tmp_path / "out", model, f"data.files.all={file}", *sizes)
    assert info["num_problems"] == 3
    assert info["truncated"] > 0
    out = capsys.readouterr().out
    assert "How many now?" in out
    (model / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert compose_answers([f"checkpoint={model}"]) is None
