"""Learning curves of PPO, compared with Stable-Baselines3's and SBX's: equal networks, schedule, rates and env steps.

python -m experiments.bench.ppo_curves [cases=halfcheetah,reacher,pick,images] [seeds=6301,6302,6303] [points=...]
                                       [iterations=...] [sbx=true] [folder=...] [out=docs/results/ppo_curves]

    halfcheetah, reacher   2 x 64 tanh units, separate actor and critic, 2,048 env steps per iteration on 8 rows,
                           minibatches of 64, 10 epochs, Adam 3e-4 (SB3's defaults, and those of bench/sb3.py); nothing
                           is standardised
    pick                   PickCube-v1 on its state: 512 env steps on 16 rows, minibatches of 128, 4 epochs, discount
                           0.8, lambda 0.9; ours, SB3's PPO on the same rows through envs.sb3.make_sb3, and
                           SB3's on stock envs, whose state also holds velocities and whether the cube is grasped; SBX's
                           on both.  Episodes last 50 steps whatever happens, so that returns compare
    images                 the same through one camera of 64 x 64 pixels, with the state of robot and goal but not of
                           the cube: the convolutions of Mnih et al. 2015 and 512 units, shared by actor and critic.
                           SBX takes no images in addition to a state

Trainings run one after the other, seed by seed, each in a separate process with one thread.  A curve is the outcome
of `episodes` greedy held-out episodes at `points` numbers of env steps (10; of pick 3, of images 2).  Runs that
`folder` holds already are not trained again.

Writes <out>.json and <out>.png.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from experiments.bench.control.curves import Curve, draw, kept, seeds_of, trained
from experiments.bench.harness import Benchmark, Report, Run, Spread, Table, Worker, chosen
from experiments.bench.sb3 import CONTROL, HORIZON, MINIBATCH, STEPS, our_words, sbx_ppo, stock
from rlinf_embodied.compose import compose_train

HELD_OUT_SEED = 1_000_000
PICK = {"n_steps": 32, "batch_size": 128, "n_epochs": 4, "gamma": 0.8, "gae_lambda": 0.9}
PIXELS = 64
_PICK_WORDS = (
    *("env=maniskill_pick", "env.options.robot=null", "env.chunk=1"),
    *(f"env.horizon={HORIZON}", f"env.options.control_mode={CONTROL}", "env.hold_steps=0", "env.reward=dense"),
    *("env.success_bonus=0", "env.num_envs=16", "env.block_size=16", "env.chunks_per_rollout=32"),
    *("policy=actor_critic", "policy.options.normalize_observations=false", "policy.options.normalize_returns=false"),
    *("algorithm=ppo_mujoco", "algorithm.lr_end_fraction=1.0", "algorithm.num_minibatches=4", "algorithm.epochs=4"),
    *("algorithm.one_optimizer=true", "algorithm.value_coef=1.0", "algorithm.gamma=0.8", "algorithm.gae_lambda=0.9"),
    *("env.carry_over=true", "cluster=serial"),
)
PICK_WORDS = (*_PICK_WORDS, "env.cameras=[]", "env.options.objects_in_proprio=true")
IMAGE_WORDS = (
    *_PICK_WORDS,
    "env.cameras=[base_camera]",
    "env.options.camera_fov=null",
    f"env.obs_size={PIXELS}",
    "policy.options.hidden_size=512",
)
NATURE = {"net_arch": [], "features_extractor_kwargs": {"cnn_output_dim": 512}}  # of SB3, which are those networks


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    cases: str = ""
    seeds: str = "6301,6302,6303"
    points: int = 0  # 0: the case's own number, as of iterations
    iterations: int = 0
    episodes: int = 20
    sbx: bool = False
    folder: str = "runs/bench_ppo_curves"
    out: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One task, and the peers that train on it as well."""

    task: str
    words: tuple[str, ...]  # of experiments/train_vla.py
    iterations: int
    steps: int  # env steps of an iteration
    arms: tuple[str, ...]
    points: int = 10
    pixels: int | None = None  # per side of an image; None: the policy is shown the state


_ON_EACH = ("sb3 on ours", "sb3 on stock")
CASES = {
    "halfcheetah": Case("HalfCheetah-v5", tuple(our_words("HalfCheetah-v5", 8)), 150, STEPS, ("sb3", "sbx")),
    "reacher": Case("Reacher-v5", (*our_words("Reacher-v5", 8), "env.horizon=50"), 100, STEPS, ("sb3", "sbx")),
    "pick": Case("PickCube-v1", PICK_WORDS, 90, 512, (*_ON_EACH, "sbx on ours", "sbx on stock"), points=3),
    "images": Case("PickCube-v1", IMAGE_WORDS, 40, 512, _ON_EACH, points=2, pixels=PIXELS),
}


