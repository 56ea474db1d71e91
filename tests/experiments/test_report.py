"""The page of a run: what it says of finished, running and stopped runs, alone and side by side; runs of seeds."""

from __future__ import annotations

import json
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.report import Options, report
from rlinf_embodied.compose import compose, compose_math, compose_train, to_yaml
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.page import _SCRIPT, page
from rlinf_embodied.reporting.sections import by_configuration, outcome, over_seeds, settings, videos
from rlinf_embodied.reporting.seeds import run_seeds
from rlinf_embodied.telemetry.metrics import iqm, iqm_interval
from rlinf_embodied.telemetry.plots import kept_moment, rate_lines, seeds_line
from rlinf_embodied.telemetry.run_reader import pooled, read_run

VOID = {"meta", "br", "img", "link", "input", "hr"}


def evaluated(share: float, number: int = 200) -> dict:
    interval = [share - 0.05, share + 0.05]
    found = {"success_once": share, "success_once_interval": interval, "num_episodes": number}
    return found | {"success_at_end": share - 0.1, "success_at_end_interval": interval, "return": 7.5}


def metric_row(iteration: int, share: float) -> dict:
    row = {"iteration": iteration, "global_step": 1000 * iteration, "rollout/success_once": share}
    row |= {
        "system/cpu": 0.9,
        "system/memory": 0.4,
        "rollout/episodes": 50.0,
        "losses/approx_kl": 0.01,
        "charts/SPS": 250.0,
    }
    return row | {"time/iteration_s": 10.0, "time/env_s": 6.0, "time/actor_s": 4.0}


