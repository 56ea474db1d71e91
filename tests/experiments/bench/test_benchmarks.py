"""Every benchmark is a command that refuses wrong words, and each of its arms does the work that it is measured by."""

from __future__ import annotations

import csv
import importlib
import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import REPOSITORY
from stable_baselines3 import PPO, SAC

import experiments.bench
from experiments.bench import latency, sb3, sb3_curves
from experiments.bench.control import __main__ as control
from experiments.bench.control.cases import CASES, words_of
from experiments.bench.driver import __main__ as driver
from experiments.bench.harness import Benchmark, Run, processes
from experiments.bench.harness.curves import draw_panels
from experiments.bench.recipe import __main__ as bench_recipe
from experiments.bench.recipe.__main__ import commands, with_demos
from experiments.bench.recipe.outcomes import Outcome
from experiments.bench.rollout import parts
from policies.actor_critic import ActorCriticOptions
from policies.soft_actor import SoftActorOptions
from rlinf_embodied import train
from rlinf_embodied.algorithms.transitions import ReplayConfig
from rlinf_embodied.compose import compose, compose_train
from rlinf_embodied.config import ExportConfig
from rlinf_embodied.errors import ConfigError

FOLDER = Path(str(experiments.bench.__file__)).parent
MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__main__")
    for path in FOLDER.rglob("*.py")
    if "BENCHMARK = Benchmark(" in path.read_text(encoding="utf-8")
)


def benchmark(name: str) -> Benchmark:
    path = FOLDER.joinpath(*name.split("."))
    module = f"experiments.bench.{name}" + (".__main__" if path.is_dir() else "")
    return importlib.import_module(module).BENCHMARK


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_has_the_name_of_its_module_and_refuses_unknown_words(name: str, capsys) -> None:
    found = benchmark(name)
    assert found.name == name
    assert found.options() is not None
    if not found.takes_overrides:
        with pytest.raises(SystemExit, match="2"):
            found.main(["nonsense=1"])
        assert capsys.readouterr().err.startswith("error: nonsense")


@pytest.mark.ray
def test_every_call_of_an_iteration_is_counted(ray_cluster) -> None:
    found = driver.measure_one(2, driver.Options(iterations=1, chunk_steps=3))
    sides, shards = 2, 2
    assert found.calls == shards * (1 + sides) + 1 + 2  # open and close; the steps, which are relayed; training on both
    assert found.driver_s.count == 1
    assert found.driver_s.low > 0


@pytest.mark.parametrize("workers", ["3", "0", "many"])
def test_workers_are_even_numbers(workers) -> None:
    with pytest.raises(ConfigError, match=r"workers is .*a list of even numbers"):
        driver.measure(Run(driver.Options(workers=workers), [], {}))


@pytest.mark.parametrize("recipe", [*bench_recipe.RECIPES, *bench_recipe.TAUGHT])
def test_every_recipe_is_a_config(recipe: str, tmp_path: Path) -> None:
    *before, last = commands(recipe, 7, tmp_path, 30, None, ["run.num_iterations=2"])
    config = compose_train([word for word in last if "=" in word])
    assert (config.run.seed, config.eval.num_episodes, config.run.num_iterations) == (7, 30, 2)
    if before:
        teacher, recorded = ([word for word in words if "=" in word] for words in before)
        assert not compose_train(teacher).env.cameras
        assert compose(ExportConfig, recorded).env.options == config.env.options


def test_a_chunk_for_every_env_step_is_imitated_as_often_and_executed_as_usual(tmp_path: Path) -> None:
    learner, evaluated = commands("frames", 7, tmp_path, 30, None, with_demos(240, 5))
    learns, plays = (compose_train([word for word in words if "=" in word]) for words in (learner, evaluated))
    usual = compose_train([*bench_recipe.RECIPES["clone"], *with_demos(240)])
    assert (learns.env.executed, plays.env.executed, plays.eval.num_episodes) == (1, usual.env.executed, 30)
    assert abs(learns.warm_start.head_epochs * learns.env.chunk - usual.warm_start.head_epochs) <= 2  # rounded
    assert plays.warm_start.checkpoint == f"{learns.run.dir}/checkpoints/latest"


def test_the_first_recipe_is_the_demos(tmp_path: Path) -> None:
    lines = (REPOSITORY / "Makefile").read_text().splitlines()
    (line,) = [line for line in lines if "train_vla.py" in line]
    for word in bench_recipe.RECIPES["pick"]:
        assert f" {word} " in line


def test_runs_side_by_side_get_cores_that_this_process_may_use(tmp_path: Path, monkeypatch) -> None:
    started = []

    class Ended:
        """Stands for a command that has ended."""

        def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
            started.append(command)

        def wait(self) -> float:
            return 60.0

        def stop(self) -> None: ...

    monkeypatch.setattr(bench_recipe, "Child", Ended)
    monkeypatch.setattr(bench_recipe, "outcome_of", lambda folder, seed, core_min: Outcome(seed, 240, core_min, {}))
    monkeypatch.setattr(bench_recipe, "cells", lambda outcome: [])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 7})
    bench_recipe.run_all(bench_recipe.Options(seeds="1-2", keep=str(tmp_path)), [], lambda outcomes: None)
    assert [command[:3] for command in started] == [["taskset", "-c", "4"], ["taskset", "-c", "7"]]


