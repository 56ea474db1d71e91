"""Examples: rewards of four libraries of environments, an HTTP judge, and the film strip."""

from __future__ import annotations

import functools
import itertools
import json
import random
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from math_runs import tiny_math
from model_folders import gsm8k_rows, model_folder, write_rows
from PIL import Image

from experiments.examples import environments, film_strip, http_judge
from rlinf_embodied import train
from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.lerobot_writer import write_video
from rlinf_embodied.data.problems import Problem, Split


def test_reasoning_gyms_scores_are_its_own(import_library) -> None:
    gym = import_library("reasoning_gym")
    for level in ("chain_sum", "leg_counting", "countdown"):
        source = environments.ReasoningGym(DataConfig(level=level), 3)
        own = gym.create_dataset(level, seed=3, size=1 << 40)
        train, test = source.batch(Split.train, 0, 40), source.batch(Split.test, 0, 20)
        assert source.batch(Split.train, 5, 3) == train[5:8]
        assert not {problem.question for problem in train} & {problem.question for problem in test}
        for problem in train:
            for text in (problem.answer, "7", f"The answer is {problem.answer}", ""):
                found = environments.reasoning_gym_score(text, problem)
                assert found == own.score_answer(text.strip(), problem.columns["entry"])


def test_a_game_of_textarena_earns_its_own_reward(monkeypatch, import_library) -> None:
    arena = import_library("textarena")
    draw = random.Random(0)
    for number in range(50):
        turns = [f"[{draw.randint(1, 20)}]" if draw.random() < 0.95 else "no" for _ in range(40)]
        played = iter(turns)
        monkeypatch.setattr(environments, "ask", lambda url, chat, played=played: next(played))
        (problem,) = environments.Seeds(DataConfig(level="GuessTheNumber-v0"), 0).batch(Split.train, number, 1)
        found = environments.textarena_game(problem, "")
        game, again, done = arena.make("GuessTheNumber-v0"), iter(turns), False
        game.reset(num_players=1, seed=int(str(problem.columns["seed"])) % (1 << 32))
        while not done:
            game.get_observation()
            done, _ = game.step(next(again))
        assert found == game.close()[0][0]


@pytest.mark.parametrize("text", ["#### 12", "#### 13", "12", "so 12 #### 12", "####12"])
def test_skyrl_gyms_rewards_are_its_own(monkeypatch, import_library, text) -> None:
    gym = import_library("skyrl_gym")
    monkeypatch.setattr(environments, "ask", lambda url, chat: text)
    env = gym.make("gsm8k", extras={"reward_spec": {"ground_truth": "12"}})
    env.init([{"role": "user", "content": "?"}])
    found = environments.skyrl_gym_gsm8k(Problem(0, "?", "12", None, "text", "x"), "")
    assert found == env.step(text)["reward"]


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums", "Checked"]
SCORED = []


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.25)
    async def first_digit(self, trace):
        SCORED.append([message.content for message in trace.assistant_messages])
        return float(SCORED[-1][0][:1].isdigit())

    @vf.reward(weight=2.0)
    async def length(self, trace):
        return len(trace.assistant_messages[-1].content) % 5 / 4


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(200):
            yield Sum(Data(prompt=f"{number}+1=", system_prompt="Add.", answer=str(number + 1)), self.config.task)


class Seat(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()


class Checked(vf.Env[Seat]):
    async def run(self, task, agents):
        async with agents.solver.interaction(task) as talk:
            await talk.turn()
            await talk.turn("Check that.")
"""


EXAMPLES = "experiments.examples"
# completions that are cut off are not scored; random weights soon write one of these characters
ENDS = f"generation.stop={[*'abcdefghijklmnopqrstuvwxyz0123456789']}".replace("'", '"')
SHORT = "generation.max_new_tokens=6"
LIBRARIES = {  # the library: what scores its episodes, and the overrides of a training
    "verifiers.v1": (
        f"{EXAMPLES}.verifiers_tasks.episode",
        [f"data._target_={EXAMPLES}.verifiers_tasks.Tasks", "data.level=checked_sums", SHORT],
    ),
    "reasoning_gym": (
        f"{EXAMPLES}.environments.reasoning_gym_score",
        [f"data._target_={EXAMPLES}.environments.ReasoningGym", "data.level=chain_sum", ENDS],
    ),
    "textarena": (
        f"{EXAMPLES}.environments.textarena_game",
        [f"data._target_={EXAMPLES}.environments.Seeds", "data.level=GuessTheNumber-v0", SHORT],
    ),
    "skyrl_gym": (f"{EXAMPLES}.environments.skyrl_gym_gsm8k", ["data.files.all=gsm8k.jsonl", SHORT]),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_three_iterations_train_on_the_rewards_of_a_library(library, tmp_path, monkeypatch, import_library) -> None:
    import_library(library)
    (tmp_path / "checked_sums.py").write_text(TASKSET)
    write_rows(tmp_path / "gsm8k.jsonl", gsm8k_rows(0, 100))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (target, problems), own, paid, number = LIBRARIES[library], list[float](), list[float](), itertools.count()
    module, _, name = target.rpartition(".")
    scored = getattr(import_module(module), name)

    @functools.wraps(scored)
    def recorded(*given) -> float:
        """Adds to the library's reward, which hardly varies with random weights, a term that does."""
        made, extra = scored(*given), next(number) % 3 / 10
        own.append(made)
        if next(problem.id for problem in given if isinstance(problem, Problem)) < 1 << 40:  # of the training split
            paid.append(made + extra)
        return made + extra

    monkeypatch.setattr(f"{module}.{name}", recorded)
    section = "reward" if library == "reasoning_gym" else "agent"
    sizes = ["prompts_per_iteration=4", "group_size=2", "tokens_per_microbatch=4096"]
    few = ["generation.rows_per_block=8", "eval.num_problems=2", "eval.num_samples=0"]
    policy = ["policy=folder", f"policy.folder={model_folder(tmp_path / 'model', 'qwen2', context=4096)}"]
    words = [*problems, f"{section}._target_={target}", "data.prompt_template=natural", *few, *policy]
    train(tiny_math(*words, *(f"algorithm.{n}" for n in sizes), f"run.dir={tmp_path / 'run'}"))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "rollout/reward" in row]
    assert [row["rollout/reward"] for row in rows] == pytest.approx(
        [sum(paid[8 * n : 8 * n + 8]) / 8 for n in range(3)]
    )
    assert len(paid) == 3 * 8
    assert all(row["charts/optimizer_steps"] > 0 for row in rows)
    if library == "verifiers.v1":
        turns = import_module("checked_sums").SCORED
        expected = [0.25 * first[:1].isdigit() + len(last) % 5 / 2 for first, last in turns]
        assert sorted(own) == pytest.approx(sorted(expected))
        assert [row["rollout/turns"] for row in rows] == [2.0] * 3
        assert len(set(own)) > 2


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
    write_video(folder / f"PickCube-v1--seed={seed}--success={success}.mp4", frames, 20, {"crf": "20"})


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
