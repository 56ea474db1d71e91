"""What is done with the baseline's text, its runs and its numbers."""

from __future__ import annotations

import json

import pytest

from experiments.bench import ppo_baseline as bench
from experiments.bench.harness import command
from rlinf_embodied.errors import ConfigError, WorkerError

# The lines that the script knows, in a loop of our own that acts at random and writes what the baseline writes.
RANDOM_BASELINE = """
import argparse, time

import gymnasium as gym
import torch
from torch.utils.tensorboard import SummaryWriter

import mani_skill.envs
from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("num_envs", "num_eval_envs", "total_timesteps", "seed"):
        parser.add_argument("--" + name, type=int)
    for name in ("env_id", "exp_name", "control_mode"):
        parser.add_argument("--" + name)
    args, _ = parser.parse_known_args()
    torch.manual_seed(args.seed)
    env_kwargs = dict(obs_mode="state", render_mode="rgb_array", sim_backend="physx_cuda")
    envs = gym.make(args.env_id, num_envs=args.num_envs, control_mode=args.control_mode, **env_kwargs)
    eval_envs = gym.make(args.env_id, num_envs=args.num_eval_envs, reconfiguration_freq=1, **env_kwargs)
    envs = ManiSkillVectorEnv(envs, record_metrics=True)
    eval_envs.reset(seed=args.seed)
    writer = SummaryWriter("runs/" + args.exp_name)
    envs.reset(seed=args.seed)
    for step in range(args.num_envs, args.total_timesteps + 1, args.num_envs):
        start = time.time()
        infos = envs.step(torch.rand(envs.action_space.shape) * 2 - 1)[-1]
        if "final_info" in infos:
            for key, value in infos["final_info"]["episode"].items():
                writer.add_scalar("train/" + key, value[infos["_final_info"]].float().mean(), step)
        writer.add_scalar("time/rollout_time", time.time() - start, step)
        writer.add_scalar("time/update_time", 0.0, step)
    writer.close()
"""


def outcome(seconds: float, success: list[float]):
    curve = [(1600 * k, seconds / len(success) * k, value) for k, value in enumerate(success, 1)]
    curves = dict.fromkeys(bench.CURVES, curve)
    return bench.Outcome(seconds, seconds * 0.5, seconds * 0.4, curve[-1][0], curves)


def test_only_the_lines_of_the_env_are_replaced():
    text = bench.adapted(RANDOM_BASELINE, "vector.make")
    compile(text, "ppo.py", "exec")
    old, new = RANDOM_BASELINE.splitlines(), text.splitlines()
    added = [line for line in new if line not in old]
    assert added == [
        "import functools",
        "from envs import vector",
        "make_env = vector.make",
        '    env_kwargs = dict(obs_mode="state", render_mode="rgb_array", sim_backend="physx_cpu")',
        "    envs = make_env(args.env_id, num_envs=args.num_envs, control_mode=args.control_mode, **env_kwargs)",
        "    eval_envs = make_env(args.env_id, num_envs=args.num_eval_envs, reconfiguration_freq=1, **env_kwargs)",
    ]
    assert [line for line in old if line not in new] == [line for line in old if "gym.make(" in line or "_cuda" in line]


@pytest.mark.parametrize("line", ["import mani_skill.envs\n", 'sim_backend="physx_cuda"', "    eval_envs = gym.make("])
def test_a_baseline_without_the_known_lines_is_refused_before_anything_runs(tmp_path, line, capsys):
    other = tmp_path / "other.py"
    other.write_text(RANDOM_BASELINE.replace(line, "#"), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"known: give examples/baselines/ppo/ppo.py .* {bench.COMMIT}"):
        bench.adapted(other.read_text(encoding="utf-8"), "vector.make")
    assert bench.BENCHMARK.main([f"ppo={other}", f"folder={tmp_path / 'runs'}"]) == 2
    assert "lines like" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give ppo=<ppo.py>"),
        (["ppo=x.py", "lr=3"], "'lr=3' is no argument of ppo_baseline: use some of env_id"),
        (["ppo=nowhere.py"], "nowhere.py"),
        (["ppo=nowhere.py", "arms=gpu"], "there are batched, stock, renewed"),
        (["ppo=nowhere.py", "seed=one"], "seed=1"),
    ],
)
def test_wrong_arguments_are_answered_at_once(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(command, "use_one_thread_per_process", lambda: None)  # this process is the tests'
    assert bench.BENCHMARK.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_curves_are_averaged_over_equal_parts():
    curve = [(k, float(k), k % 2) for k in range(1, 81)]
    assert bench.averaged(curve) == [(k, float(k), 0.5) for k in range(2, 81, 2)]
    assert bench.averaged([]) == []
    assert bench.averaged(curve[:3]) == curve[:3]


def test_the_table_says_when_training_reached_the_success():
    learned, failed = outcome(10.0, [0.0, 0.5, 0.95, 0.9]), outcome(40.0, [0.0, 0.5, 0.6, 0.7])
    assert learned.row() == ("1280", "5", "4", "10", "0.900", "0.900", "4,800 / 8 s")
    assert failed.row()[-1] == "not reached"


def test_arms_are_compared_by_time_and_curve():
    ours, same, other = (
        outcome(10.0, [0.0, 0.9]),
        outcome(40.0, [0.0, 0.9]),
        outcome(40.0, [0.0, 0.8]),
    )
    lines = bench.comparison({"batched": ours, "renewed": same, "stock": other})
    assert lines[0].startswith("batched / renewed: rollouts 4.00 times, the whole run 4.00 times as fast; the same")
    assert "stock" in lines[1]
    assert "another learning curve" in lines[1]
    assert bench.comparison({"stock": other}) == []


@pytest.mark.sim
@pytest.mark.slow
def test_an_arm_of_renewed_stock_envs_learns_what_the_batched_one_learns(tmp_path, capsys):
    baseline = tmp_path / "random.py"
    baseline.write_text(RANDOM_BASELINE, encoding="utf-8")
    out = tmp_path / "results" / "ppo"
    settings = ["num_envs=2", "num_eval_envs=2", "total_timesteps=202", "arms=batched,renewed"]
    assert bench.BENCHMARK.main([f"ppo={baseline}", f"folder={tmp_path / 'runs'}", f"out={out}", *settings]) == 0
    assert "the same learning curve, number for number" in capsys.readouterr().out
    written = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert len(written["arms"]["batched"]["curves"]["train/return"]) == 2
    assert written["arms"]["renewed"]["env_steps"] == 202
    assert "| renewed |" in out.with_suffix(".md").read_text(encoding="utf-8")
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_an_arm_that_fails_says_where_its_output_is(tmp_path):
    text = RANDOM_BASELINE.replace("import argparse, time", 'raise SystemExit("no luck")')
    with pytest.raises(WorkerError, match=r"(?s)arm batched ended with exit code 1, see .*log.txt:\nno luck"):
        bench.train(["batched"], text, bench.Options(folder=str(tmp_path)))