def started(folder: Path, *overrides: str) -> Path:
    """Writes what a run folder holds after two iterations."""
    folder.mkdir(parents=True)
    config = compose_train([f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text(to_yaml(config))
    hardware = {
        "cluster": "local",
        "devices": 2,
        "kind": "cpu",
        "cores": 2,
        "memory_bytes": 8e9,
        "description": "2 cores",
    }
    manifest = {"versions": {"torch": "2.14.1"}, "seed": 3, "git_revision": "abc", "hardware": hardware}
    manifest |= {"command": ["experiments/train_vla.py", *overrides], "pinned": {"libc": "glibc 2.36"}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    plan = {"name": "collocated", "num_devices": 2, "items": ["env+policy on all"]}
    (folder / "plan.json").write_text(json.dumps(plan))
    rows = [metric_row(1, 0.2), metric_row(2, 0.6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def finished(folder: Path, after: float = 0.9, *overrides: str) -> Path:
    started(folder, *overrides)
    summary = {"iterations": 2, "before": evaluated(0.5), "after": evaluated(after), "rl_s": 20.0}
    summary |= {"measured_s_per_iteration": 10.0, "weights_sha256": "beef", "startup_s": {"warm start": 7.25}}
    (folder / "summary.json").write_text(json.dumps(summary))
    period = {"plan": "collocated", "first_iteration": 0, "num_iterations": 2, "predicted_s": {"iteration": 9.0}}
    period |= {"measured_s": {"iteration": 10.0, "env": 6.0}, "error": {"iteration": -0.1}}
    (folder / "plan_report.json").write_text(json.dumps({"periods": [period], "ranked": []}))
    return folder


class Checked(HTMLParser):
    """Takes a page apart: fails on a tag that is closed out of order, and keeps texts, tags and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str | None] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


# ---------------------------------------------------------------------------------------------------------------- a run
def test_the_page_of_a_run_begins_with_its_outcome(tmp_path: Path) -> None:
    text = Checked(page([read_run(finished(tmp_path / "seed3"))], 0)).text
    body = text[text.index("Outcome") :]
    assert body.startswith("Outcome Finished after 2 iterations. Weights: of iteration 2 (the last). metric")
    assert "success_once 50.0 % [45.0, 55.0] of 200 90.0 % [85.0, 95.0] of 200" in body
    assert "10.00 s per iteration, 0.3 minutes of training, weights beef" in body
    order = ("Outcome", "Configuration", "Plan", "Learning curves", "System load", "Videos")
    places = [body.index(name) for name in (*order, "Evaluations", "Versions and hardware")]
    assert places == sorted(places)
    assert "2 from 1 on iteration 9 10 -10.0%" in body
    assert "torch 2.14.1" in body


def test_the_page_needs_nothing_from_elsewhere_and_its_tags_close(tmp_path: Path) -> None:
    odd = finished(tmp_path / "<b>odd & 'run'")
    checked = Checked(page([read_run(odd)], 0))
    assert "<b>odd & 'run'" in checked.text
    assert not {"link", "iframe", "img"} & set(checked.tags)
    assert "//" not in _SCRIPT.replace("  // ", "")
    assert [address for address in checked.addresses if not address.startswith(("data:", "#"))] == []
    assert checked.tags.count("svg") == 3


def test_what_differs_from_the_defaults_is_listed(tmp_path: Path) -> None:
    run = read_run(finished(tmp_path / "run", 0.9, "algorithm.gamma=0.5", "env.num_envs=32"))
    text = Checked(settings(run)).text
    assert "algorithm.gamma 0.5 0.99" in text
    assert "env.num_envs 32 64" in text
    assert "algorithm.gae_lambda" not in text
    assert "3 of " in text, "run.dir is the third"


def test_a_run_of_language_models_has_its_own_defaults_and_metric(tmp_path: Path) -> None:
    folder = started(tmp_path / "math")
    (folder / "config.yaml").write_text(to_yaml(compose_math(["run.seed=4"])))
    row = {"iteration": 1, "global_step": 640, "rollout/accuracy": 0.25, "rollout/completions": 64.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row | {"charts/tokens_per_s": 9.0}) + "\n")
    run = read_run(folder)
    group = run.config["algorithm"]["group_size"]
    assert group > 1
    assert run.rates == ["accuracy"]
    assert run.unit == "tokens"
    assert pooled(run, "accuracy") == [(640.0, 0.25, 64 / group)]
    text = Checked(page([run], 0)).text
    assert "run.seed 4 0" in text
    assert "accuracy - 25.0 % in the last iterations (sampled)" in text


# ------------------------------------------------------------------------------------------------ not finished, damaged
def test_a_run_that_continues_says_what_is_not_there_yet(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    run = read_run(folder)
    text = Checked(page([run], 0)).text
    assert not run.finished
    assert "Not finished: 2 iterations." in text
    assert "Missing: plan_report.json, summary.json in the run folder" in text
    assert "Missing: measured iterations in plan_report.json" in text
    assert "no videos" in text
    assert "40.0 % in the last iterations (sampled)" in text


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    (folder / "plan.json").write_text('{"name": ')
    (folder / "config.yaml").write_text("env: [1")
    text = Checked(page([read_run(folder)], 0)).text
    assert "Missing: config.yaml (" in text
    assert ", plan.json (" in text
    assert "Missing: plan.json: no plan was chosen yet" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.dir is '.*', but it holds neither config.yaml nor metrics.jsonl: give"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match=r"run.dir is '.*nowhere', but it does not exist: give"):
        read_run(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------- several runs, videos
def test_several_runs_are_compared_first(tmp_path: Path) -> None:
    folders = [finished(tmp_path / "a", 0.6), finished(tmp_path / "b", 0.9, "run.seed=7"), started(tmp_path / "c")]
    checked = Checked(page([read_run(folder) for folder in folders], 0))
    text = checked.text
    assert "a finished 2 50.0 % [45.0, 55.0] of 200 60.0 % [55.0, 65.0] of 200" in text
    assert "c unfinished 2 - 40.0 % in the last iterations (sampled)" in text
    assert "Settings that differ key a b c run.seed 0 7 0" in text
    assert text.index("Settings that differ") < text.index("Configuration")
    assert [address for address in checked.addresses if address.startswith("#run")] == ["#run-0", "#run-1", "#run-2"]


def test_episodes_are_listed_failures_first_with_their_videos(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    film = folder / "videos/step_2/pick--seed=8--success=0.mp4"
    film.parent.mkdir(parents=True)
    film.write_bytes(b"film")
    names, lines = "iteration,seed,instruction,success_once,return,video", ["0,7,pick,1.0,9.0,", "1,7,pick,1.0,9.5,"]
    lines += [f"2,{seed},pick,{once},{10 - seed}.125,{name}" for seed, once, name in (
        (7, 1.0, ""), (8, 0.0, f"{film.parent.name}/{film.name}"), (9, 0.0, "step_2/lost.mp4"))]  # fmt: skip
    (folder / "episodes.csv").write_text("\n".join([names, *lines, "2,1"]))  # the last line is half written
    checked = Checked(page([read_run(folder)], 1000))
    rows = "2 9 pick 0.0 1.125 2 8 pick 0.0 2.125 video 2 7 pick 1.0 3.125 0 7 pick 1.0 9"
    assert f"seed instruction success_once return video {rows}" in checked.text
    (link,) = [address for address in checked.addresses if address.startswith("#run/")]
    assert link[1:] in checked.ids


def test_sampled_actions_of_the_last_evaluation_have_a_row(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary["after"]["sampled"] = {"num_episodes": 64, "success_once": 0.8, "success_once_interval": [0.7, 0.9]}
    summary["after"]["sampled"] |= {"success_once_difference": -0.1, "success_once_difference_interval": [-0.2, 0.0]}
    (folder / "summary.json").write_text(json.dumps(summary))
    row = "80.0 % [70.0, 90.0] of 64, -10 points [-20, +0] compared with greedy actions"
    assert f"success_once with sampled actions - {row}" in Checked(page([read_run(folder)], 0)).text


def test_videos_are_inlined_up_to_a_size_and_the_rest_is_named(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    for step in (0, 1, 2):
        (folder / f"videos/step_{step}").mkdir(parents=True)
        for seed, success in ((9000, 1), (9001, int(step > 0))):
            file = folder / f"videos/step_{step}/PickCube-v1--seed={seed}--success={success}.mp4"
            file.write_bytes(b"0" * 3000)  # 4000 letters as base64
    np.savez(file.with_suffix(".npz"), actions=np.zeros((4, 2)), state=np.ones((2, 3)), step=np.array([0, 2]))
    found = Checked(videos(read_run(folder), 13_000))
    assert found.tags.count("video") == 3
    assert found.tags.count("svg") == 2  # actions and states of that one episode
    shown = [text for text in found.texts if "PickCube" in text]
    name = "PickCube-v1--seed=900{}--success={}"
    assert shown[:3] == [
        f"before: {name}".format(1, 0),
        f"after: {name}".format(1, 1),
        f"iteration 1: {name}".format(0, 1),
    ]
    assert f"Missing: 3 videos beyond videos_mb: step_0/{name}.mp4, step_2/{name}.mp4".format(0, 1, 0, 1) in shown[3]
    assert Checked(videos(read_run(folder), 0)).tags.count("video") == 0


# ---------------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "run.dir is not given, .* give run.dir=<run folder>"),
        (["runs=a,b"], "out is not given, .* give out=<file>.html"),
        (["rundir=a"], "rundir is unknown"),
        (["run.dir=a", "videos_mb=many"], "videos_mb is 'many', but it must be float"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        report(compose(Options, words))


def test_the_page_is_written_beside_the_run(tmp_path: Path, capsys) -> None:
    folder = finished(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    report(compose(Options, [f"run.dir={folder}"]))
    assert {path.name for path in folder.iterdir()} - before == {"report.html"}
    assert capsys.readouterr().out.startswith(f"{folder}/report.html (0.")
    report(compose(Options, [f"runs={folder},{folder}", f"out={tmp_path}/both.html", "videos_mb=0"]))
    assert "2 runs compared" in (tmp_path / "both.html").read_text()
    with pytest.raises(ConfigError, match=r"out is '.*', but it cannot be written .* elsewhere"):
        report(compose(Options, [f"run.dir={folder}", f"out={folder}/config.yaml/page.html"]))


def test_a_return_is_no_percentage_and_has_one_row(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    for when, value in (("before", -54.5), ("after", 3224.8)):
        summary[when] = {"return": value, "return_interval": [value - 1, value + 1], "num_episodes": 20}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("rollout/success_once", None)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    marks = rate_lines(run, "return", "#000000")[1]
    assert [y for _, y in marks.points] == [-54.5, 3224.8]  # not in per cent
    text = Checked(outcome(run)).text
    assert "%" not in text.replace("95 %", "")
    assert text.count("-54.5 [-55.5, -53.5] of 20") == 1
    assert "3225 [3224, 3226] of 20" in text


def test_checks_that_ended_early_are_bounds_and_the_kept_weights_are_named(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"weights_of_iteration": 1}))
    rows = [metric_row(1, 0.2) | {"check/success_at_end": 0.75}, metric_row(2, 0.6)]
    rows = [{"iteration": 0, "global_step": 0, "check/success_at_end": 0.5}, *rows]
    rows[-1]["check/success_at_end_at_most"] = 0.74
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    _, held_out, checks, bounds = rate_lines(run, "success_at_end", "#000000")
    assert [x for x, _ in held_out.points] == [0, 1000]  # the evaluation after is of the weights of iteration 1
    assert (checks.points, bounds.points) == ([(0, 50), (1000, 75)], [(2000, 74)])
    assert kept_moment(run) == (1000, "kept weights: of iteration 1 (the best check; the run had 2)")
    text = Checked(page([run], 0)).text
    assert "Finished after 2 iterations. Weights: of iteration 1 (the best check; the run had 2)." in text
    assert "check 0 - 50.0 % - check 1 - 75.0 % - check 2 - at most 74.0 % - after 1" in text


def test_seeds_of_one_configuration_are_summarised_together(tmp_path: Path) -> None:
    assert iqm([0.0, 1.0, 2.0, 9.0]) == 1.5  # without the lowest and the highest
    assert iqm_interval([0.5] * 4) == (0.5, 0.5)
    folders = [finished(tmp_path / f"s{k}", 0.5 + k / 10, f"run.seed={k}") for k in range(4)]
    other = finished(tmp_path / "other", 0.9, "algorithm.lr=1e-5")
    runs = [read_run(folder) for folder in (*folders, other)]
    assert [len(group) for group in by_configuration(runs)] == [4, 1]
    line = seeds_line(runs[:4], "success_once", "#000000")
    assert list(line.points) == [(1000, pytest.approx(20)), (2000, pytest.approx(40))]
    text = Checked(page(runs, 0)).text
    assert "Over seeds runs of one configuration seeds" in text
    assert "s0, s1, s2, s3 4 65 % [" in text
    assert over_seeds(runs[4:], "success_once") == "90 %"  # one seed has no interval
    assert "other 1 90 % 90 % Intervals" in text or "other 1 90 % 80 % Intervals" in text


def test_each_seed_has_its_own_folder_and_a_failure_ends_them(monkeypatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> SimpleNamespace:
        ran.append(command[2:])
        return SimpleNamespace(returncode=3 if len(ran) == 2 else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert run_seeds(["env=point_reach", "run.seeds=0-2,7", "run.dir=r"]) == 3
    assert ran == [["env=point_reach", f"run.seed={k}", f"run.dir=r/seed_{k}"] for k in (0, 1)]


@pytest.mark.parametrize("words", [["run.seeds=0-2"], ["run.seeds=a", "run.dir=r"], ["run.seeds=1,1", "run.dir=r"]])
def test_seeds_that_cannot_be_meant_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"run\.seeds is"):
        run_seeds(words)
