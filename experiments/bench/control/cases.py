"""The trainings behind docs/control.md: each algorithm on a task that is cheap.

case     task                       learns from
sac      Pendulum-v1                what it gathers
iql, bc  Pendulum-v1                all that `sac` of the same seed gathered, from its first uniform actions on
dagger   PickCube-v1 on its state   what the expert would do where the policy leads
rlpd     point_reach on its state   1 where an episode ends solved, nothing else, and episodes of the expert
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.bench.control.curves import Curve, trained
from experiments.bench.harness import Table
from rlinf_embodied.embodied.outcome import shown
from rlinf_embodied.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Case:
    """One training."""

    words: tuple[str, ...]  # of experiments/train_control.py
    recording: str = ""  # the case that gathered what it learns from, "" where it acts itself


UNSEEN = "6201,6202,6203"  # seeds that no setting was chosen by
COMMON = ("cluster=serial", "eval.num_episodes=100", "checkpoint.keep=1")
_PENDULUM = (
    *("env.id=Pendulum-v1", "env.horizon=200", "env.block_size=8", "policy.hidden_size=64"),
    *("algorithm.critic_hidden_size=64", "algorithm.lr=1e-3", "algorithm.value_lr=1e-3"),
)
_IQL = ("algorithm=iql", "algorithm.advantage_scale=0.1", "algorithm.expectile=0.8")
_PICK = ("env=maniskill_pick", "env.robot=null", "env.objects_in_proprio=true")
_DAGGER = ("algorithm=dagger", "algorithm.expert_steps=3200", "algorithm.updates_per_step=2", "algorithm.lr=1e-3")
# its authors' ten critics of 256 units and twenty updates per step are too much for a core
_RLPD = (
    *("env=point_reach", "env.cameras=[]", "env.reward=sparse", "env.horizon=20", "env.block_size=8"),
    *("algorithm=rlpd", "algorithm.expert_steps=1000", "algorithm.warmup_steps=500", "algorithm.batch_size=128"),
    *("algorithm.updates_per_step=4", "algorithm.policy_period=4", "algorithm.num_critics=5"),
    *("algorithm.critic_hidden_size=64", "policy.hidden_size=64"),
)
CASES: dict[str, Case] = {
    "sac": Case((*_PENDULUM, "algorithm=sac", "algorithm.warmup_steps=500", "run.num_iterations=90")),
    "iql": Case((*_PENDULUM, *_IQL, "run.num_iterations=6"), recording="sac"),
    "bc": Case((*_PENDULUM, "algorithm=bc", "run.num_iterations=4"), recording="sac"),
    "dagger": Case((*_PICK, *_DAGGER, "run.num_iterations=95")),
    "rlpd": Case((*_RLPD, "run.num_iterations=80")),
}


def words_of(name: str, seed: int, folder: Path, overrides: Sequence[str]) -> list[str]:
    """Returns the words of a case's training; recordings lie beside it below `folder`."""
    source = CASES[name].recording
    data = [f"data={_place(folder, source, seed) / 'run/checkpoints/latest'}"] if source else []
    return [*CASES[name].words, *COMMON, *data, *overrides]


def _place(folder: Path, name: str, seed: int) -> Path:
    return folder / name / f"seed_{seed}"


def case_curve(name: str, seed: int, folder: Path, points: int, overrides: Sequence[str]) -> Curve:
    """Returns the curve of a case; it, and the recording that it needs, are trained now unless `folder` has them.

    Raises:
        ConfigError: the folder has a training with other settings in its place.
        WorkerError: the training failed; its log is named.
    """
    if CASES[name].recording:
        case_curve(CASES[name].recording, seed, folder, points, overrides)
    place, words = _place(folder, name, seed), words_of(name, seed, folder, overrides)
    kept = place / "curve.json"
    if kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["words"] != words:
            raise ConfigError(
                f"folder is {str(folder)!r}, which holds {name} with other settings: use another folder=, or remove "
                f"{place}"
            )
        return Curve(**found["curve"])
    shutil.rmtree(place, ignore_errors=True)  # one that was interrupted
    curve = trained(words, seed, place, points)
    kept.write_text(json.dumps({"words": words, "curve": asdict(curve)}), encoding="utf-8")
    print(said(name, curve), flush=True)
    return curve


# ------------------------------------------------------------------------------------------------------------- results
def said(name: str, curve: Curve) -> str:
    """Returns what one training gave, in a line."""
    return f"{name}, seed {curve.seed}: {shown(curve.before)} -> {shown(curve.after)}, {curve.cpu_s:.0f} CPU s"


def table(curves: Mapping[str, Sequence[Curve]]) -> Table:
    """Returns median and worst over the seeds; success in per cent, or the return."""
    rows = []
    for name, several in curves.items():
        first, last = ([curve.scores[place] for curve in several] for place in (0, -1))
        numbers = (statistics.median(first), statistics.median(last), min(last))
        cpu = statistics.median(curve.cpu_s for curve in several)
        steps = f"{several[0].steps[-1]:,} {'updates' if CASES[name].recording else 'env steps'}"
        rows.append((name, steps, *(f"{number:.1f}" for number in numbers), f"{cpu:.0f}"))
    return Table(("case", "after", "before, median", "after, median", "worst", "CPU s"), rows)


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draws a panel for each case: every seed thinly, their median, and the 95 % intervals of both ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(curves), 3.2))
    for axes, (name, several) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for curve in several:
            axes.plot(curve.steps, curve.scores, color="#1f5f8b", lw=0.8, alpha=0.6)
            scale, key = (100, "success_once_interval") if curve.success else (1, "return_interval")
            for step, told in ((curve.steps[0], curve.before), (curve.steps[-1], curve.after)):
                axes.plot([step, step], [scale * bound for bound in told[key]], color="#1f5f8b", lw=2.5, alpha=0.35)
        middle = [statistics.median(values) for values in zip(*(curve.scores for curve in several), strict=True)]
        axes.plot(several[0].steps, middle, color="#b4552d", lw=2)
        solves = bool(several[0].success)
        axes.set(xlabel="updates" if CASES[name].recording else "env steps", title=name)
        axes.set(ylabel="success_once, %" if solves else "return", **({"ylim": (-3, 103)} if solves else {}))
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
