"""Three libraries' environments: their rewards on the same transcripts, where the libraries are installed."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from experiments.examples import environments
from rlinf_embodied.data.problems import Problem, Split


def test_reasoning_gyms_scores_are_its_own() -> None:
    gym = pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    for level in ("chain_sum", "leg_counting", "countdown"):
        source = environments.ReasoningGym(SimpleNamespace(level=level), 3)
        own = gym.create_dataset(level, seed=3, size=1 << 40)
        train, test = source.batch(Split.train, 0, 40), source.batch(Split.test, 0, 20)
        assert source.batch(Split.train, 5, 3) == train[5:8]
        assert not {problem.question for problem in train} & {problem.question for problem in test}
        for problem in train:
            for text in (problem.answer, "7", f"The answer is {problem.answer}", ""):
                found = environments.reasoning_gym_score(text, problem)
                assert found == own.score_answer(text.strip(), problem.columns["entry"])


def test_a_game_of_textarena_earns_its_own_reward(monkeypatch) -> None:
    arena = pytest.importorskip("textarena", reason="pip install textarena")
    draw = random.Random(0)
    for number in range(50):
        turns = [f"[{draw.randint(1, 20)}]" if draw.random() < 0.95 else "no" for _ in range(40)]
        played = iter(turns)
        monkeypatch.setattr(environments, "ask", lambda url, chat, played=played: next(played))
        (problem,) = environments.Seeds(SimpleNamespace(level="GuessTheNumber-v0"), 0).batch(Split.train, number, 1)
        found = environments.textarena_game(problem, "")
        game, again, done = arena.make("GuessTheNumber-v0"), iter(turns), False
        game.reset(num_players=1, seed=problem.columns["seed"] % (1 << 32))
        while not done:
            game.get_observation()
            done, _ = game.step(next(again))
        assert found == game.close()[0][0]


@pytest.mark.parametrize("text", ["#### 12", "#### 13", "12", "so 12 #### 12", "####12"])
def test_skyrl_gyms_rewards_are_its_own(monkeypatch, text) -> None:
    gym = pytest.importorskip("skyrl_gym", reason="pip install skyrl-gym")
    monkeypatch.setattr(environments, "ask", lambda url, chat: text)
    env = gym.make("gsm8k", extras={"reward_spec": {"ground_truth": "12"}})
    env.init([{"role": "user", "content": "?"}])
    found = environments.skyrl_gym_gsm8k(Problem(0, "?", "12", None, "text", "x"), "")
    assert found == env.step(text)["reward"]
