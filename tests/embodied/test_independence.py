"""An episode of an evaluation is a function of its seed and the policy, whatever runs beside it or ran before it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from runs import clone, cluster, tiny

from envs.episodes import EpisodeEnv
from envs.foreign.adapter import folder_of
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied import warm_start
from rlinf_embodied.embodied.evaluation import Evaluation, EvaluationResult, held_out, policy_stage
from rlinf_embodied.runtime.session import SerialSession

SMALL = ["env.obs_size=16", "env.chunk=4", "env.horizon=12", "warm_start.num_demos=-"]
SMALL += ["warm_start.from_scratch=true", "policy.temperature=2.0", "eval.greedy=false", "eval.num_episodes=32"]
STATE = ["policy=actor_critic", "env.cameras=[]", "env.chunk=1", "env.chunks_per_rollout=12"]
QUICK = ["env.options.settle_steps=2", "eval.num_episodes=8"]
CASES = {
    "maniskill": ["env=maniskill_pick", "env.cameras=[base_camera]", "env.options.backend=batched"],
    "gymnasium": ["env=gymnasium", "env.id=Pendulum-v1", *STATE],
    "libero_stand_in": ["env=libero", "env.options.adapter=libero_stand_in.StandIn", "env.cameras=[agentview]"],
    "libero": ["env=libero", "env.options.task=3", "env.cameras=[agentview]", *QUICK],
    "metaworld": ["env=metaworld", "env.task=reach-v3"],
}


def run(config: TrainConfig, rows: int, block: int = 4, devices: int = 1, times: int = 1) -> EvaluationResult:
    """Evaluates so many rows at a time on so many devices; with `times` the last of several evaluations."""
    config = replace(config, env=replace(config.env, num_envs=block, block_size=block))
    asked = held_out(config.env, replace(config.eval, num_envs=rows), config.run)
    stage = policy_stage("eval_policy", config.policy, str(clone(config)), asked)
    with closing(SerialSession()) as session:
        evaluation = Evaluation(asked, stage, session, cluster(devices))
        return [evaluation.run(0) for _ in range(times)][-1]


FOREIGN = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                not (folder_of(name) / "bin/python").exists(),
                reason=f"needs python -m experiments.setup.foreign env={name}",
            ),
            pytest.mark.timeout(3600),  # a scene of LIBERO takes seconds to build
        ],
    )
    for name in ("metaworld", "libero")
]
ENVS = [pytest.param("maniskill", marks=pytest.mark.sim), "gymnasium", "libero_stand_in", *FOREIGN]


@pytest.mark.parametrize("name", ENVS)
def test_episodes_do_not_depend_on_rows_blocks_workers_or_what_was_evaluated_before(name: str, monkeypatch) -> None:
    """Equal are metrics, first state, first images and the range of the sampled actions, which depend on all images."""
    monkeypatch.setattr(warm_start, "ROWS", 1)  # a row of LIBERO takes 0.4 GB
    config = tiny(*SMALL, *CASES[name])
    plain = lambda result: [replace(episode, row=0) for episode in result.episodes]  # noqa: E731
    first = plain(run(config, rows=1, block=1))
    assert len({(e.state, e.images, e.actions) for e in first}) == len(first)
    for how in ({"rows": 2, "times": 2}, {"rows": 8, "devices": 2}, {"rows": 32}):
        if how["rows"] <= len(first):  # there are no more rows than episodes
            assert plain(run(config, **how)) == first, how


@pytest.mark.parametrize("name", ENVS)
def test_images_do_not_depend_on_the_row_and_those_of_the_next_row_are_warned_of(name: str, monkeypatch) -> None:
    images = {"gymnasium": ["env=gymnasium", "env.id=gym_envs:Dot-v0", "env.cameras=[rgb_array]", "env.chunk=1"]}
    images["gymnasium"] += ["env.options.history_free=true", "env.chunks_per_rollout=12", "policy=actor_critic"]
    config = tiny(*SMALL, *(images.get(name) or CASES[name]))
    asked = held_out(config.env, replace(config.eval, num_envs=5, num_episodes=8), config.run, acting="random")
    stage = policy_stage("eval_policy", None, "", asked)

    def evaluate() -> EvaluationResult:
        with closing(SerialSession()) as session:
            return Evaluation(asked, stage, session, cluster(1)).run(0)

    text, right, rendered = "episodes begin with other images in another row", evaluate(), EpisodeEnv._rendered
    assert [e.seed for e in right.episodes] == list(range(9000, 9008)), "three episodes in five rows"
    assert not any(text in found for found in right.warnings)
    wrong = lambda self, rows: rendered(self, [(row + 1) % 5 for row in rows])  # noqa: E731
    monkeypatch.setattr(EpisodeEnv, "_rendered", wrong)
    assert any(text in found for found in evaluate().warnings)
