"""The phase diagram of plans says what the planner says, and what is published of it is of the frozen profile."""

from __future__ import annotations

import json
import math

import pytest
from conftest import REPOSITORY

from experiments.bench.planner import phases
from experiments.bench.planner.published import frozen, h100, pricer_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.planning.plan import Leaf, LoopNode, Temporal
from rlinf_embodied.planning.planner import Mode, find_plans

PROFILE = frozen(phases.PROFILE)


@pytest.fixture(scope="module")
def lines() -> dict[Mode, phases.Lines]:
    return phases.lines_of(PROFILE, 8)


def test_without_the_cost_the_winner_is_the_planners(lines) -> None:
    best = find_plans(pricer_of(PROFILE, h100(8)))[0]
    assert lines[phases.winner(lines, 0.0)].at(0.0) == pytest.approx(best.iteration_s)


def test_only_plans_whose_loop_shares_devices_pay_the_cost(lines) -> None:
    turns, hybrid = lines[Mode.temporal], lines[Mode.hybrid]
    assert turns.at(1.0) - turns.at(0.0) == pytest.approx(80.0)  # chunk-steps
    assert hybrid.at(1.0) == hybrid.at(0.0)
    sides = Leaf("env", (0, 1)), Leaf("policy", (1, 2))
    assert phases.shares(Temporal((LoopNode("rollout", sides, 1), Leaf("actor", (0,)))))
    assert not phases.shares(Temporal((LoopNode("rollout", (sides[0], Leaf("policy", (2,))), 1), Leaf("actor", (0,)))))


def test_the_winner_turns_where_the_margin_is_none(lines) -> None:
    turn = phases.cost_for(lines, 1.0)
    assert phases.winner(lines, turn - 1e-6) is Mode.temporal
    assert phases.winner(lines, turn + 1e-6) is Mode.hybrid
    cost = phases.cost_for(lines, 1.5)
    assert lines[Mode.temporal].at(cost) == pytest.approx(1.5 * lines[Mode.hybrid].at(cost))


def test_a_profile_with_its_own_numbers_is_itself_and_each_change_moves_only_its_own() -> None:
    env, policy = PROFILE.stages["env"], PROFILE.stages["policy"]
    assert phases.fixed_s(env) == pytest.approx(0.2)
    slower = phases.with_fixed(PROFILE, 0.7)
    assert slower.stages["env"].seconds - env.seconds == pytest.approx(0.5)
    assert slower.stages["policy"] is policy
    larger = phases.with_weights(PROFILE, 2.0)
    assert larger.stages["policy"].resident_bytes == pytest.approx(2.0 * policy.resident_bytes)
    assert larger.stages["env"] is env
    assert math.isinf(phases.lines_of(phases.with_weights(PROFILE, 4.0), 8)[Mode.temporal].at(0.0))  # beyond 80 GB


def test_the_published_numbers_are_those_of_the_frozen_profile(lines) -> None:
    content = json.loads((REPOSITORY / "docs/results/phases.json").read_text())
    found = {str(margin): phases.cost_for(lines, margin) for margin in (1.0, *phases.MARGINS)}
    assert content["cost_s_by_margin"] == pytest.approx(found)
    text = (REPOSITORY / "docs/results/planning.md").read_text()
    assert all(f"| {found[margin]:.2f} |" in text for margin in found)


def test_a_diagram_is_drawn_and_nodes_are_whole(tmp_path) -> None:
    out = tmp_path / "phases.json"
    assert phases.BENCHMARK.main(["rows=2", "columns=3", f"out={out}"]) == 0
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert [row["value"] for row in json.loads(out.read_text())["rows"]["bytes of the policy, x 16 GB"]] == [0.5, 4.0]
    with pytest.raises(ConfigError, match="gpus is 12"):
        phases.measure(phases.Run(phases.Options(gpus=12), [], {}))
