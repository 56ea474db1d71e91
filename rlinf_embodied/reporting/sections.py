"""Sections of a run's page on what it learned and from which settings; each says what is missing of what it shows."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from rlinf_embodied.compose import compose_math, compose_train, to_yaml
from rlinf_embodied.reporting.elements import drawn, folded, measured, missing, table, value_of
from rlinf_embodied.telemetry.metrics import moving_mean
from rlinf_embodied.telemetry.plots import COLOURS, Line, line_chart, rate_lines
from rlinf_embodied.telemetry.run_reader import SHARES, Run, pooled


def outcome(run: Run) -> str:
    """What came of it, in one line and a table: the metric, before and after."""
    number = run.num_iterations
    kept = "" if run.kept == number else f" The weights are those of iteration {run.kept}, the best by its checks."
    state = {
        "finished": f"Finished after {number} iterations.{kept}",
        "running": f"Still running: {number} iterations so far.",
        "stopped": f"Stopped after {number} iterations, before its end.",
    }[run.state]
    text = f'<p class="state {run.state}">{state}</p>{_headline(run)}'
    text += missing(f"{', '.join(run.missing)} in the run folder") if run.missing else ""
    if not run.before and not run.rates:
        return text + missing("no evaluation has been written, and no iteration was finished")
    names = dict.fromkeys([*run.rates, *(name for name in ("return", "reward") if name in run.before)])
    rows = [[name, measured(run.before, name), latest(run, name)] for name in names]
    head = ["metric (95 % interval of held-out evaluation)", "before", "after" if run.after else "now"]
    facts = {}
    if run.summary:
        facts["seconds per iteration"] = f"{run.summary['measured_s_per_iteration']:.2f}"
        facts["minutes of training"] = f"{run.summary['rl_s'] / 60:.1f}"
        facts["weights"] = str(run.summary.get("weights_sha256", ""))[:16]
    summary = " &middot; ".join(f"{name}: <b>{escape(value)}</b>" for name, value in facts.items())
    return f"{text}{table(head, rows)}<p>{summary}</p>"


def latest(run: Run, name: str) -> str:
    """Returns a metric after training; of a run that did not end, its rate in the last iterations."""
    if run.after:
        return measured(run.after, name)
    last = pooled(run, name)[-1:]
    return f"{100 * last[0][1]:.1f} % in the last iterations (sampled)" if last else "-"


def _headline(run: Run) -> str:
    """Returns the first of the rates, before and after, as one large line."""
    name = next(iter(run.rates), None)
    if name is None or f"{name}_interval" not in run.before:
        return ""
    after = f" &rarr; <b>{escape(measured(run.after, name))}</b>" if run.after else ""
    return f'<p class="headline">{escape(name)}: <b>{escape(measured(run.before, name))}</b>{after}</p>'


def settings(run: Run) -> str:
    """The command, and what differs from its defaults."""
    command = " ".join(["python", *map(str, run.manifest.get("command", []))])
    text = f"<pre>{escape(command)}</pre>" if run.manifest else missing("manifest.json, which holds the command")
    if not run.config:
        return text + missing("config.yaml")
    defaults = compose_math([]) if "generation" in run.config else compose_train([])
    config, usual = flat(run.config), flat(yaml.safe_load(to_yaml(defaults)))
    rows = [[key, value, usual.get(key, "-")] for key, value in config.items() if usual.get(key) != value]
    text += f"<p>{len(rows)} of {len(config)} keys differ from the defaults of this checkout; config.yaml has all.</p>"
    return text + (table(["key", "value", "default"], rows) if rows else "")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns a value, as text, for each dotted key: {"run": {"seed": 1}} gives {"run.seed": "1"}."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
            found[f"{prefix}{key}"] = text.removesuffix("\n...\n").strip()
    return found


def curves(runs: Sequence[Run]) -> str:
    """Learning curves with 95 % intervals: sampled during training, and greedy on held-out episodes."""
    charts = []
    for name in dict.fromkeys(name for run in runs for name in run.rates):
        lines = [line for k, run in enumerate(runs) for line in rate_lines(run, name, *_style(runs, k))]
        label, bounds = (f"{name}, %", (0, 103)) if name in SHARES else (name, None)
        charts.append(drawn(line_chart(lines, runs[0].unit, label, bounds), name))
    note = (
        "<p>Lines: sampled in training, five iterations pooled, with the 95 % interval of their number "
        "(completions of one problem count once). Marks: held-out evaluation, with its interval.</p>"
    )
    shown = "".join(charts)
    return (note + shown if shown else missing("no success or accuracy was written")) + _small_charts(runs)


def _style(runs: Sequence[Run], number: int) -> tuple[str, str]:
    """Returns colour and label of a run's lines."""
    return COLOURS[number % len(COLOURS)], runs[number].name if len(runs) > 1 else ""


