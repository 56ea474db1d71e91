"""The graph of training, dynamic sampling, and the means that the driver forms."""

from __future__ import annotations

import json
from functools import partial

import av
import numpy as np
import pytest
from runs import GRPO, tiny

from rlinf_embodied.algorithms.batch import RolloutReport
from rlinf_embodied.config.algorithm import Resampling
from rlinf_embodied.data.lerobot_writer import write_video
from rlinf_embodied.embodied.outcome import episode_means
from rlinf_embodied.embodied.workflow import kept_groups, training_workflow
from rlinf_embodied.interfaces.envs import EpisodeEnd
from rlinf_embodied.telemetry.metrics import read_metrics
from rlinf_embodied.telemetry.plots import plot_curve


def report(groups: dict[int, tuple[float, ...]]) -> RolloutReport:
    return RolloutReport((), 0, groups)


def test_only_groups_whose_members_differ_are_useful() -> None:
    decide = partial(kept_groups, Resampling(num_groups=4, min_groups=2, drop=True, max_rounds=3))
    first = [report({2: (True, True), 3: (False, True)}), report({0: (False, False), 1: (False, False)})]
    decision = decide([first])
    assert (decision.enough, decision.message) == (False, ((0, 3),))
    second = [report({0: (True, False), 1: (True, True), 2: (True, False), 3: (False, True)})]
    decision = decide([first, second])
    assert (decision.enough, decision.message) == (True, ((0, 3), (1, 0), (1, 2), (1, 3)))


def test_no_more_groups_are_trained_on_than_a_round_has() -> None:
    decide = partial(kept_groups, Resampling(num_groups=2, min_groups=1, drop=True, max_rounds=3))
    mixed: dict[int, tuple[float, ...]] = {0: (True, False), 1: (False, True)}
    assert decide([[report(mixed)], [report(mixed)]]).message == ((0, 0), (0, 1))


def test_grpo_repeats_its_rollout_and_ppo_does_not() -> None:
    ppo, grpo = training_workflow(tiny(), "x"), training_workflow(tiny(*GRPO), "x")
    assert ppo.repeat is None
    assert grpo.repeat is not None
    assert grpo.repeat.max_rounds == 3  # one, and two resamples
    assert grpo.stages["env"].config.group_size == 4  # pyright: ignore[reportAttributeAccessIssue]
    fixed = training_workflow(tiny(*GRPO, "algorithm.drop_zero_variance_groups=false"), "x")
    assert fixed.repeat is not None
    assert fixed.repeat.max_rounds == 1
    assert {edge.source for edge in ppo.edges} == {"env", "policy"}
    assert [(edge.source, edge.target) for edge in ppo.weight_edges] == [("actor", "policy")]


def test_means_are_over_episodes() -> None:
    episodes = [
        EpisodeEnd(0, 1, {"success_once": 1.0, "return": 2.0}),
        EpisodeEnd(3, 2, {"success_once": 0.0, "return": 5.0}),
    ]
    assert episode_means(episodes) == {"success_once": 0.5, "return": 3.5}
    assert episode_means([]) == {}


# ------------------------------------------------------------------------------------------------------------ images
def both(place: str, once: float, at_end: float) -> dict[str, float]:
    return {f"{place}/success_once": once, f"{place}/success_at_end": at_end}


def test_a_curve_is_drawn_from_whatever_a_run_has_so_far(tmp_path) -> None:
    assert read_metrics(tmp_path) == []
    rows = [
        {"iteration": k, "global_step": 8 * k, "time/total_s": 60.0 * k, "rollout/episodes": 4}
        | both("rollout", k / 10, k / 20)
        for k in (1, 2, 3)
    ]
    rows[1] |= both("check", 0.4, 0.3)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    unfinished = plot_curve(tmp_path).read_bytes()
    assert unfinished.startswith(b"\x89PNG")
    ends = {"success_once": 0.5, "success_once_interval": [0.4, 0.6]}
    ends |= {"success_at_end": 0.3, "success_at_end_interval": [0.2, 0.4]}
    (tmp_path / "summary.json").write_text(json.dumps({"before": ends, "after": ends}))
    assert plot_curve(tmp_path).read_bytes() != unfinished


def test_an_mp4_has_a_frame_per_step_and_shows_what_was_put_in(tmp_path) -> None:
    frames = [np.full((32, 48, 3), value, np.uint8) for value in (0, 128, 255)]
    write_video(tmp_path / "deep/er/video.mp4", frames, 20, {"crf": "20"})
    with av.open(str(tmp_path / "deep/er/video.mp4")) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [frame.shape for frame in shown] == [(32, 48, 3)] * 3
    assert [float(frame.mean()) for frame in shown] == pytest.approx([0, 128, 255], abs=6)
