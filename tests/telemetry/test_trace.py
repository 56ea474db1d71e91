from __future__ import annotations

import json
import subprocess
import sys

from rlinf_embodied.telemetry.plots import gantt
from rlinf_embodied.telemetry.trace import Span, busy_seconds, stage_seconds, trace_events, write_trace


def make_spans() -> list[Span]:
    return [
        Span("env.step", "env", 0, "cpu:0", 100.0, 100.5, {"iteration": 3}),
        Span("policy.step", "policy", 1, "cpu:1", 100.5, 100.75),
        Span("env.step", "env", 0, "cpu:0", 101.0, 102.0),
    ]


def test_busy_seconds_add_up_by_worker_and_stage():
    assert busy_seconds(make_spans()) == {(0, "env"): 1.5, (1, "policy"): 0.25}


def test_the_busiest_worker_counts_for_a_stage():
    spans = [Span("env.step", "env", 0, "cpu", 0.0, 1.0, {}), Span("env.step", "env", 1, "cpu", 0.0, 1.5, {})]
    spans += [Span("env.step", "env", 0, "cpu", 2.0, 3.0, {}), Span("actor.run", "actor", 1, "cpu", 3.0, 3.25, {})]
    assert stage_seconds(spans) == {"time/env_s": 2.0, "time/actor_s": 0.25}


def test_the_trace_is_what_perfetto_reads(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, make_spans())
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {
        ("process_name", 0, "worker 0 (cpu:0)"),
        ("process_name", 1, "worker 1 (cpu:1)"),
        ("thread_name", 0, "env"),
        ("thread_name", 1, "policy"),
    }
    complete = [e for e in events if e["ph"] == "X"]
    # microseconds since the first span
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in complete] == [
        ("env.step", 0, 0.0, 5e5),
        ("policy.step", 1, 5e5, 2.5e5),
        ("env.step", 0, 1e6, 1e6),
    ]
    assert complete[0]["args"] == {"iteration": 3}
    assert complete[0]["tid"] == complete[2]["tid"] != complete[1]["tid"]


def test_an_empty_run_has_an_empty_trace_and_plot(tmp_path):
    assert trace_events([])["traceEvents"] == []
    gantt("", []).savefig(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_spans_are_plain_data_without_torch_ray_or_matplotlib():
    code = (
        "import sys, rlinf_embodied.telemetry.trace\n"
        "print([m for m in ('torch', 'ray', 'matplotlib', 'omegaconf') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"