def _small_charts(runs: Sequence[Run]) -> str:
    """Returns the other metrics, each small, as a mean over five iterations."""
    judged = {name for run in runs for name in run.rates}
    groups = ("rollout/", "losses/", "sft/", "check/", "charts/")
    names = dict.fromkeys(name for run in runs for name in run.names if name.startswith(groups))
    charts = []
    for name in (name for name in names if name.partition("/")[2] not in judged):
        lines = []
        for k, run in enumerate(runs):
            xs, ys = [x for x, _ in run.column(name)], moving_mean([y for _, y in run.column(name)])
            colour, label = _style(runs, k)
            lines.append(Line(label, list(zip(xs, ys, strict=True)), colour))
        charts.append(drawn(line_chart(lines, name, size=(3.6, 1.9)), name))
    inside = f'<div class="grid-of-charts">{"".join(charts)}</div>'
    return folded(f"{len(charts)} more metrics, means of five iterations", inside) if charts else ""


def evaluations(run: Run) -> str:
    """Every evaluation and check, in order."""
    others = [name for name in ("return", "reward", "episode_len", "length") if name in run.before]
    names = list(dict.fromkeys([*run.rates, *others]))
    rows = [["before", "0", *(measured(run.before, name) for name in names)]] if run.before else []
    for row in run.metrics:
        for kind in ("eval", "check"):
            found = [row.get(f"{kind}/{name}") for name in names]
            if any(value is not None for value in found):
                cells = [value_of(name, value) for name, value in zip(names, found, strict=True)]
                rows.append([kind, str(row["iteration"]), *cells])
        if row.get("check/ended_early"):
            rows.append(["check, ended early: worse than the best", str(row["iteration"]), *("-" for _ in names)])
    if run.after:
        rows.append(["after", str(run.kept), *(measured(run.after, name) for name in names)])
    return table(["evaluation", "iteration", *names], rows) if rows else missing("nothing was evaluated yet")


def videos(run: Run, budget_bytes: int) -> str:
    """Videos inside the page, those of the first and last evaluation first, as far as `budget_bytes` goes."""
    files = sorted((run.folder / "videos").glob("step_*/*.mp4"))
    if not files:
        return missing("no videos (eval.record_video=false, or nothing was evaluated)")
    step = lambda file: int(file.parent.name.removeprefix("step_"))  # noqa: E731
    ends = {min(map(step, files)), max(map(step, files))}
    shown, left_out, used = [], [], 0
    for file in sorted(files, key=lambda file: (step(file) not in ends, step(file), file.name)):
        size = file.stat().st_size * 4 // 3  # as base64
        if used + size > budget_bytes:
            left_out.append(f"{file.parent.name}/{file.name}")
            continue
        used += size
        shown.append(_video(file))
    rest = missing(f"{len(left_out)} videos beyond videos_mb: {', '.join(left_out)}") if left_out else ""
    return f'<div class="grid-of-charts">{"".join(shown)}</div>{rest}'


def _video(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    title = escape(f"{file.parent.name.replace('_', ' ')}: {file.stem}")
    video = f'<video controls loop muted playsinline width="320" src="data:video/mp4;base64,{data}"></video>'
    return f"<figure>{video}<figcaption>{title}</figcaption></figure>"


def versions(run: Run) -> str:
    """Seed, revision, hardware and libraries."""
    if not run.manifest:
        return missing("manifest.json")
    facts = {"seed": run.manifest.get("seed"), "git revision": run.manifest.get("git_revision")}
    facts |= {**run.manifest.get("hardware", {}), **run.manifest.get("versions", {})}
    return table(["", ""], [[name, str(value)] for name, value in facts.items()])
