"""Examples: rewards of three libraries of environments, an HTTP judge, and the film strip."""

from __future__ import annotations

import random
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from experiments.examples import environments, film_strip, http_judge
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.embodied.outcome import write_mp4


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


CODES: list[int] = []  # the next answers, then 200


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = b'{"score": 0.5}'
        self.send_response(CODES.pop(0) if CODES else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


@pytest.fixture
def judge(monkeypatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(http_judge.URL, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(http_judge, "_PAUSES_S", (0.0, 0.0))
    CODES.clear()
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("judge")
def test_server_errors_are_retried_a_few_times_and_refusals_are_not() -> None:
    problem = Problem(0, "1+1=", "2", None, "sum", "sum2")
    CODES[:] = [503, 500]
    assert http_judge.judged("#2", problem) == 0.5
    CODES[:] = [401, 401]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        http_judge.judged("#2", problem)
    assert CODES == [401]
    CODES[:] = [503] * 3
    with pytest.raises(ConnectionError, match=r"did not answer in 3 attempts, last: HTTP Error 503"):
        http_judge.judged("#2", problem)


def film(folder: Path, seed: int, success: int, shade: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    frames = [np.full((64, 64, 3), shade + 5 * i, dtype=np.uint8) for i in range(11)]
    write_mp4(folder / f"PickCube-v1--seed={seed}--success={success}.mp4", frames)


def test_the_first_episode_that_only_the_trained_policy_solves_is_shown(tmp_path: Path, capsys) -> None:
    for seed, before, after in ((9000, 1, 1), (9001, 1, 0), (9002, 0, 1)):
        film(tmp_path / "videos/step_0", seed, before, 20)
        film(tmp_path / "videos/step_4", seed, 1 - after, 90)  # neither the first nor the last evaluation
        film(tmp_path / "videos/step_16", seed, after, 120)
    film_strip.draw_strip(film_strip.Options(run=str(tmp_path), out=str(tmp_path / "strip.png")))
    assert "episode 9002, not solved before, solved after" in capsys.readouterr().out
    shown = np.asarray(Image.open(tmp_path / "strip.png")).astype(int)
    assert shown.shape == (
        2 * (64 + film_strip.CAPTION),
        film_strip.MOMENTS * (64 + film_strip.GAP) - film_strip.GAP,
        3,
    )
    first = [shown[top + 32, 32].mean() for top in (film_strip.CAPTION, 64 + 2 * film_strip.CAPTION)]
    last = [shown[top + 32, -32].mean() for top in (film_strip.CAPTION, 64 + 2 * film_strip.CAPTION)]
    assert np.allclose([first, last], [[20, 120], [70, 170]], atol=4)
