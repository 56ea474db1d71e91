"""An episode of an evaluation is a function of its seed and the policy, whatever runs beside it or ran before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from runs import clone, cluster, tiny

from envs.episodes import EpisodeEnv
from envs.foreign.adapter import folder_of
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.evaluation import Evaluation, EvaluationResult, held_out, policy_stage
from rlinf_embodied.runtime.session import SerialSession

SMALL = ["env.obs_size=16", "env.chunk=4", "env.horizon=12", "warm_start.num_demos=-"]
SMALL += ["warm_start.from_scratch=true", "policy.temperature=2.0", "eval.greedy=false", "eval.num_episodes=8"]
STATE = ["policy=actor_critic", "env.cameras=[]", "env.chunk=1", "env.chunks_per_rollout=12"]
NOT_INSTALLED = not (folder_of("metaworld") / "bin/python").exists()
CASES = {
    "maniskill": ["env=maniskill_pick", "env.cameras=[base_camera]", "env.options.backend=batched"],
    "gymnasium": ["env=gymnasium", "env.id=Pendulum-v1", *STATE],
    "libero": ["env=libero", "env.options.adapter=libero_stand_in.StandIn", "env.cameras=[agentview]"],
    "metaworld": ["env=metaworld", "env.task=reach-v3"],
}


def run(config: TrainConfig, rows: int, block: int = 4, devices: int = 1, times: int = 1) -> EvaluationResult:
    """Evaluates so many rows at a time on so many devices; with `times` the last of several evaluations."""
    config = replace(config, env=replace(config.env, num_envs=block, block_size=block))
    asked = held_out(config.env, replace(config.eval, num_envs=rows), config.run)
    stage = policy_stage("eval_policy", config.policy, str(clone(config)), asked)
    evaluation = Evaluation(asked, stage, SerialSession(), cluster(devices))
    return [evaluation.run(0) for _ in range(times)][-1]


ENVS = [
    pytest.param("maniskill", marks=pytest.mark.sim),
    "gymnasium",
    "libero",
    pytest.param("metaworld", marks=pytest.mark.skipif(NOT_INSTALLED, reason="MetaWorld is not installed")),
]


@pytest.mark.parametrize("name", ENVS)
def test_outcomes_do_not_depend_on_rows_blocks_workers_or_what_was_evaluated_before(name: str) -> None:
    config = tiny(*SMALL, *CASES[name])
    first = run(config, rows=1, block=1).episodes
    plain = lambda episodes: [(e.seed, e.task, e.metrics) for e in episodes]  # noqa: E731
    assert len({str(e.metrics) for e in first}) > 1  # they differ from each other
    for how in ({"rows": 2}, {"rows": 8}, {"rows": 32}, {"rows": 8, "devices": 2}, {"rows": 2, "times": 2}):
        assert plain(run(config, **how).episodes) == plain(first), how


@pytest.mark.parametrize("name", ENVS)
def test_images_do_not_depend_on_the_row_and_those_of_the_next_row_are_warned_of(name: str, monkeypatch) -> None:
    images = {"gymnasium": ["env=gymnasium", "env.id=gym_envs:Dot-v0", "env.cameras=[rgb_array]", "env.chunk=1"]}
    images["gymnasium"] += ["env.options.history_free=true", "env.chunks_per_rollout=12", "policy=actor_critic"]
    config = tiny(*SMALL, *(images.get(name) or CASES[name]))
    asked = held_out(config.env, replace(config.eval, num_envs=3), config.run, acting="random")
    stage = policy_stage("eval_policy", None, "", asked)
    evaluate = lambda: Evaluation(asked, stage, SerialSession(), cluster(1)).run(0)  # noqa: E731
    text, right, rendered = "episodes begin with other images in another row", evaluate(), EpisodeEnv._rendered
    assert [e.seed for e in right.episodes] == list(range(9000, 9008)), "the last round has two episodes in three rows"
    assert not any(text in found for found in right.warnings)
    wrong = lambda self, rows: rendered(self, [(row + 1) % 3 for row in rows])  # noqa: E731
    monkeypatch.setattr(EpisodeEnv, "_rendered", wrong)
    assert any(text in found for found in evaluate().warnings)