SMALL = [
    "env.num_envs=8",
    "env.block_size=2",
    "env.obs_size=16",
    "env.horizon=10",
    "policy.options.hidden_size=32",
    "policy.options.num_layers=1",
    "policy.options.num_heads=2",
    "policy.options.stem_width=16",
    "policy.options.keypoints=4",
    "policy.options.num_bins=9",
    "policy.options.critic_hidden_size=16",
]


@pytest.mark.sim
@pytest.mark.slow
def test_stock_env_and_rollout_do_the_same_work(tmp_path):
    from envs.maniskill import make_env
    from policies.tiny_vla import TinyVLA
    from rlinf_embodied.embodied.policy_folder import save_policy

    config = parts.bench_config(compose_train(SMALL), chunk_steps=3)  # a horizon of two chunks: every row is reset once
    env = make_env(config.env, 1)
    save_policy(TinyVLA(config.policy, env.spec, seed=0), tmp_path, config.env, config.policy)
    env.close()
    bench = parts.Bench(config, str(tmp_path), worker=0, num_workers=2, stock_steps=3)
    assert {getattr(bench, name)().count for name in ("rollout", "env")} == {4 * 3 * 5}
    assert bench.stock().count == 3


def test_our_settings_are_sb3s_defaults() -> None:
    theirs = {name: p.default for name, p in inspect.signature(PPO.__init__).parameters.items()}
    config = compose_train(sb3.our_words("mujoco", sb3.CASES["mujoco"], compile=True))
    ours = config.algorithm
    steps = config.env.num_envs * config.env.chunks_per_rollout
    assert theirs["n_steps"] == sb3.CASES["mujoco"].steps == steps
    assert theirs["batch_size"] == sb3.MINIBATCH == steps // ours.num_minibatches
    assert theirs["n_epochs"] == ours.epochs
    assert ours.one_optimizer
    assert (theirs["learning_rate"], theirs["max_grad_norm"]) == (ours.lr, ours.max_grad_norm)
    assert (theirs["gamma"], theirs["gae_lambda"], theirs["clip_range"]) == (ours.gamma, ours.gae_lambda, ours.clip_low)
    assert (theirs["ent_coef"], theirs["target_kl"]) == (ours.entropy_coef, ours.target_kl)
    assert (ours.lr_end_fraction, ours.clip_high, config.env.chunk) == (1.0, ours.clip_low, 1)
    assert (ActorCriticOptions().hidden_size, ActorCriticOptions().num_layers) == (64, 2)  # SB3's MlpPolicy


def test_our_sac_has_sb3s_defaults() -> None:
    theirs = {name: p.default for name, p in inspect.signature(SAC.__init__).parameters.items()}
    config = compose_train(sb3.our_words("sac", sb3.CASES["sac"], compile=True))
    ours = config.algorithm
    assert (theirs["batch_size"], theirs["tau"], theirs["gamma"]) == (ours.batch_size, ours.tau, ours.gamma)
    assert theirs["learning_rate"] == ours.lr == ours.value_lr
    assert ours.schedule(config.env).updates == sb3.CASES["sac"].steps
    assert ours.schedule(config.env).first_update == sb3.WARM_UP
    assert (ours.critic_hidden_size, ours.critic_layers, SoftActorOptions().hidden_size) == (256, 2, 256)


def test_both_arms_of_mujoco_do_all_of_the_work(monkeypatch, tmp_path, capsys) -> None:
    short = replace(sb3.CASES["mujoco"], task="Pendulum-v1", num_envs=2, steps=128)
    monkeypatch.setitem(sb3.CASES, "mujoco", short)
    out = tmp_path / "sb3.json"
    # not compiled: array types are checked
    options = sb3.Options(cases="mujoco", rounds=2, iterations=1, compile=False, out=str(out))
    sb3.measure(Run(options, [], {}))
    speed = json.loads(out.read_text())["env_steps_per_s"]["mujoco"]
    assert set(speed) == {"ours", "sb3"}
    assert all(spread["count"] == 2 and spread["low"] > 0 for spread in speed.values())
    printed = capsys.readouterr().out
    assert "mujoco: Pendulum-v1, 2 rows" in printed
    assert "mujoco: ours / sb3" in printed


