"""Sections of a run's page, as HTML; each says what is missing of what it shows."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import yaml

from rlinf_embodied.compose import compose_math, compose_train, to_yaml
from rlinf_embodied.telemetry.metrics import idle_warning, percent
from rlinf_embodied.telemetry.plots import COLOURS, kept_moment, line_chart, rate_lines, svg
from rlinf_embodied.telemetry.run_reader import SHARES, Run, kept_weights, pooled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --------------------------------------------------------------------------------------------------------------- pieces
def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells are text."""
    cells = lambda row, tag: "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)  # noqa: E731
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def missing(why: str) -> str:
    """Returns a remark on what is missing."""
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
    """Returns a metric after training; of a run that did not end, its rate in the last iterations."""
    if run.after:
        return measured(run.after, name)
    last = pooled(run, name)[-1:]
    return f"{100 * last[0][1]:.1f} % in the last iterations (sampled)" if last else "-"


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


def _value(name: str, value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" if name in SHARES else f"{value:.4g}"


def _drawn(figure: Figure | None, title: str) -> str:
    return "" if figure is None else f"<figure>{svg(figure, escape(title))}</figure>"


# ------------------------------------------------------------------------------------------------------------- sections
def outcome(run: Run) -> str:
    """What came of it: state, metrics before and after, seconds, digest of the weights."""
    number = run.num_iterations
    kept = f"Finished after {number} iterations. Weights: {kept_weights(run.kept, number)}."
    state = kept if run.finished else f"Not finished: {number} iterations."
    text = f"<p><b>{state}</b></p>"
    text += missing(f"{', '.join(run.missing)} in the run folder") if run.missing else ""
    warning = idle_warning([row.get("rollout/useful_groups") for row in run.metrics])
    warned = [warning] if warning else []
    warned += [f"evaluation after: {escape(text)}" for text in run.after.get("warnings", ())]
    text += "".join(f"<p><b>Warning</b>: {one}</p>" for one in warned)
    if best := run.summary.get("best"):
        note = run.summary.get("best_note", "biased upwards")
        text += f"<p>The best score on the way, {best['score']:.4g}, is {note}.</p>"
    if not run.before and not run.rates:
        return text + missing("no evaluation has been written, and no iteration was finished")
    names = dict.fromkeys([*run.rates, *(name for name in ("return", "reward") if name in run.before)])
    rows = [[name, measured(run.before, name), latest(run, name)] for name in names]
    text += table(["metric (95 % interval of held-out evaluation)", "before", "after" if run.after else "now"], rows)
    if not run.summary:
        return text
    per_iteration, minutes = run.summary["measured_s_per_iteration"], run.summary["rl_s"] / 60
    digest = escape(str(run.summary.get("weights_sha256", ""))[:16])
    return f"{text}<p>{per_iteration:.2f} s per iteration, {minutes:.1f} minutes of training, weights {digest}</p>"


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


def plan(run: Run) -> str:
    """The plan, and what its stages and iterations were predicted to take and took."""
    if not run.plan:
        return missing("plan.json: no plan was chosen yet")
    text = f"<p>Plan <b>{escape(str(run.plan.get('name')))}</b> on {run.plan.get('num_devices')} devices.</p>"
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
    """Learning curves with 95 % intervals: sampled during training, and greedy on held-out episodes."""
    charts = ""
    for name in dict.fromkeys(name for run in runs for name in run.rates):
        labels = [run.folder.name if len(runs) > 1 else "" for run in runs]
        lines = [
            line for k, run in enumerate(runs) for line in rate_lines(run, name, COLOURS[k % len(COLOURS)], labels[k])
        ]
        label, moment = f"{name}, %" if name in SHARES else name, kept_moment(runs[0]) if len(runs) == 1 else None
        charts += _drawn(line_chart(lines, runs[0].unit, label, moment=moment), name)
    note = (
        "<p>Lines: sampled in training, five iterations pooled, with the 95 % interval of their number "
        "(completions of one problem count once). Marks: held-out evaluation, with its interval.</p>"
    )
    return note + charts if charts else missing("no success or accuracy was written")


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
        data = base64.b64encode(file.read_bytes()).decode("ascii")
        video = f'<video controls loop muted playsinline width="320" src="data:video/mp4;base64,{data}"></video>'
        title = escape(f"{file.parent.name.replace('_', ' ')}: {file.stem}")
        shown.append(f"<figure>{video}<figcaption>{title}</figcaption></figure>")
    rest = missing(f"{len(left_out)} videos beyond videos_mb: {', '.join(left_out)}") if left_out else ""
    return f'<div class="films">{"".join(shown)}</div>{rest}'


def evaluations(run: Run) -> str:
    """Every evaluation and check, in order; if a check ended early, the highest share still possible."""
    others = [name for name in ("return", "reward", "episode_len", "length") if name in run.before]
    names = list(dict.fromkeys([*run.rates, *others]))
    rows = [["before", "0", *(measured(run.before, name) for name in names)]] if run.before else []
    for row in run.metrics:
        for kind in ("eval", "check"):
            found = [_value(name, row.get(f"{kind}/{name}")) for name in names]
            most = [_value(name, row.get(f"{kind}/{name}_at_most")) for name in names]
            cells = [value if bound == "-" else f"at most {bound}" for value, bound in zip(found, most, strict=True)]
            if set(cells) - {"-"}:
                rows.append([kind, str(row["iteration"]), *cells])
    if run.after:
        rows.append(["after", str(run.kept), *(measured(run.after, name) for name in names)])
    return table(["evaluation", "iteration", *names], rows) if rows else missing("nothing was evaluated yet")


def versions(run: Run) -> str:
    """Seed, revision, hardware and libraries."""
    if not run.manifest:
        return missing("manifest.json")
    facts = {"seed": run.manifest.get("seed"), "git revision": run.manifest.get("git_revision")}
    facts |= {**run.manifest.get("hardware", {}), **run.manifest.get("versions", {})}
    return table(["", ""], [[name, str(value)] for name, value in facts.items()])
