"""Sections of a run's page, as HTML; each names the parts that are missing."""

from __future__ import annotations

import base64
import csv
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import yaml

from rlinf_embodied.compose import compose_math, compose_train, to_yaml
from rlinf_embodied.config.checks import by_dotted_key
from rlinf_embodied.telemetry.metrics import idle_warning, iqm, iqm_interval, percent
from rlinf_embodied.telemetry.plots import COLOURS, Line, kept_moment, line_chart, rate_lines, seeds_line, svg
from rlinf_embodied.telemetry.run_reader import SHARES, Run, kept_weights, pooled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BY = ("success_once", "return", "seed")  # order of episodes
_MOST_TRACES = 16  # dimensions of actions and states that are drawn


# --------------------------------------------------------------------------------------------------------------- pieces
def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "wide") -> str:
    """Returns a table; cells are text, and "#..." becomes a link within the page."""
    link = lambda cell: f'<a href="{escape(cell)}">video</a>' if cell.startswith("#") else escape(cell)  # noqa: E731
    cells = lambda row, tag: "".join(f"<{tag}>{link(cell)}</{tag}>" for cell in row)  # noqa: E731
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="{kind}"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def missing(why: str) -> str:
    """Returns a paragraph that names a missing part."""
    return f'<p class="missing">Missing: {escape(why)}.</p>'


def measured(result: Mapping[str, Any], name: str) -> str:
    """Returns a metric with its 95 % interval and, if known, the number of trials; "-" if it was not measured."""
    value, interval = result.get(name), result.get(f"{name}_interval")
    if interval is None:
        return _value(name, value)
    number = result.get("num_episodes") or result.get("num_problems")
    text = percent(result, name) if name in SHARES else f"{value:.4g} [{interval[0]:.4g}, {interval[1]:.4g}]"
    return text + (f" of {number}" if number else "")


def latest(run: Run, name: str) -> str:
    """Returns a metric after training, or for an unfinished run its rate in the last iterations."""
    if run.after:
        return measured(run.after, name)
    last = pooled(run, name)[-1:]
    return f"{100 * last[0][1]:.1f} % in the last iterations (sampled)" if last else "-"


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the value of each dotted key, as text: {"run": {"seed": 1}} gives {"run.seed": "1"}."""
    text = lambda value: yaml.safe_dump(value, default_flow_style=True, width=10**6)  # noqa: E731
    return {key: text(value).removesuffix("\n...\n").strip() for key, value in by_dotted_key(config).items()}


def by_configuration(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns groups of runs whose settings differ only by run.seed and run.dir, in the order of their first runs."""
    groups: dict[str, list[Run]] = {}
    for k, run in enumerate(runs):
        config = {key: value for key, value in flat(run.config).items() if key not in ("run.seed", "run.dir")}
        groups.setdefault(str(config) if config else str(k), []).append(run)
    return list(groups.values())


def over_seeds(runs: Sequence[Run], name: str) -> str:
    """Returns a metric's interquartile mean after training, with its 95 % interval if there are several runs."""
    factor, unit = (100, " %") if name in SHARES else (1, "")
    values = [factor * run.after[name] for run in runs if name in run.after]
    low, high = iqm_interval(values) if values else (0.0, 0.0)
    return (f"{iqm(values):.4g}{unit}" + f" [{low:.4g}, {high:.4g}]" * (len(values) > 1)) if values else "-"