def test_curves_of_both_arms_are_returns_of_the_same_episodes(monkeypatch, tmp_path) -> None:
    short = replace(sb3.CASES["mujoco"], task="Pendulum-v1", num_envs=2, steps=64)
    monkeypatch.setitem(sb3_curves.CASES, "mujoco", short)
    monkeypatch.setattr(sb3_curves, "ENV_STEPS", {"mujoco": 128})
    monkeypatch.setattr(sb3_curves, "POINTS", 2)
    monkeypatch.setattr(sb3_curves, "our_words", lambda name, case, compile: sb3.our_words(name, case, False))
    options = sb3_curves.Options(seeds="3", folder=str(tmp_path / "runs"), out=str(tmp_path / "curves"))
    sb3_curves.measure(Run(options, [], {"benchmark": "sb3_curves"}))
    (ours,), (peer,) = json.loads((tmp_path / "curves.json").read_text())["returns"]["mujoco"].values()
    assert [step for step, _ in ours] == [step for step, _ in peer] == [0, 64, 128]
    assert all(-2000 < value < -100 for _, value in [*ours, *peer])  # of 200 steps
    seeds = {row["seed"] for row in csv.DictReader((tmp_path / "runs/mujoco_3/episodes.csv").open())}
    assert seeds == {str(sb3_curves.FIRST + k) for k in range(sb3_curves.EPISODES)}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_a_training_that_composes(tmp_path, name) -> None:
    case, config = CASES[name], compose_train(words_of(name, 7, tmp_path, []))
    if not isinstance(config.algorithm, ReplayConfig):
        assert config.hierarchy.on == bool(case.source)
        assert config.warm_start.checkpoint == (
            f"{tmp_path}/{case.source}/seed_7/checkpoints/latest" if case.source else None
        )
        return
    assert config.algorithm.acts == (case.unit == "env steps")
    learns = config.run.num_iterations > config.algorithm.typical_iteration(config.env)
    assert learns or (config.run.num_iterations == 0 and config.warm_start.checkpoint)


def test_a_case_is_trained_once_with_what_it_begins_with_and_its_settings_stay(tmp_path, monkeypatch) -> None:
    trained = []

    class Trained:
        """Stands for a training: writes the files of its run."""

        def __init__(self, name: str, command: list[str], log: Path) -> None:
            trained.append((name, command[2:]))
            seed = int(name[-1])
            summary = {"iterations": 2, "rl_s": 3.0}
            for key, score in (("before", 1.0 * seed), ("after", 5.0 * seed)):
                summary[key] = {"return": score, "return_interval": [0.0, score]}
            rows = [{"iteration": 1, "global_step": 5, "eval/return": 3.0}, {"iteration": 2, "global_step": 10}]
            (log.parent / "config.yaml").write_text("{}")
            (log.parent / "manifest.json").write_text(json.dumps({"command": command[1:]}))
            (log.parent / "summary.json").write_text(json.dumps(summary))
            (log.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        def wait(self) -> None:
            """Has ended."""

    monkeypatch.setattr(processes, "Child", Trained)
    runs = [control.trained("iql", seed, tmp_path, []) for seed in (1, 2)]
    assert [name for name, _ in trained] == ["sac, seed 1", "iql, seed 1", "sac, seed 2", "iql, seed 2"]
    assert f"data={tmp_path}/sac/seed_2/checkpoints/latest" in trained[-1][1]
    assert "eval.every=1" in trained[-1][1]
    control.trained("sac", 3, tmp_path, [], points=2)
    assert "eval.every=45" in trained.pop()[1]
    assert list(control.curve(runs[0])) == [(0, 1), (5, 3), (10, 5)]
    assert [control.trained("iql", seed, tmp_path, []) for seed in (1, 2)] == runs
    assert len(trained) == 4
    numbers = ("1.5", "5.0", "7.5", "10.0", "7.5 [5, 10]")
    assert control.row("iql", runs, "return") == ("iql", "10 updates", "return", *numbers, "-", "3")
    draw_panels([control.panel_of("iql", runs)], str(tmp_path / "curve"))
    assert (tmp_path / "curve.png").stat().st_size > 0
    with pytest.raises(ConfigError, match=r"sac/seed_1 holds a training with other settings: use another folder="):
        control.trained("iql", 1, tmp_path, ["run.num_iterations=2"])


def test_both_kinds_of_chunks_are_evaluated_on_the_same_episodes_at_each_delay(tmp_path, monkeypatch) -> None:
    short = ["warm_start.num_demos=8", "warm_start.epochs=1", "warm_start.head_epochs=0", "eval.num_episodes=4"]
    monkeypatch.setattr(latency, "trained_run", lambda name, folder, words: train(compose_train(words)))
    asked = latency.Options(
        tasks="point_reach",
        seeds="7",
        kinds="inference_delay",
        delays="2",
        episodes=4,
        folder=str(tmp_path),
        out=str(tmp_path / "curve.json"),
    )
    latency.measure(Run(asked, [*SMALL, *short, f"warm_start.cache_dir={tmp_path}"], {}))
    found = {}
    for path in tmp_path.glob("point_reach/seed_7/latency/*/eval_info.json"):
        info = json.loads(path.read_text())
        assert info["env"]["perturb"]["inference_delay"] == 2
        found[info["env"]["rtc"]] = [episode["success_once"] for episode in info["episodes"]]
    assert set(found) == {"off", "linear"}
    (curve,) = json.loads((tmp_path / "curve.json").read_text())["curves"]
    assert (curve["kind"], curve["delay"]) == ("inference_delay", 2)
    assert curve["linear"][0]["success_once"] == sum(found["linear"]) / 4
    assert (tmp_path / "curve.png").stat().st_size > 0
