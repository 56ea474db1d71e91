"""Puts finished runs side by side: a Markdown table and one picture of their learning curves.

python experiments/compare_runs.py docs/results/ppo_pick runs/seed0 runs/seed1 runs/seed2

writes docs/results/ppo_pick.md and docs/results/ppo_pick.png.
"""

import json
import shlex
import sys
from pathlib import Path

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.telemetry.metrics import moving_mean, read_metrics

HEADER = "| run | seed | plan | before | after | env steps | RL minutes | env steps/s | overlap of intervals |"


def read(folder: Path) -> tuple[dict, dict]:
    try:
        return tuple(json.loads((folder / name).read_text()) for name in ("summary.json", "manifest.json"))
    except OSError as error:
        raise ConfigError(f"{folder} is no finished run ({error}): give run folders with a summary.json") from error


def percent(result: dict) -> str:
    low, high = result["success_once_interval"]
    episodes = result["num_episodes"]
    return f"{100 * result['success_once']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] of {episodes}"


def row(folder: Path, summary: dict, manifest: dict) -> str:
    before, after = summary["before"], summary["after"]
    apart = after["success_once_interval"][0] > before["success_once_interval"][1]
    cells = [
        folder.name,
        manifest["seed"],
        f"{summary['plan']} on {manifest['hardware']['devices']}",
        percent(before),
        percent(after),
        f"{summary['env_steps']:,}",
        f"{summary['rl_s'] / 60:.1f}",
        f"{summary['env_steps_per_s']:.0f}",
        "no" if apart else "yes",
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def picture(folders: list[Path], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for folder, color in zip(folders, plt.cm.viridis([0.1, 0.45, 0.75, 0.9][: len(folders)]), strict=False):
        rows = [r for r in read_metrics(folder) if "rollout/success_once" in r]
        summary, manifest = read(folder)
        steps = [r["global_step"] / 1e3 for r in rows]
        means = moving_mean([100 * r["rollout/success_once"] for r in rows])
        axes.plot(steps, means, color=color, lw=1.2, label=f"seed {manifest['seed']}, sampled (mean of 5)")
        marks = [(r["global_step"] / 1e3, 100 * r["eval/success_once"]) for r in rows if "eval/success_once" in r]
        ends = [
            (0.0, 100 * summary["before"]["success_once"]),
            *marks,
            (steps[-1], 100 * summary["success_rate_after"]),
        ]
        axes.plot(*zip(*ends, strict=True), "D--", color=color, ms=4, lw=0.8)
    axes.set(xlabel="thousand env steps of RL", ylabel="success_once, %", ylim=(0, 103))
    axes.set_title("diamonds: greedy, held-out initial states", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main(target: Path, folders: list[Path]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    runs = [(folder, *read(folder)) for folder in folders]
    lines = [HEADER, "|---" * 9 + "|", *(row(*run) for run in runs), ""]
    for folder, _, manifest in runs:
        hardware = manifest["hardware"]
        command = shlex.join(["python", *manifest["command"]])
        lines.append(
            f"- `{folder.name}`: `{command}`, {hardware['description']}, torch {manifest['versions']['torch']}"
        )
    target.with_suffix(".md").write_text("\n".join(lines) + "\n")
    picture(folders, target.with_suffix(".png"))
    print("\n".join(lines))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