def _value(name: str, value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" if name in SHARES else f"{value:.4g}"


def _drawn(figure: Figure | None, title: str) -> str:
    return "" if figure is None else f"<figure>{svg(figure, escape(title))}</figure>"


# ------------------------------------------------------------------------------------------------------------- sections
def outcome(run: Run) -> str:
    """Returns the outcome: state, metrics before and after, seconds, digest of the weights."""
    number = run.num_iterations
    kept = f"Finished after {number} iterations. Weights: {kept_weights(run.kept, number)}."
    state = kept if run.finished else f"Not finished: {number} iterations."
    text = f"<p><b>{state}</b></p>"
    text += missing(f"{', '.join(run.missing)} in the run folder") if run.missing else ""
    warning = idle_warning([row.get("rollout/useful_groups") for row in run.metrics])
    warnings = [warning] if warning else []
    warnings += [f"evaluation after: {escape(text)}" for text in run.after.get("warnings", ())]
    text += "".join(f"<p><b>Warning</b>: {warning}</p>" for warning in warnings)
    if best := run.summary.get("best"):
        note = run.summary.get("best_note", "biased upwards")
        text += f"<p>The best score on the way, {best['score']:.4g}, is {note}.</p>"
    if not run.before and not run.rates:
        return text + missing("no evaluation has been written, and no iteration was finished")
    names = dict.fromkeys([*run.rates, *(name for name in ("return", "reward") if name in run.before)])
    rows = [[name, measured(run.before, name), latest(run, name)] for name in names]
    rows += _sampled(run.after.get("sampled", {}), names)
    text += table(["metric (95 % interval of held-out evaluation)", "before", "after" if run.after else "now"], rows)
    if not run.summary:
        return text
    per_iteration, minutes = run.summary["measured_s_per_iteration"], run.summary["rl_s"] / 60
    digest = escape(str(run.summary.get("weights_sha256", ""))[:16])
    return f"{text}<p>{per_iteration:.2f} s per iteration, {minutes:.1f} minutes of training, weights {digest}</p>"


def _sampled(result: Mapping[str, Any], names: Iterable[str]) -> list[list[str]]:
    """Returns a row for the last evaluation's episodes with sampled actions; [] if there are none."""
    for name in (name for name in names if f"{name}_difference" in result):
        factor, unit = (100, " points") if name in SHARES else (1, "")
        change, low, high = (factor * x for x in (result[f"{name}_difference"], *result[f"{name}_difference_interval"]))
        than = f"{change:+.3g}{unit} [{low:+.3g}, {high:+.3g}] compared with greedy actions"
        return [[f"{name} with sampled actions", "-", f"{measured(result, name)}, {than}"]]
    return []


def settings(run: Run) -> str:
    """Returns the command, and the settings that differ from its defaults."""
    command = " ".join(["python", *map(str, run.manifest.get("command", []))])
    text = f"<pre>{escape(command)}</pre>" if run.manifest else missing("manifest.json, which holds the command")
    if not run.config:
        return text + missing("config.yaml")
    defaults = compose_math([]) if "generation" in run.config else compose_train([])
    config, usual = flat(run.config), flat(yaml.safe_load(to_yaml(defaults)))
    rows = [[key, value, usual.get(key, "-")] for key, value in config.items() if usual.get(key) != value]
    text += f"<p>{len(rows)} of {len(config)} keys differ from the defaults of this checkout; config.yaml has all.</p>"
    return text + (table(["key", "value", "default"], rows) if rows else "")


def plan(run: Run) -> str:
    """Returns the plan, with predicted and measured seconds of its stages and iterations."""
    if not run.plan:
        return missing("plan.json: no plan was chosen yet")
    number = run.plan.get("num_devices")
    text = f"<p>Plan <b>{escape(str(run.plan.get('name')))}</b> on {number} device{'s'[: number != 1]}.</p>"
    rows = []
    for period in run.plan_report.get("periods", []):
        first, number = period["first_iteration"] + 1, period["num_iterations"]
        for name, seconds in period["measured_s"].items():
            expected, error = period["predicted_s"].get(name), period["error"].get(name)
            pair = [f"{expected:.3g}" if expected is not None else "-", f"{seconds:.3g}"]
            off = f"{error:+.1%}" if error is not None else "-"
            rows.append([f"{number} from {first} on" if name == "iteration" else "", name, *pair, off])
    if not rows:
        return text + missing("measured iterations in plan_report.json (it is written when a run ends)")
    return text + table(["iterations", "stage", "predicted s", "measured s (median)", "error"], rows)


def curves(runs: Sequence[Run]) -> str:
    """Returns learning curves with 95 % intervals: sampled during training, and greedy on held-out episodes."""
    charts, groups = "", by_configuration(runs)
    for name in dict.fromkeys(name for run in runs for name in run.rates):
        lines: list[Line] = []
        for k, group in enumerate(groups):
            colour, label = COLOURS[k % len(COLOURS)], group[0].folder.name if len(runs) > 1 else ""
            of_run = rate_lines(group[0], name, colour, label)
            lines += of_run if len(group) == 1 else [seeds_line(group, name, colour)]
        label, moment = f"{name}, %" if name in SHARES else name, kept_moment(runs[0]) if len(runs) == 1 else None
        charts += _drawn(line_chart(lines, runs[0].unit, label, moment=moment), name)
    completions = " (completions of one problem count once)" if "accuracy" in runs[0].rates else ""
    note = (
        "<p>Lines: sampled in training, five iterations pooled, with the 95 % interval of their number"
        f"{completions}. Marks: held-out evaluation, with its interval. Drag to zoom, double-click to zoom out.</p>"
    )
    return note + charts if charts else missing("no success or accuracy was written")


def system_load(run: Run) -> str:
    """Returns CPU and memory in use on the driver's machine during training, in per cent; "" if not measured."""
    lines = [
        Line(f"{label} in use", [(x, 100 * y) for x, y in run.column(f"system/{name}")], colour)
        for name, label, colour in zip(("cpu", "memory"), ("cores", "memory"), COLOURS, strict=False)
    ]
    note = "<p>Of the machine that ran the command, including all its other processes.</p>"
    return note + chart if (chart := _drawn(line_chart(lines, run.unit, "%", (7.6, 2.0)), "system load")) else ""


def videos(run: Run, budget_bytes: int) -> str:
    """Returns videos of at most `budget_bytes`: each seed's first and last side by side, changed outcomes first."""
    files = sorted((run.folder / "videos").glob("step_*/*.mp4"), key=lambda file: (_step(file), file.name))
    if not files:
        wanted = run.config.get("eval", {}).get("record_video")
        return missing("no videos: none was recorded yet, or the env cannot render") if wanted else ""
    ends = {_step(files[0]), _step(files[-1])}
    rows: dict[tuple[int, str], list[Path]] = {}  # by step, and by task and seed
    for file in files:
        rows.setdefault((0 if _step(file) in ends else _step(file), file.stem.rsplit("--", 1)[0]), []).append(file)
    html, left_out, used = "", [], 0
    for key in sorted(rows, key=lambda key: (key[0], _change(rows[key]), key[1])):
        size = sum(file.stat().st_size * 4 // 3 for file in rows[key])  # as base64
        if used + size > budget_bytes:
            left_out += [f"{file.parent.name}/{file.name}" for file in rows[key]]
            continue
        used += size
        html += f'<div class="films">{"".join(_film(run, file) for file in rows[key])}</div>'
    rest = missing(f"{len(left_out)} videos beyond videos_mb: {', '.join(left_out)}") if left_out else ""
    return f"{html}{rest}"


def _step(file: Path) -> int:
    return int(file.parent.name.removeprefix("step_"))


def _change(files: Sequence[Path]) -> int:
    """Returns the rank of a seed's videos: failure to success, then success to failure, then unchanged."""
    first, last = (file.stem.endswith("--success=1") for file in (files[0], files[-1]))
    return 2 if first == last else 0 if last else 1


def _film(run: Run, file: Path) -> str:
    """Returns a video with its caption and plots of its actions and states."""
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    when = "before" if _step(file) == 0 else f"iteration {_step(file)}"
    title = escape(f"{'after' if run.finished and _step(file) == run.num_iterations else when}: {file.stem}")
    video = f'<video controls loop muted playsinline width="320" src="data:video/mp4;base64,{data}"></video>'
    traces, place = _traces(file.with_suffix(".npz")), _place(run, f"{file.parent.name}/{file.name}")
    return f'<figure id="{place}">{video}<figcaption>{title}</figcaption>{traces}</figure>'


def _place(run: Run, video: str) -> str:
    return quote(f"{run.folder.name}/{video}")


def episodes(run: Run, videos: str) -> str:
    """Returns every episode of the last and the first evaluation, failures first, with links to `videos`."""
    path = run.folder / "episodes.csv"
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", newline="") as file:
        written = [row for row in csv.DictReader(file) if None not in row.values()]  # the last may be half written
    numbers = [int(row["iteration"]) for row in written]
    rows = [row for row in written if int(row["iteration"]) in (max(numbers), min(numbers))]
    rows.sort(key=lambda row: (-int(row["iteration"]), *(float(row.get(name) or 0) for name in _BY)))
    head = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    for row in rows:
        place = _place(run, row["video"])
        row["video"] = f"#{place}" if f'id="{place}"' in videos else ""
        row |= {name: f"{float(row[name]):.4g}" for name in ("return", "reward") if row.get(name)}
    return table(head, ([row[name] for name in head] for row in rows), "wide sorts") if rows else ""


def _traces(path: Path) -> str:
    if not path.is_file():
        return ""
    charts = ""
    with np.load(path) as arrays:
        actions = arrays["actions"]
        kinds = {"action": (actions, range(len(actions))), "state": (arrays["state"], arrays["step"])}
        for kind, (values, steps) in kinds.items():
            lines = [
                Line(f"_none{kind}[{k}]", list(zip(steps, column, strict=True)), COLOURS[k % len(COLOURS)], width=0.8)
                for k, column in enumerate(values.T[:_MOST_TRACES])
            ]
            charts += _drawn(line_chart(lines, "", kind, size=(3.3, 1.2)), f"{kind}s of {path.stem}")
    return charts


def evaluations(run: Run) -> str:
    """Returns every evaluation and check in order; for a check that ended early, the highest possible share."""
    others = [name for name in ("return", "reward", "episode_len", "length") if name in run.before]
    names = list(dict.fromkeys([*run.rates, *others]))
    rows = [["before", "0", *(measured(run.before, name) for name in names)]] if run.before else []
    for row in run.metrics:
        for kind in ("eval", "check"):
            values = [_value(name, row.get(f"{kind}/{name}")) for name in names]
            bounds = [_value(name, row.get(f"{kind}/{name}_at_most")) for name in names]
            pairs = zip(values, bounds, strict=True)
            cells = [value if bound == "-" else f"at most {bound}" for value, bound in pairs]
            if set(cells) - {"-"}:
                rows.append([kind, str(row["iteration"]), *cells])
    if run.after:
        rows.append(["after", str(run.kept), *(measured(run.after, name) for name in names)])
    return table(["evaluation", "iteration", *names], rows) if rows else missing("nothing was evaluated yet")


def versions(run: Run) -> str:
    """Returns seed, revision, hardware and versions of libraries."""
    if not run.manifest:
        return missing("manifest.json")
    facts = {"seed": run.manifest.get("seed"), "git revision": run.manifest.get("git_revision")}
    facts |= {**run.manifest.get("hardware", {}), **run.manifest.get("versions", {})}
    return table(["", ""], [[name, str(value)] for name, value in facts.items()])
