"""Profiles: what is read between the points, and what a file may not say."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_cases import profile, stage

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.planning.profile import FORMAT, interpolate, load_profile, parse_profile, workflow_for

PROFILES = sorted((Path(__file__).resolve().parents[2] / "configs" / "profiles").glob("*.json"))


def data(**changes) -> dict:
    entry = {
        "items_per_device": [1, 2, 4],
        "devices": [1, 4],
        "s_per_call": [[1.0, 2.0], [2.0, 3.0], [6.0, 9.0]],
        **changes,
    }
    return {"format": FORMAT, "name": "test", "device_kind": "gpu", "stages": {"a": entry}}


def test_between_points_lines_beyond_them_the_last_slope() -> None:
    xs, ys = np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 6.0])
    assert [interpolate(x, xs, ys) for x in (0.5, 1.0, 1.5, 3.0, 4.0, 6.0)] == [1.0, 1.0, 1.5, 4.0, 6.0, 10.0]
    # what fell at the end does not keep falling
    assert [interpolate(x, np.array([1.0, 2.0]), np.array([5.0, 4.0])) for x in (2.0, 9.0)] == [4.0, 4.0]


def test_both_axes_are_interpolated() -> None:
    measured = parse_profile(data()).stages["a"]
    assert measured.call_s(3, 1) == pytest.approx(4.0)  # halfway between 2 and 6
    assert measured.call_s(2, 2) == pytest.approx(2 + 1 / 3)  # a third of the way from 1 to 4 devices
    assert [measured.call_s(1, 4), measured.call_s(6, 1)] == [2.0, 10.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"s_per_call": [[1.0, -2.0], [2.0, 3.0], [6.0, 9.0]]}, r"stages\.a\.s_per_call is -2\.0, .* not negative"),
        ({"s_per_call": [[1.0], [2.0], [6.0]]}, r"a table of 3 rows \(items_per_device\) and 2 columns"),
        ({"ms_per_call": [[1.0]]}, r"a\.ms_per_call is unknown: did you mean s_per_call\? times are in seconds"),
        ({"resident_gb": 3.0}, r"a\.resident_gb is unknown: .*sizes in bytes"),
        ({"offload_s": float("nan")}, r"a\.offload_s is nan"),
        ({"items_per_device": [2, 1, 4]}, r"an ascending list of positive numbers"),
        ({"s_per_chunk_step": 1.0}, r"needs one of s_per_call, s_per_chunk_step"),
        ({"finish_quantiles": [[0.5, 0.2], [1.0, 0.9]]}, r"end at \[1, 1\]"),
        ({"items_per_device": [1], "s_per_call": [[1.0, 2.0]]}, "a slope needs two points"),
    ],
)
def test_a_broken_stage_names_the_key_and_the_rule(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_profile(data(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": np.full((3, 2), np.nan)}, r"stages\.a\.s_per_call is .*nan.*, .* not negative"),
        ({"offload_s": float("inf")}, r"stages\.a\.offload_s is inf"),
        ({"kind_factors": {"h200": -0.5}}, r"kind_factors\.h200 is -0\.5"),
        ({"stays": 1}, "true or false"),
    ],
)
def test_a_stage_that_code_makes_is_checked_as_one_of_a_file(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(parse_profile(data()).stages["a"], **changes)


def test_a_missing_stage_and_one_measured_otherwise_are_named() -> None:
    measured = profile({"env": stage(1, 1, loop=True), "actor": stage(1, 1)})
    with pytest.raises(ConfigError, match=r"has the stage 'policy', but the profile holds only \['actor', 'env'\]"):
        measured.require(["env", "policy"], ["env", "policy"])
    with pytest.raises(ConfigError, match="'actor' has s_per_call, but the workflow uses it inside a loop"):
        measured.require(["actor"], ["actor"])


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_published_profile_loads_names_its_sources_and_fits_its_workflow(path: Path) -> None:
    measured = load_profile(path)
    written = json.dumps(measured.to_dict())
    assert json.dumps(parse_profile(json.loads(written)).to_dict()) == written
    work = workflow_for(measured)
    inside = [end for loop in work.loops.values() for end in (loop.opener, loop.answerer)]
    measured.require(work.stages, inside)
    assert {"workload", "frozen"} <= set(measured.sources)
    assert len(measured.sources) >= 5
