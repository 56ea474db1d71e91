"""A self-contained HTML page of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rlinf_embodied.reporting import sections
from rlinf_embodied.reporting.sections import measured, missing, table
from rlinf_embodied.telemetry.run_reader import Run

_STYLE = """
body { font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; max-width: 980px; margin: 0 auto; padding: 24px; }
h2 { margin: 40px 0 4px; border-bottom: 2px solid #1f5f8b; } h3 { margin: 28px 0 6px; } nav a { margin-right: 14px; }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid #dde2e6; vertical-align: top; }
.sorts { max-height: 420px; overflow-y: auto; }
.sorts th { position: sticky; top: 0; background: #fff; cursor: pointer; }
td { overflow-wrap: break-word; } td:first-child { white-space: nowrap; }
pre { background: #f3f5f7; padding: 8px 10px; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
svg { max-width: 100%; height: auto; display: block; } figure { margin: 0; } figcaption { font-size: 12px; }
.missing { background: #fff6e0; padding: 4px 10px; border-left: 3px solid #e0a800; }
.films { display: flex; flex-wrap: wrap; gap: 14px; margin-bottom: 12px; } .films figcaption { max-width: 320px; }
svg[data-points] { cursor: crosshair; touch-action: none; }
#point { position: fixed; display: none; background: #222; color: #fff; padding: 2px 7px; font-size: 12px; }
"""
_SCRIPT = """
const note = document.getElementById("point");
for (const svg of document.querySelectorAll("svg[data-points]")) {  // point: nearest value; drag: zoom; double: back
  const points = JSON.parse(svg.dataset.points), whole = svg.getAttribute("viewBox");
  const place = e => new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse());
  let from = null;
  svg.onpointerdown = e => { from = place(e); };
  svg.onpointerup = e => {
    const to = place(e), w = Math.abs(to.x - from.x), h = Math.abs(to.y - from.y);
    if (w > 5 && h > 5) svg.setAttribute("viewBox", [Math.min(to.x, from.x), Math.min(to.y, from.y), w, h].join(" "));
  };
  svg.ondblclick = () => svg.setAttribute("viewBox", whole);
  svg.onpointerleave = () => { note.style.display = "none"; };
  svg.onpointermove = e => {
    const at = place(e), far = p => Math.hypot(p[0] - at.x, p[1] - at.y);
    if (!points.length) return;
    note.textContent = points.reduce((a, b) => far(a) < far(b) ? a : b)[2];
    note.style.cssText = `display: block; left: ${e.clientX + 12}px; top: ${e.clientY + 12}px`;
  };
}
for (const head of document.querySelectorAll(".sorts th")) head.onclick = () => {  // sort by a column; again: reversed
  const body = head.closest("table").tBodies[0], text = row => row.cells[head.cellIndex].textContent;
  const up = head.dataset.up = head.dataset.up === "1" ? "" : "1";
  const compare = (a, b) => a - b || a.localeCompare(b);  // numbers, or NaN and then text
  body.append(...[...body.rows].sort((a, b) => compare(text(a), text(b)) * (up ? 1 : -1)));
};
for (const film of document.querySelectorAll(".films")) {  // videos of a seed play together, with their charts' cursors
  const videos = [...film.querySelectorAll("video")];
  for (const video of videos) {
    const others = videos.filter(v => v !== video);
    video.onplay = () => others.forEach(v => { if (v.paused) { v.currentTime = video.currentTime; v.play(); } });
    video.onpause = () => others.forEach(v => v.pause());
    const cursors = [...video.parentElement.querySelectorAll("svg")].map(svg => {
      const line = svg.appendChild(document.createElementNS(svg.namespaceURI, "path"));
      line.setAttribute("stroke", "#444");
      return [line, JSON.parse(svg.dataset.axis), svg.viewBox.baseVal.height];
    });
    video.ontimeupdate = () => cursors.forEach(([line, [low, high], height]) =>
      line.setAttribute("d", `M${low + (high - low) * video.currentTime / video.duration} 0V${height}`));
  }
}
"""


def page(runs: Sequence[Run], video_bytes: int) -> str:
    """Returns the page of one run, or of several with a comparison first; videos take at most `video_bytes`."""
    several = len(runs) > 1
    title = f"{len(runs)} runs compared" if several else runs[0].folder.name
    parts = [f"<h1>{escape(title)}</h1>"]
    if several:
        links = "".join(f'<a href="#run-{k}">{escape(run.folder.name)}</a>' for k, run in enumerate(runs))
        parts += [f"<nav>{links}</nav>", comparison(runs)]
    for k, run in enumerate(runs):
        head = f'<h2 id="run-{k}">{escape(run.folder.name)}</h2>' if several else ""
        parts.append(head + _run(run, video_bytes // len(runs)))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"<style>{_STYLE}</style>"
    tail = f'<div id="point"></div><script>{_SCRIPT}</script>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}{tail}</body></html>\n'


def comparison(runs: Sequence[Run]) -> str:
    """Returns the comparison of runs: outcomes, curves, and the settings that differ."""
    names = list(dict.fromkeys(name for run in runs for name in run.rates))
    rows = []
    for run in runs:
        cells = [text for name in names for text in (measured(run.before, name), sections.latest(run, name))]
        per_iteration = run.summary.get("measured_s_per_iteration")
        speed = f"{per_iteration:.2f}" if per_iteration else "-"
        state = "finished" if run.finished else "unfinished"
        rows.append([run.folder.name, state, str(run.num_iterations), *cells, str(run.plan.get("name", "-")), speed])
    rate_heads = [head for name in names for head in (f"{name} before", "after")]
    outcomes = table(["run", "state", "iterations", *rate_heads, "plan", "s/iteration"], rows)
    units = sorted({run.unit for run in runs if run.metrics})
    no_curves = missing(f"one axis for runs that count {' and '.join(units)}; see each run's own curves")
    curves = no_curves if len(units) > 1 else sections.curves(runs)
    parts = {"Outcome": outcomes, "Over seeds": _over_seeds(runs), "Learning curves": curves}
    return _headed(parts | {"Settings that differ": _differences(runs)})


def _over_seeds(runs: Sequence[Run]) -> str:
    """Returns the interquartile mean over the seeds of each configuration; "" if no two runs differ only by seed."""
    groups = sections.by_configuration(runs)
    if max(map(len, groups)) < 2:
        return ""
    names, rows = list(dict.fromkeys(name for run in runs for name in run.rates)), []
    for group in groups:
        cells = (sections.over_seeds(group, name) for name in names)
        rows.append([", ".join(run.folder.name for run in group), str(len(group)), *cells])
    head = ["runs of one configuration", "seeds", *(f"{name} after: interquartile mean" for name in names)]
    return table(head, rows) + "<p>Intervals: 95 %, seeds resampled with replacement.</p>"


def _differences(runs: Sequence[Run]) -> str:
    """Returns the keys that all runs have and whose values differ, except the run folder."""
    configs = [sections.flat(run.config) for run in runs]
    shared = [key for key in configs[0] if key != "run.dir" and all(key in config for config in configs)]
    rows = [[key, *(config[key] for config in configs)] for key in shared]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return table(["key", *(run.folder.name for run in runs)], rows) if rows else "<p>None.</p>"


def _run(run: Run, video_bytes: int) -> str:
    videos = sections.videos(run, video_bytes)
    return _headed(
        {
            "Outcome": sections.outcome(run),
            "Configuration": sections.settings(run),
            "Plan": sections.plan(run),
            "Learning curves": sections.curves([run]),
            "System load": sections.system_load(run),
            "Videos": videos,
            "Evaluations": sections.evaluations(run),
            "Episodes": sections.episodes(run, videos),
            "Versions and hardware": sections.versions(run),
        }
    )


def _headed(parts: dict[str, str]) -> str:
    return "".join(f"<section><h3>{name}</h3>{text}</section>" for name, text in parts.items() if text)
