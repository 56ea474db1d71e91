"""Learning curves of experiments/train_control.py over seeds; of SAC beside Stable-Baselines3's at equal env steps.

python -m experiments.bench.control [seeds=0,1,2] [peer=sb3] [points=10] [out=docs/results/control_<name>] [folder=...]
                                    env.id=HalfCheetah-v5 run.num_iterations=1000 ...   overrides of the training

A seed at a time, each in a process of its own, ours and then the peer's, so that whatever else the machine does
disturbs both.  A curve is the return of greedy held-out episodes at `points` numbers of env steps (of updates, where
nothing acts).  The peer has the same networks, rates, batches, warm-up, discount and env steps; like ours it gathers
`env.num_envs x env.chunks_per_rollout` steps and then makes as many updates, and it may use every core.

Writes <out>.json and <out>.png.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

from experiments.bench.harness import REPOSITORY, Benchmark, Child, Goal, Report, Run, Spread, Table, Worker, ratios
from rlinf_embodied.compose import compose_control
from rlinf_embodied.config import ControlConfig, ControlName
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.metrics import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    seeds: str = "0,1,2"
    peer: str = ""  # or sb3
    points: int = 10
    folder: str = "runs/bench_control"
    out: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """What one training gave."""

    seed: int
    steps: list[int]  # env steps, or updates
    returns: list[float]  # of greedy held-out episodes, at these steps
    success: list[float]  # the share of them that is solved at any time; [] of a task without success
    steps_per_s: float  # once it learns
    plan: str = ""
    digest: str = ""

    @property
    def last(self) -> float:
        """The return at the end."""
        return self.returns[-1]


# ---------------------------------------------------------------------------------------------------------------- ours
def ours(overrides: Sequence[str], config: ControlConfig, seed: int, own: Options) -> Curve:
    """Trains with one seed and returns its curve.

    Raises:
        WorkerError: the training failed; its log is named.
    """
    folder = Path(own.folder).absolute() / f"seed_{seed}_{time.strftime('%Y%m%d_%H%M%S')}"
    folder.mkdir(parents=True)
    every = max(1, config.run.num_iterations // own.points)
    words = [*overrides, f"run.seed={seed}", f"run.dir={folder / 'run'}", f"eval.every={every}"]
    command = [sys.executable, str(REPOSITORY / "experiments/train_control.py"), *words, "eval.record_video=false"]
    Child(f"seed {seed}", command, folder / "log.txt", {}, cwd=REPOSITORY).wait()
    return read_curve(folder / "run", seed, config)


def read_curve(folder: Path, seed: int, config: ControlConfig) -> Curve:
    """Returns the curve that a run left."""
    rows, summary = read_metrics(folder), json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    before, after = summary["before"], summary["after"]
    shown = [row for row in rows if "eval/return" in row]
    learning = [row["charts/SPS"] for row in rows[config.first_update + 1 :]]
    success = [before.get("success_once"), *(row.get("eval/success_once") for row in shown), after.get("success_once")]
    return Curve(
        seed=seed,
        steps=[0, *(int(row["global_step"]) for row in shown), int(rows[-1]["global_step"])],
        returns=[before["return"], *(row["eval/return"] for row in shown), after["return"]],
        success=[value for value in success if value is not None],
        steps_per_s=statistics.median(learning) if learning else 0.0,
        plan=summary["plan"],
        digest=summary["weights_sha256"],
    )


# ---------------------------------------------------------------------------------------------------------------- peer
class StableBaselines:
    """SAC of Stable-Baselines3 with the settings of a config."""

    def __init__(self, config: ControlConfig) -> None:
        """Takes the training's config."""
        self._config = config

    def learn(self, seed: int, points: int) -> Curve:
        """Trains with one seed and returns its curve; evaluations are not part of its time."""
        import gymnasium
        from stable_baselines3 import SAC
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.evaluation import evaluate_policy
        from stable_baselines3.common.vec_env import DummyVecEnv

        config, env = self._config, self._config.env
        make = partial(gymnasium.make, env.task, max_episode_steps=env.horizon)
        algorithm, total = config.algorithm, config.run.num_iterations * config.steps_per_iteration
        model = SAC(
            "MlpPolicy",
            make_vec_env(make, env.num_envs, seed=seed, vec_env_cls=DummyVecEnv),
            learning_rate=algorithm.lr,
            buffer_size=algorithm.capacity,
            learning_starts=config.first_update * config.steps_per_iteration,
            batch_size=algorithm.batch_size,
            tau=algorithm.tau,
            gamma=algorithm.gamma,
            train_freq=env.chunks_per_rollout,
            gradient_steps=config.updates_per_iteration,
            policy_kwargs={"net_arch": [algorithm.critic_hidden_size] * algorithm.critic_layers},
            seed=seed,
            device="cpu",
        )
        held = make_vec_env(make, 1, seed=config.eval.seed)
        ask = lambda: float(cast(float, evaluate_policy(model, held, config.eval.num_episodes)[0]))  # noqa: E731
        steps, returns, speeds = [0], [ask()], []
        for _ in range(points):
            start, before = time.perf_counter(), model.num_timesteps
            model.learn(total // points, reset_num_timesteps=False)
            speeds.append((model.num_timesteps - before) / (time.perf_counter() - start))
            steps.append(model.num_timesteps)
            returns.append(ask())
        return Curve(seed, steps, returns, [], statistics.median(speeds[1:] or speeds))


def peers(config: ControlConfig, seed: int, own: Options) -> Curve:
    """Trains the peer with one seed, in a process of its own."""
    worker = Worker(StableBaselines, config)
    try:
        return cast(Curve, worker.ask("learn", seed, own.points).answer())
    finally:
        worker.close()


# ------------------------------------------------------------------------------------------------------------- results
def draw(curves: Mapping[str, Sequence[Curve]], title: str, unit: str, path: Path) -> None:
    """Draws every curve thinly and the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0))
    for colour, (name, several) in zip(("#1f5f8b", "#b4552d"), curves.items(), strict=False):
        for curve in several:
            axes.plot(curve.steps, curve.returns, color=colour, lw=0.8, alpha=0.4)
        length = min(len(curve.steps) for curve in several)
        mean = [statistics.mean(curve.returns[k] for curve in several) for k in range(length)]
        axes.plot(several[0].steps[:length], mean, color=colour, lw=2, label=f"{name}, mean of {len(several)} seeds")
    axes.set(xlabel=unit, ylabel="return of greedy held-out episodes", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def measure(run: Run[Options]) -> Report:
    """Trains seed by seed.

    Raises:
        ConfigError: seeds that are no numbers, an unknown peer, or one beside another algorithm than SAC.
    """
    own, config = run.options, compose_control(run.overrides)
    try:
        seeds = [int(text) for text in own.seeds.split(",")]
    except ValueError:
        raise ConfigError(f"seeds is {own.seeds!r}, but seeds are whole numbers: use seeds=0,1,2") from None
    if own.peer not in ("", "sb3"):
        raise ConfigError(f"peer is {own.peer!r}, but there is sb3 only: use peer=sb3, or leave it out")
    if own.peer and (config.algorithm.name is not ControlName.sac or config.algorithm.num_critics != 2):
        raise ConfigError(f"peer is {own.peer!r}, but its SAC is plain: use algorithm=sac, or leave peer out")
    curves: dict[str, list[Curve]] = {"ours": []} | ({own.peer: []} if own.peer else {})
    for seed in seeds:
        curves["ours"].append(ours(run.overrides, config, seed, own))
        if own.peer:
            curves[own.peer].append(peers(config, seed, own))
        run.keep({"curves": {name: [asdict(curve) for curve in several] for name, several in curves.items()}})
    goals = []
    if own.peer:
        speeds = [[curve.steps_per_s for curve in curves[name]] for name in ("ours", own.peer)]
        goals = [Goal("env steps/s, ours / SB3", ratios(*speeds), 1.5, floor=1.0)]
    rows = [
        (
            name,
            f"{Spread.of(curve.returns[0] for curve in several):.1f}",
            f"{Spread.of(curve.last for curve in several):.1f}",
            f"{Spread.of(curve.steps_per_s for curve in several):.0f}",
        )
        for name, several in curves.items()
    ]
    unit = "env steps" if config.algorithm.name.acts else "updates"
    title = f"{config.env.task}, {config.algorithm.name}"
    header = (title, "return before", f"after {curves['ours'][0].steps[-1]} {unit}", f"{unit}/s")
    return Report(
        content={"curves": curves, "goals": goals},
        text="\n\n".join([str(Table(header, rows)), *map(str, goals)]),
        draw=lambda path: draw(curves, title, unit, path),
    )


BENCHMARK = Benchmark("control", Options, measure, takes_overrides=True, one_thread=False)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
