"""GRPO on arithmetic: our trainer beside TRL's GRPOTrainer and beside the bare cost of the same work.

python experiments/bench_llm.py [arms=trl_1,bare_1,ours_1] [steps=40] [skip=5] [rounds=3]
                                [tests=1000] [out=docs/results/llm] [folder=runs/bench_llm] [work as in llm_work.py]

First TRL and we compute the loss of one batch (llm_losses.py): the benchmark stops unless they agree.  Then the arms of
llm_arms.py take turns, from the same model and over the same prompts; the number of the round is the seed of sampling.
Tokens are those of completions, and a second is one of the whole step.  Writes <out>.json and <out>.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from bench_report import Goal, Spread, chosen, machine, markdown, ratios, write_results
from llm_arms import ARMS, Arm, Measured, measured, read_steps, run_arm
from llm_losses import Difference, compare
from llm_work import Work, greedy_accuracy, make_start, number, parse
from trl_peer import missing

from rlinf_embodied.errors import ConfigError, RlinfError

OWN: dict[str, object] = {
    "arms": "",
    "steps": 40,
    "skip": 5,
    "rounds": 3,
    "tests": 1000,
    "start_steps": 1600,
    "folder": "runs/bench_llm",
    "out": "",
}
Runs = dict[str, list[Measured]]


def run(work: Work, own: Mapping[str, object], arms: Mapping[str, Arm]) -> Runs:
    """Runs every arm once per round, in turn, every other round backwards."""
    folder = Path(str(own["folder"])).resolve() / time.strftime("%Y%m%d_%H%M%S")
    found: Runs = {name: [] for name in arms}
    for round_ in range(number(own, "rounds")):
        for name in sorted(arms, reverse=bool(round_ % 2)):
            place = folder / f"{name}_{round_}"
            seeded = replace(work, seed=work.seed + round_)
            peak_mb = run_arm(arms[name], seeded, number(own, "steps"), place)
            accuracy = greedy_accuracy(place / "model", work, number(own, "tests"))
            found[name].append(measured(read_steps(place), number(own, "skip"), peak_mb, accuracy))
            last = found[name][-1]
            print(
                f"round {round_}, {name}: {last.tokens_per_s:,.0f} tokens/s, {last.s_per_step:.3f} s per step, "
                f"{last.peak_mb:,.0f} MB, accuracy {last.accuracy:.3f}",
                flush=True,
            )
    return found


# --------------------------------------------------------------------------------------------------------------- report
HEADER = (
    "arm",
    "tokens/s",
    "tokens/CPU s",
    "s per step",
    "tokens per step",
    "peak MB",
    "accuracy",
    "where the time goes",
)


def rows(found: Runs) -> list[tuple[str, ...]]:
    """Returns the lines of the table: medians, and the spread of what is compared."""
    spread = lambda runs, name: Spread.of(getattr(run, name) for run in runs)  # noqa: E731
    return [
        (
            name,
            f"{spread(runs, 'tokens_per_s'):,.0f}",
            f"{spread(runs, 'tokens_per_cpu_s'):,.0f}",
            f"{spread(runs, 's_per_step').median:.3f}",
            f"{spread(runs, 'tokens_per_step').median:,.0f}",
            f"{spread(runs, 'peak_mb').median:,.0f}",
            f"{spread(runs, 'accuracy'):.3f}",
            ", ".join(f"{part} {share:.0%}" for part, share in runs[0].shares.items() if share >= 0.005),
        )
        for name, runs in found.items()
    ]


def goals(found: Runs) -> list[Goal]:
    """Returns what our arms should reach beside TRL at its best, and beside the bare cost, on the same cores."""
    wanted = []
    for cores in (1, 2):
        ours, bare = f"ours_{cores}", f"bare_{cores}"
        trl = fastest([name for name in found if name.startswith(f"trl_{cores}")], found)
        if found.get(ours) and trl:
            wanted += [
                Goal(f"{ours} / {trl}, tokens/s", _quotients(found, ours, trl, "tokens_per_s"), 1.5, 1.15),
                Goal(f"{trl} / {ours}, peak memory", _quotients(found, trl, ours, "peak_mb"), 1.0),
                Goal(f"{ours} / {trl}, accuracy", _quotients(found, ours, trl, "accuracy"), 1.0),
            ]
        if found.get(ours) and found.get(bare):
            wanted.append(Goal(f"{ours} / {bare}, tokens/s", _quotients(found, ours, bare, "tokens_per_s"), 0.9))
    return wanted


def fastest(names: Sequence[str], found: Runs) -> str:
    """Returns the arm with the most tokens per second in the median; "" where none ran."""
    speeds = {name: Spread.of(run.tokens_per_s for run in found[name]).median for name in names if found[name]}
    return max(speeds, key=lambda name: speeds[name], default="")


def _quotients(found: Runs, above: str, below: str, name: str) -> Spread:
    return ratios([getattr(run, name) for run in found[above]], [getattr(run, name) for run in found[below]])


def write(
    own: Mapping[str, object], work: Work, arguments: Sequence[str], losses: Sequence[Difference], found: Runs
) -> None:
    """Writes JSON and Markdown, unless `out` is empty."""
    out = str(own["out"])
    if not out:
        return
    known = {"benchmark": "llm", "arguments": list(arguments), "machine": machine(), "work": asdict(work)}
    runs = {name: [asdict(run) for run in several] for name, several in found.items()}
    write_results(
        f"{out}.json", known | {"losses": [asdict(loss) for loss in losses], "arms": runs, "goals": goals(found)}
    )
    text = [
        "# GRPO beside TRL and the bare cost",
        f"`python experiments/bench_llm.py {' '.join(arguments)}`: {work.prompts} prompts x {work.group} completions, "
        f"{work.new_tokens} tokens at most, level {work.level}, lr {work.lr:g}, {own['steps']} steps of which "
        f"the first {own['skip']} are not timed, {own['rounds']} rounds. Medians (smallest - largest).",
        markdown(HEADER, rows(found)),
        "\n".join(f"- {goal}" for goal in goals(found)),
        "\n".join(f"- {name}: {ARMS[name].what}" for name in found),
        "Losses on an identical batch:\n\n" + "\n".join(f"- {loss}" for loss in losses),
    ]
    Path(f"{out}.md").write_text("\n\n".join(filter(None, text)) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    try:
        work, own = parse(arguments, OWN)
        arms = chosen(str(own["arms"]), ARMS)
        torch.set_num_threads(1)
        make_start(work, number(own, "start_steps"))
        losses: list[Difference] = []
        if any(name.startswith("trl") for name in arms):
            if reason := missing():
                raise ConfigError(reason)
            losses = compare(work)
            print(*losses, sep="\n", flush=True)
        found = run(work, own, arms)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(HEADER, rows(found)), *goals(found), sep="\n")
    write(own, work, [a for a in arguments if not a.startswith("folder=")], losses, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
