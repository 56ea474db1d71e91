"""Agents that talk to the model as OpenAI's clients do: what they say is trained on token for token."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
import torch
from math_runs import tiny_math
from model_folders import model_folder
from runs import train
from stopped_runs import same_end

from policies.causal_lm import CausalLM
from rlinf_embodied.algorithms.advantages import group_advantages
from rlinf_embodied.config import LanguagePolicyConfig, MathConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning.batch import Completions, GenerationBlock, Prompt, all_log_probs, generation_report
from rlinf_embodied.reasoning.episodes import episodes_of, run_episodes
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.objective import Round, training_rows
from rlinf_embodied.reasoning.reward_stage import Verifier
from rlinf_embodied.reasoning.tool_calls import ToolCalls

PROBLEMS = [Problem(i, f"{3 + i}+4=", str(7 + i), None, "sum", "sum1-1-9") for i in range(2)]


# -------------------------------------------------------------------------------------------------------------- agents
def ask(base_url: str, chat: list[dict], **more: object) -> str:
    body = json.dumps({"model": "policy", "messages": chat} | more).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)
    assert found["object"] == "chat.completion"
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]
    assert found["choices"][0]["finish_reason"] in ("stop", "length")
    return found["choices"][0]["message"]["content"]


def persistent(problem: Problem, base_url: str) -> str | float:
    """Asks again until the answer begins with another character, three times at most; then forgets what was said."""
    chat = [{"role": "user", "content": problem.question}]
    for _ in range(3):
        text = ask(base_url, chat)
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "#"}]
        if not text.startswith("1"):
            break
    return len(ask(base_url, [{"role": "user", "content": [{"type": "text", "text": f"{len(chat)}+"}]}])) / 10


def answering(problem: Problem, base_url: str) -> str:
    return ask(base_url, [{"role": "user", "content": problem.question}])


def wrong_once(problem: Problem, base_url: str) -> str:
    return answering(problem, base_url) if problem.id else "nothing asked"[99]


def failing(problem: Problem, base_url: str) -> float:
    raise RuntimeError(f"no idea about {problem.question}")


def slow(problem: Problem, base_url: str) -> str:
    if problem.id == 0:
        time.sleep(20)
    return answering(problem, base_url)


def refused(problem: Problem, base_url: str) -> str:
    """Makes every kind of request that is refused, then a right one."""
    chat, texts = [{"role": "user", "content": problem.question}], []
    for url, more in (
        *((base_url, {"stream": True}), (base_url, {"n": 2}), (base_url, {"tools": [{}]}), (base_url, {"messages": 3})),
        *((base_url, {"messages": [{"role": "user", "content": "1+" * 2000}]}), (base_url, {"temperature": 0.2})),
        *((base_url, {"max_tokens": 0}), (base_url + "x", {})),
        (base_url.replace("/v1", "9/v1"), {}),
    ):
        try:
            ask(url, chat, **more)
        except urllib.error.HTTPError as error:
            texts.append(f"{error.code} {json.load(error)['error']['message']}")
    Path(os.environ["REFUSALS"]).write_text("\n".join(texts))
    return ask(base_url, chat, temperature=1.0, max_tokens=3)


# ----------------------------------------------------------------------------------------------------------- one block
@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> CausalLM:
    return CausalLM.from_config(LanguagePolicyConfig(), model_folder(tmp_path_factory.mktemp("agents"), "qwen2"), 0)


def run(policy: CausalLM, agent: str, *overrides: str) -> tuple[MathConfig, Completions]:
    config = tiny_math(f"agent._target_={__name__}.{agent}", "generation.max_new_tokens=30", *overrides)
    asked = [
        (problem, Prompt(problem.id, tuple(policy.codec.encode_chat(policy.codec.chat(problem.question)))))
        for problem in PROBLEMS
    ]
    with closing(episodes_of(asked, 4, config, policy.codec, ToolCalls(config.tool))) as episodes:
        return config, run_episodes(ExactEngine(policy), episodes, 4, GenerationBlock((), config.generation, 9, 2))


def test_rows_are_what_was_sampled_with_the_advantage_of_their_episode(policy) -> None:
    config, made = run(policy, "persistent")
    _, again = run(policy, "persistent")
    assert torch.equal(made.rows.tokens, again.rows.tokens)  # whichever agent came first
    assert made.agent_rewards == again.agent_rewards
    assert len(made.rows) > 8  # what an agent forgets begins a row
    assert made.turns >= len(made.rows)
    found = all_log_probs(policy, made.rows, 1.0, 4096)
    assert torch.equal(found != 0, made.rows.mask)
    assert (found - made.log_probs).abs().max() < 2e-5
    with Verifier(PromptTemplate("compact"), config.reward) as verifier:
        rewards, _ = verifier.score(0, made, 30)
    assert rewards.rewards.reshape(-1).tolist() == pytest.approx(list(made.agent_rewards))
    rows = training_rows([Round(made, rewards)], config.rl, None)
    expected = group_advantages(rewards.rewards, scale_by_std=config.rl.scale_by_std)
    assert rows.num_trained == len(rows)  # both groups differ
    assert torch.equal(rows.advantages[:, 0], expected.flatten()[list(made.samples)])


def cut_off_then_asked_again(problem: Problem, base_url: str) -> str:
    ask(base_url, [{"role": "user", "content": problem.question}], max_tokens=1)
    ask(base_url, [{"role": "user", "content": "1+"}], max_tokens=1)
    ask(base_url, [{"role": "user", "content": "2+"}], max_tokens=1)
    return ""


def test_an_episode_is_cut_off_at_most_once_and_its_agents_text_is_judged_also_without_a_letter(policy) -> None:
    _, made = run(policy, "cut_off_then_asked_again")
    assert int((~made.ended).sum()) > 8  # rows
    assert generation_report([made], {}).truncated == int((~made.ended[made.last_rows()]).sum()) <= 8
    assert made.texts == ("",) * 8


def test_an_agent_that_asks_once_gives_a_completion_that_the_reward_judges(policy) -> None:
    _, made = run(policy, "answering")
    assert made.agent_rewards == (None,) * 8
    assert made.samples == tuple(range(8))
    assert made.rows.given is None
    assert [policy.codec.decode(row) for row in made.rows.completions()] == list(made.texts)


def test_a_request_that_cannot_be_answered_says_why(policy, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("REFUSALS", str(tmp_path / "refusals"))
    _, made = run(policy, "refused", "agent.max_requests=1")
    lines = (tmp_path / "refusals").read_text().splitlines()
    assert [line[:3] for line in lines] == [*["400"] * 7, "404", "409"]
    assert "no room for these messages" in lines[4]
    assert "temperature is 0.2, but all tokens are sampled with generation.temperature=1.0" in lines[5]
    assert "max_tokens is 0" in lines[6]
    assert "is not served" in lines[7]
    assert max(map(len, made.rows.completions())) == 3


def test_an_agent_that_hangs_or_fails_earns_nothing_and_one_that_always_fails_ends_the_run(policy, caplog) -> None:
    with pytest.raises(ConfigError, match=r"(?s)made no request for '3\+4='.*IndexError"):
        run(policy, "wrong_once")
    with pytest.raises(ConfigError, match=r"(?s)failed in all of 8 episodes:.*no idea about"):
        run(policy, "failing")
    with pytest.raises(ConfigError, match=r"made no request for '3\+4='.*did nothing for"):
        run(policy, "slow", "agent.timeout_s=2")
    assert "the agent for '3+4=' did nothing" in caplog.text


# ------------------------------------------------------------------------------------------------------------ training
def test_agents_train_and_plans_do_not_change_the_weights(tmp_path) -> None:
    for folder, plan in (("one", []), ("two", ["plan=disaggregated", "cluster.num_devices=2"])):
        config = tiny_math(f"agent._target_={__name__}.persistent", "run.num_iterations=2", "checkpoint.every=1", *plan)
        config.run.dir = str(tmp_path / folder)
        train(config)
    same_end(tmp_path / "two", tmp_path / "one")


def openai_client(problem: Problem, base_url: str) -> float:
    """The agent of docs/reasoning.md."""
    import openai  # pyright: ignore[reportMissingImports]

    client = openai.OpenAI(base_url=base_url, api_key="-")
    chat = [{"role": "user", "content": problem.question}]
    first = client.chat.completions.create(model="policy", messages=chat).choices[0].message.content
    chat += [{"role": "assistant", "content": first}, {"role": "user", "content": "Check that, then give the answer."}]
    return len(client.chat.completions.create(model="policy", messages=chat).choices[0].message.content) / 10


def smolagents_client(problem: Problem, base_url: str) -> float:
    """A stock CodeAgent with two steps and the request for a final answer."""
    import smolagents  # pyright: ignore[reportMissingImports]

    model = smolagents.OpenAIServerModel(model_id="policy", api_base=base_url, api_key="-")
    agent = smolagents.CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=smolagents.LogLevel.OFF)
    return len(str(agent.run(problem.question))) / 10


@pytest.mark.parametrize(("agent", "turns"), [("openai_client", 2), ("smolagents_client", 3)])
def test_unmodified_clients_train(agent, turns, tmp_path, import_library) -> None:
    import_library(agent.removesuffix("_client"))
    folder = model_folder(tmp_path / "model", "qwen2", context=16384)
    sizes = ["prompts_per_iteration=2", "group_size=2", "tokens_per_microbatch=16384"]
    few = ["generation.rows_per_block=4", "generation.max_new_tokens=12", "eval.num_problems=2", "eval.num_samples=0"]
    words = [f"agent._target_={__name__}.{agent}", "policy=folder", f"policy.folder={folder}", "run.num_iterations=2"]
    train(tiny_math(*words, *(f"algorithm.{n}" for n in sizes), *few, f"run.dir={tmp_path / 'run'}"))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "rollout/reward" in row]
    assert [row["rollout/turns"] for row in rows] == [turns] * 2
    assert [row["charts/optimizer_steps"] for row in rows] == [1] * 2
