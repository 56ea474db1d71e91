"""Returns of our PPO and SAC and of Stable-Baselines3's over env steps, on the same held-out episodes at each point.

python -m experiments.bench.sb3_curves [cases=mujoco,sac] [seeds=6501-6505] [sbx=true] [folder=runs/sb3_curves]
                                       [out=docs/results/sb3_curves]

Cases and settings are those of experiments.bench.sb3: HalfCheetah-v5 with the libraries' defaults, without standardised
observations; ours is compiled.  A point is the mean return of 20 greedy episodes, which begin with reset(seed=9000) to
reset(seed=9019) in every arm.  Our runs that `folder` holds already are not trained again.

Writes <out>.json and <out>.png.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.bench.harness import Benchmark, Run, chosen, table, trained_run
from experiments.bench.harness.curves import Curve, Panel, draw_panels
from experiments.bench.sb3 import CASES, SB3, SBX, Case, our_words, peer
from rlinf_embodied.reporting.seeds import seeds_of
from rlinf_embodied.telemetry.plots import rate_lines

FIRST, EPISODES, POINTS = 9000, 20, 5
ENV_STEPS = {"mujoco": 307_200, "sac": 32_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""
    seeds: str = "6501-6505"
    sbx: bool = False  # adds SBX's algorithm
    folder: str = "runs/sb3_curves"
    out: str = ""


def our_curve(name: str, case: Case, root: Path, seed: int) -> Curve:
    """Returns (env steps, mean return), from the untrained policy on; a run that `root` holds is not trained again."""
    folder = root / f"{name}_{seed}"
    number = ENV_STEPS[name] // case.steps
    asked = f"""run.num_iterations={number} run.seed={seed} run.dir={folder} eval.every={number // POINTS}
        eval.num_episodes={EPISODES} eval.num_envs={EPISODES} eval.seed={FIRST} eval.sampled_episodes=0
        eval.record_video=false"""
    run = trained_run(f"{name}, seed {seed}", folder, [*our_words(name, case, True), *asked.split()])
    return rate_lines(run, "return", "")[1].points


def peer_curve(name: str, case: Case, library: str, seed: int) -> Curve:
    """Returns the same of a library's algorithm."""
    model = peer(name, case, library, seed)
    points = [(0.0, mean_return(case.task, model))]
    for k in range(1, POINTS + 1):
        model.learn(ENV_STEPS[name] * k // POINTS - model.num_timesteps, reset_num_timesteps=False)
        points.append((float(model.num_timesteps), mean_return(case.task, model)))
    return points


def mean_return(task: str, model: Any) -> float:
    """Returns the mean return of the held-out episodes under the greedy policy."""
    import gymnasium

    def rewards(env: gymnasium.Env, seed: int) -> Iterator[float]:
        observation, over = env.reset(seed=seed)[0], False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(model.predict(observation, deterministic=True)[0])
            over = terminated or truncated
            yield float(reward)

    with closing(gymnasium.make(task)) as env:
        return fmean(sum(rewards(env, FIRST + k)) for k in range(EPISODES))


def measure(run: Run[Options]) -> None:
    own, folder = run.options, Path(run.options.folder).absolute()
    panels, rows, written = [], [], {}
    for name, case in chosen(own.cases, {name: CASES[name] for name in ENV_STEPS}).items():
        arms: dict[str, Callable[[int], Curve]] = {"ours": partial(our_curve, name, case, folder)}
        for arm, library in (SB3 | SBX if own.sbx else SB3).items():
            arms[arm] = partial(peer_curve, name, case, library)
        curves: dict[str, list[Curve]] = {arm: [] for arm in arms}
        for seed in seeds_of(own.seeds, "seeds"):
            for arm, curve_of in arms.items():
                curves[arm].append(curve_of(seed))
                print(f"{name}, seed {seed}, {arm}: {curves[arm][-1][-1][1]:.0f}", flush=True)
            run.write({"returns": written | {name: curves}})
        written[name] = curves
        panels.append(Panel(f"{name}: {case.task}", "env steps", "return", curves))
        for arm, several in curves.items():
            last = [curve[-1][1] for curve in several]
            rows.append((name, arm, f"{median(last):.0f} ({min(last):.0f} to {max(last):.0f})", str(len(last))))
    print("", table(("case", "arm", "return, median (worst to best)", "seeds"), rows), sep="\n")
    draw_panels(panels, own.out)


BENCHMARK = Benchmark("sb3_curves", Options, measure)

if __name__ == "__main__":
    BENCHMARK.main()
