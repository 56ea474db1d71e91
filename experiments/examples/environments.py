"""Tasks of three libraries of environments for language models, as problems, rewards and agents.

Each is installed beside this package (`pip install reasoning-gym`, `textarena`, `skyrl-gym`) and named in `data.level`:

python experiments/train_llm_math.py policy=folder policy.folder=<dir> data.prompt_template=compact \\
    data._target_=experiments.examples.environments.ReasoningGym data.level=chain_sum \\
    reward._target_=experiments.examples.environments.reasoning_gym_score
python experiments/train_llm_math.py policy=folder policy.folder=<dir> \\
    data._target_=experiments.examples.environments.Seeds data.level=GuessTheNumber-v0 \\
    agent._target_=experiments.examples.environments.textarena_game
python experiments/train_llm_math.py policy=folder policy.folder=<dir> data.files.all=gsm8k.jsonl \\
    agent._target_=experiments.examples.environments.skyrl_gym_gsm8k
"""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of

_MOST_DRAWS = 1000  # until a question is in the right split
_ONE_AT_A_TIME = threading.RLock()  # textarena draws from the global generator of `random`


def ask(base_url: str, chat: list[dict[str, Any]], key: str = "-") -> str:
    """Returns the model's reply to messages."""
    body = json.dumps({"model": "policy", "messages": chat}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


# ------------------------------------------------------------------------------------------------------- reasoning-gym
class ReasoningGym:
    """Problems of one of reasoning-gym's data sets, without end; a question is in one split."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        import reasoning_gym  # pyright: ignore[reportMissingImports]

        self._level = data.level
        self._made = reasoning_gym.create_dataset(data.level, seed=seed, size=1 << 40)

    def size(self, split: Split) -> None:
        return None

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        return [self._problem(split, position) for position in range(start, start + count)]

    def _problem(self, split: Split, position: int) -> Problem:
        for number in range(_MOST_DRAWS):
            index = position * _MOST_DRAWS + number
            entry = self._made[index]
            if split_of(entry["question"]) is split:
                columns = {"dataset": self._level, "entry": entry}
                answer = str(entry["answer"])
                return Problem(
                    problem_id(split, position), entry["question"], answer, None, "text", self._level, columns
                )
        raise ValueError(f"{self._level} has hardly a question for the split {split.value!r}: use another data set")


def reasoning_gym_score(completion: str, problem: Problem) -> float:
    """Returns reasoning-gym's own score of what the model wrote."""
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    scored = reasoning_gym.get_score_answer_fn(problem.columns["dataset"])
    return float(scored(completion.strip(), problem.columns["entry"]))


# ------------------------------------------------------------------------------------------------------------ textarena
class Seeds:
    """Problems that are only a game's name and a seed."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        self._level, self._seed = data.level, seed

    def size(self, split: Split) -> None:
        return None

    def batch(self, split: Split, start: int, count: int) -> list[Problem]:
        numbers = [problem_id(split, position) for position in range(start, start + count)]
        return [
            Problem(n, f"{self._level} {n}", "", None, "text", self._level, {"seed": self._seed + n}) for n in numbers
        ]


def textarena_game(problem: Problem, base_url: str) -> float:
    """Plays a game for one player, and returns its reward."""
    import textarena  # pyright: ignore[reportMissingImports]

    with _ONE_AT_A_TIME:
        game = textarena.make(problem.level)
        game.reset(num_players=1, seed=int(str(problem.columns["seed"])) % (1 << 32))
        _, shown = game.get_observation()
    chat, done = [{"role": "user", "content": shown}], False
    while not done:
        chat.append({"role": "assistant", "content": ask(base_url, chat)})
        with _ONE_AT_A_TIME:
            done, _ = game.step(chat[-1]["content"])
            if not done:
                _, shown = game.get_observation()
                chat.append({"role": "user", "content": shown})
    rewards, _ = game.close()
    return float(rewards[0])


# ------------------------------------------------------------------------------------------------------------ skyrl-gym
def skyrl_gym_gsm8k(problem: Problem, base_url: str) -> float:
    """Runs skyrl-gym's GSM8K environment, and returns the sum of its rewards."""
    import skyrl_gym  # pyright: ignore[reportMissingImports]

    env = skyrl_gym.make("gsm8k", extras={"reward_spec": {"ground_truth": problem.answer}})
    chat, _ = env.init([{"role": "user", "content": problem.question}])
    earned, done = 0.0, False
    while not done:
        reply = ask(base_url, chat)
        found = env.step(reply)
        chat = [*chat, {"role": "assistant", "content": reply}, *found["observations"]]
        earned, done = earned + float(found["reward"]), found["done"]
    return earned