class Peer:
    """Trains one of them."""

    def learn(self, arm: str, case: Case, seed: int, total: int, points: int, episodes: int) -> Curve:
        """Trains with one seed and returns its curve; evaluations are not part of its time."""
        import torch
        from stable_baselines3.common.evaluation import evaluate_policy

        torch.set_num_threads(1)
        env, held = self._envs(arm, case, seed)
        held.seed(HELD_OUT_SEED)
        model = self.model(arm, case, seed, env)
        solved: list[bool] = []

        def ask() -> tuple[float, float | None]:
            solved.clear()

            def note(locals_: dict[str, Any], _: object) -> None:
                if locals_["done"] and "is_success" in locals_["info"]:
                    solved.append(bool(locals_["info"]["is_success"]))

            found = float(cast(float, evaluate_policy(model, held, episodes, callback=note)[0]))
            return found, statistics.mean(solved) if solved else None

        steps, evaluated, speeds = [0], [ask()], []
        for _ in range(points):
            start, before = time.process_time(), model.num_timesteps
            model.learn(total // points, reset_num_timesteps=False)
            speeds.append((model.num_timesteps - before) / (time.process_time() - start))
            steps.append(model.num_timesteps)
            evaluated.append(ask())
        returns, success = [one for one, _ in evaluated], [share for _, share in evaluated if share is not None]
        return Curve(seed, steps, returns, success, statistics.median(speeds[1:] or speeds))

    def model(self, arm: str, case: Case, seed: int, env: Any) -> Any:
        """Returns the learner, untrained."""
        from stable_baselines3 import PPO

        kind = sbx_ppo() if arm.startswith("sbx") else PPO
        settings: dict[str, Any] = (
            PICK if " on " in arm else {"n_steps": STEPS // env.num_envs, "batch_size": MINIBATCH}
        )
        if case.pixels:
            settings = settings | {"policy_kwargs": NATURE}
        return kind("MultiInputPolicy" if case.pixels else "MlpPolicy", env, seed=seed, device="cpu", **settings)

    def _envs(self, arm: str, case: Case, seed: int) -> tuple[Any, Any]:
        from stable_baselines3.common.env_util import make_vec_env

        from envs.sb3 import make_sb3

        if " on " not in arm:
            return make_vec_env(case.task, 8, seed=seed), make_vec_env(case.task, 1)
        if arm.endswith(" on stock"):
            made = lambda rows, first: stock(case.task, rows, case.pixels, first, whole_episodes=True)  # noqa: E731
            return made(16, seed * 100), made(10, HELD_OUT_SEED)
        section, shown = compose_train(case.words).env, "dict" if case.pixels else "proprio"
        env, held = (make_sb3(section, rows, observations=shown) for rows in (16, 10))
        env.seed(seed)
        return env, held


def curve(arm: str, case: Case, seed: int, own: Options, place: Path) -> Curve:
    """Returns the curve of one training; it is trained now unless its folder has it."""
    count, points = own.iterations or case.iterations, own.points or case.points
    words = [*case.words, f"run.num_iterations={count}", f"eval.num_episodes={own.episodes}", "checkpoint.keep=1"]

    def train() -> Curve:
        if arm == "ours":
            return trained(words, seed, place, points)
        worker = Worker(Peer)
        try:
            whole = count * case.steps
            return cast(Curve, worker.ask("learn", arm, case, seed, whole, points, own.episodes).answer())
        finally:
            worker.close()

    return kept(place, {"arm": arm, "words": words, "points": points}, train)


def table(panels: Mapping[str, Mapping[str, Sequence[Curve]]]) -> Table:
    """Returns median and range over the seeds."""
    rows = []
    for name, arms in panels.items():
        for arm, several in arms.items():
            solved = Spread.of(100 * one.success[-1] for one in several) if several[0].success else None
            rows.append(
                (
                    name,
                    arm,
                    f"{several[0].steps[-1]:,}",
                    f"{Spread.of(one.returns[0] for one in several):.1f}",
                    f"{Spread.of(one.last for one in several):.1f}",
                    "" if solved is None else f"{solved:.0f}",
                )
            )
    return Table(("case", "arm", "env steps", "return before", "after, median (min-max)", "solved at the end, %"), rows)


def measure(run: Run[Options]) -> Report:
    """Trains case by case, seed by seed, arm by arm.

    Raises:
        ConfigError: an unknown case, or seeds that are no numbers.
    """
    own, panels = run.options, dict[str, dict[str, list[Curve]]]()
    seeds = seeds_of(own.seeds)
    plain = lambda: {n: {a: [asdict(one) for one in s] for a, s in arms.items()} for n, arms in panels.items()}  # noqa: E731
    for name, case in chosen(own.cases, CASES).items():
        arms = ["ours", *(arm for arm in case.arms if own.sbx or not arm.startswith("sbx"))]
        panels[name] = {arm: [] for arm in arms}
        for seed in seeds:
            for arm in arms:
                place = Path(own.folder).absolute() / name / arm.replace(" ", "_") / f"seed_{seed}"
                made = curve(arm, case, seed, own, place)
                panels[name][arm].append(made)
                print(f"{name}, {arm}, seed {seed}: {made.returns[0]:.1f} -> {made.last:.1f}", flush=True)
                run.keep({"curves": plain()})
    found, units = table(panels), dict.fromkeys(panels, "env steps")
    return Report(
        content={"curves": plain()},
        text=str(found),
        draw=lambda path: draw(panels, units, path),
    )


BENCHMARK = Benchmark("ppo_curves", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
