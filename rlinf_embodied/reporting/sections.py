"""Sections of a run's page on what it learned and from which settings; each says what is missing of what it shows."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from rlinf_embodied.compose import compose_math, compose_sft, compose_train, to_yaml
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.elements import drawn, folded, measured, missing, table, value_of
from rlinf_embodied.telemetry.metrics import moving_mean
from rlinf_embodied.telemetry.plots import COLOURS, Line, line_chart, rate_lines
from rlinf_embodied.telemetry.run_reader import SHARES, Run, pooled

_FILES = ("config.yaml", "manifest.json", "plan.json", "metrics.jsonl", "summary.json", "trace.json")
_COMPOSERS: dict[str, Callable[[], object]] = {  # by a section that only this command has
    "sft": lambda: compose_sft(["data=none"]),
    "generation": lambda: compose_math([]),
    "env": lambda: compose_train([]),
}


def outcome(run: Run) -> str:
    """What came of it, in one line and a table: the metric, before and after."""
    number = run.num_iterations
    kept = "" if run.kept == number else f" The weights are those of iteration {run.kept}, the best by its checks."
    state = {
        "finished": f"Finished after {number} iterations.{kept}",
        "running": f"Still running: {number} iterations so far.",
        "stopped": f"Stopped after {number} iterations, before its end.",
    }[run.state]
    absent = [name for name in _FILES if not (run.folder / name).exists()]
    notes = f'<p class="state {run.state}">{state}</p>{_headline(run)}'
    notes += missing(f"{', '.join(absent)} in the run folder") if absent else ""
    notes += "".join(missing(f"{name} cannot be read") for name in run.unread)
    if not run.before and not run.rates:
        return notes + missing("no evaluation has been written, and no iteration was finished")
    rows = []
    for name in dict.fromkeys([*run.rates, *(name for name in ("return", "reward") if name in run.before)]):
        now = pooled(run, name)[-1:] if not run.after else []
        last = f"{100 * now[0][1]:.1f} % in the last iterations (sampled)" if now else measured(run.after, name)
        rows.append([name, measured(run.before, name), last])
    speeds = [
        ("seconds per iteration", f"{run.summary['measured_s_per_iteration']:.2f}" if run.summary else ""),
        ("minutes of training", f"{run.summary['rl_s'] / 60:.1f}" if "rl_s" in run.summary else ""),
        ("weights", str(run.summary.get("weights_sha256", ""))[:16]),
    ]
    known = [f"{name}: <b>{escape(value)}</b>" for name, value in speeds if value]
    when = "after" if run.after else "now"
    head = ["metric (95 % interval of held-out evaluation)", "before", when]
    return f"{notes}{table(head, rows)}<p>{' &middot; '.join(known)}</p>"


def _headline(run: Run) -> str:
    """Returns the first of the rates, before and after, as one large line."""
    name = next(iter(run.rates), None)
    if name is None or f"{name}_interval" not in run.before:
        return ""
    after = f" &rarr; <b>{escape(measured(run.after, name))}</b>" if run.after else ", the end has not come"
    return f'<p class="headline">{escape(name)}: <b>{escape(measured(run.before, name))}</b>{after}</p>'


def settings(run: Run) -> str:
    """The command, then what differs from its defaults, then everything."""
    command = " ".join(["python", *map(str, run.manifest.get("command", []))])
    shown = f"<pre>{escape(command)}</pre>" if run.manifest else missing("manifest.json, which holds the command")
    config, usual = flat(run.config), _defaults(run)
    if isinstance(usual, str):
        return shown + missing(usual)
    rows = [[key, value, usual[key]] for key, value in config.items() if usual.get(key, value) != value]
    text = f"<p>{len(rows)} of {len(config)} keys differ from the defaults of this checkout.</p>"
    text += table(["key", "value", "default"], rows) if rows else ""
    unknown = [[key, config.get(key, "-"), usual.get(key, "-")] for key in config.keys() ^ usual.keys()]
    title = f"{len(unknown)} keys that only the run's or only this checkout's configuration has"
    text += folded(title, table(["key", "value", "default"], sorted(unknown))) if unknown else ""
    return shown + text + folded("all keys", table(["key", "value"], [[key, value] for key, value in config.items()]))


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


def _defaults(run: Run) -> dict[str, str] | str:
    """Returns the configuration of the run's command without any override, or why it cannot be determined."""
    compose = next((compose for section, compose in _COMPOSERS.items() if section in run.config), None)
    if compose is None:
        return "config.yaml is missing, or of no command that is known"
    try:
        return flat(yaml.safe_load(to_yaml(compose())))
    except ConfigError as error:
        return f"the defaults cannot be made: {error}"


def curves(runs: Sequence[Run]) -> str:
    """Learning curves with 95 % intervals: sampled during training, and greedy on held-out episodes."""
    charts = []
    for name in dict.fromkeys(name for run in runs for name in run.rates):
        lines = [
            line
            for k, run in enumerate(runs)
            for line in rate_lines(run, name, COLOURS[k % len(COLOURS)], run.name if len(runs) > 1 else "")
        ]
        label, bounds = (f"{name}, %", (0, 103)) if name in SHARES else (name, None)
        charts.append(drawn(line_chart(lines, runs[0].unit, label, bounds), name))
    note = (
        "<p>Lines: sampled in training, five iterations pooled, with the 95 % interval of their number "
        "(completions of one problem count once). Marks: held-out evaluation, with its interval.</p>"
    )
    shown = "".join(charts)
    return (note + shown if shown else missing("no success or accuracy was written")) + _small_charts(runs)


def _small_charts(runs: Sequence[Run]) -> str:
    """Returns the other metrics, each small, as a mean over five iterations."""
    names = dict.fromkeys(name for run in runs for row in run.metrics for name in row)
    judged = {name for run in runs for name in run.rates}
    groups = ("rollout/", "losses/", "sft/", "check/", "charts/")
    names = [name for name in names if name.startswith(groups) and name.partition("/")[2] not in judged]
    charts = []
    for name in names:
        lines = []
        for k, run in enumerate(runs):
            xs, ys = [x for x, _ in run.column(name)], moving_mean([y for _, y in run.column(name)])
            label = run.name if len(runs) > 1 else ""
            lines.append(Line(label, list(zip(xs, ys, strict=True)), COLOURS[k % len(COLOURS)]))
        charts.append(drawn(line_chart(lines, name, size=(3.6, 1.9)), name))
    inside = f'<div class="grid-of-charts">{"".join(charts)}</div>'
    return folded(f"{len(names)} more metrics, means of five iterations", inside) if names else ""


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
    if not rows:
        return missing("nothing was evaluated yet")
    return table(["evaluation", "iteration", *names], rows)


def videos(run: Run, budget_bytes: int) -> str:
    """Videos inside the page, the tiled ones of first and last first, as far as `budget_bytes` goes."""
    files = sorted((run.folder / "videos").glob("step_*/*.mp4"))
    if not files:
        return missing("no videos (eval.record_video=false, or nothing was evaluated)")
    steps = list(dict.fromkeys(sorted((file.parent for file in files), key=_step)))
    ends = [steps[0], steps[-1]]
    ordered = sorted(
        files, key=lambda file: (file.parent not in ends, file.stem != "tiled", _step(file.parent), file.name)
    )
    shown, left_out, used = [], [], 0
    for file in ordered:
        size = file.stat().st_size * 4 // 3  # as base64
        if used + size > budget_bytes:
            left_out.append(f"{file.parent.name}/{file.name}")
            continue
        used += size
        shown.append(_video(file))
    rest = missing(f"{len(left_out)} videos beyond videos_mb: {', '.join(left_out)}") if left_out else ""
    return f'<div class="grid-of-charts">{"".join(shown)}</div>{rest}'


def _step(folder: Path) -> int:
    number = folder.name.removeprefix("step_")
    return int(number) if number.isdigit() else -1


def _video(file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    title = escape(f"{file.parent.name.replace('_', ' ')}: {file.stem}")
    source = f"data:video/mp4;base64,{data}"
    video = f'<video controls loop muted playsinline width="320" src="{source}"></video>'
    return f"<figure>{video}<figcaption>{title}</figcaption></figure>"


def versions(run: Run) -> str:
    """Libraries, revision, hardware, and what was pinned."""
    if not run.manifest:
        return missing("manifest.json")
    facts = {"seed": run.manifest.get("seed"), "git revision": run.manifest.get("git_revision")}
    facts |= dict(run.manifest.get("hardware", {}))
    rows = [[name, str(value)] for name, value in facts.items()]
    libraries = [[name, str(value)] for name, value in run.manifest.get("versions", {}).items()]
    pinned = table(["pinned", "value"], [[k, v] for k, v in flat(run.manifest.get("pinned", {})).items()])
    tables = table(["hardware", ""], rows) + table(["library", "version"], libraries)
    return f'<div class="side">{tables}</div>{folded("what is pinned", pinned)}'
