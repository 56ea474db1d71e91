"""Rewards, problems and prompts of the user's own: what docs/own_reward.md shows runs, and bad ones are named."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import threading
from pathlib import Path

import pytest
from math_runs import tiny_math
from model_folders import CHAT, gsm8k_rows, model_folder, write_rows
from runs import clone, metric_rows, train

from policies.causal_lm import CausalLM
from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import LanguagePolicyConfig, RewardConfig
from rlinf_embodied.data.problems import Problem, Split
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning.custom_reward import reward_function
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.reasoning.reward_stage import Verifier

DOCS = (Path(__file__).resolve().parents[2] / "docs/own_reward.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)
    for line in re.findall(r"^(?:PYTHONPATH=\. )?python experiments/train_llm_math\.py(.*)$", DOCS, re.MULTILINE)
]
SIX = Problem(0, "7+8-9=", "6", None, "sum", "sum2-2-9")


@pytest.fixture
def plug_ins(tmp_path, monkeypatch) -> Path:
    """The modules of the page, where Python finds them."""
    for content in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL):
        name = content.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(content)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def command_with(text: str) -> list[str]:
    """Returns the overrides of the page's command that holds a text."""
    (found,) = [command for command in COMMANDS if any(text in word for word in command)]
    return found


def shortened(overrides: list[str], folder: Path) -> list[str]:
    """Returns overrides for one small iteration."""
    small = {"run.num_iterations": "1", "eval.num_problems": "8", "generation.max_new_tokens": "20"}
    return [*overrides, *(f"{key}={value}" for key, value in small.items()), f"run.dir={folder / 'run'}"]


def test_the_pages_reward_earns_what_it_says(plug_ins, tmp_path):
    config = tiny_math(*shortened(command_with("short_and_right"), tmp_path))
    summary = train(config)
    (row,) = metric_rows(tmp_path / "run")
    assert 0 <= row["rollout/accuracy"] <= row["rollout/reward"] <= 1
    assert 0 < summary["before"]["reward"] <= 1
    assert summary["after"]["reward"] >= summary["accuracy_after"]
    function = reward_function(config.reward)
    with Verifier(PromptTemplate("compact"), RewardConfig(format_reward=0.25), function) as verifier:
        texts = ["#6", "7+8=15;15-9=6;" + "=" * 24 + "#6", "#7", "#6"]
        verified = verifier.verify(texts, [SIX] * 4, [True, True, True, False])
    assert verified.raw.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert verified.correct.tolist() == [True, False, False, False]
    assert verified.formatted.tolist() == [True, True, True, False]


def test_the_pages_reward_reads_a_column(plug_ins, tmp_path):
    rows = [row | {"tolerance": 100.0} for row in gsm8k_rows(0, 60)]
    file = write_rows(tmp_path / "measured.jsonl", rows)
    model = model_folder(tmp_path / "model", "qwen2")
    overrides = [w.replace("measured.jsonl", file) for w in command_with("within_tolerance")]
    overrides = [w.replace("models/qwen", str(model)) for w in overrides]
    config = tiny_math(*shortened(overrides, tmp_path), "algorithm.tokens_per_microbatch=1024")
    train(config)
    assert (tmp_path / "run/summary.json").exists()
    (problem,) = problem_source(config.data, 0).batch(Split.train, 0, 1)
    function = reward_function(config.reward)
    assert function is not None
    assert problem.columns == {"tolerance": 100.0}
    assert function("so #### 3", problem) == 1.0
    assert function("so #### 300", problem) == function("so three", problem) == 0.0


def test_the_pages_problems_are_trained_on(plug_ins, tmp_path):
    overrides = [w.replace("runs/math/checkpoints/latest", str(clone(tiny_math()))) for w in command_with("Doubles")]
    config = tiny_math(*shortened(overrides, tmp_path))
    assert ReasoningJob(config).name == "math-Doubles-grpo"
    train(config)
    questions = re.findall(r"^\| `([0-9]+)\+\1=` \|", (tmp_path / "run/samples.md").read_text(), re.MULTILINE)
    assert len(questions) == 8
    assert {int(number) % 10 for number in questions} == {9}


def test_the_pages_prompt_reaches_the_model(tmp_path):
    template = CHAT + "{% if enable_thinking %}<think>{% endif %}"
    model = model_folder(tmp_path / "model", "qwen2")
    tokenizer = CausalLM.from_config(LanguagePolicyConfig(), model, 0).codec.tokenizer
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    overrides = [w.replace("models/qwen", str(model)) for w in command_with("enable_thinking")]
    config = compose_math(overrides).policy
    policy = CausalLM.from_config(config, model, seed=0)
    asked = "<|begin|>system\nThink in short steps.<|end|>\n<|begin|>user\n1+1?<|end|>\n<|begin|>assistant\n"
    assert (
        policy.codec.encode_chat(policy.codec.chat("1+1?")) == tokenizer(asked, add_special_tokens=False)["input_ids"]
    )
    config.chat_template_args, config.system_prompt = {"enable_thinking": True}, None
    policy = CausalLM.from_config(config, model, seed=0)
    asked = "<|begin|>user\n1+1?<|end|>\n<|begin|>assistant\n<think>"
    assert (
        policy.codec.encode_chat(policy.codec.chat("1+1?")) == tokenizer(asked, add_special_tokens=False)["input_ids"]
    )


# ---------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("no_such_module.score", ["no_such_module cannot be imported", "PYTHONPATH"]),
        ("my_rewards.of_three", ["of_three is called with (completion, problem)", "change its parameters"]),
    ],
)
def test_a_reward_that_cannot_be_used_is_named_before_anything_starts(plug_ins, target, parts):
    with (plug_ins / "my_rewards.py").open("a") as file:
        file.write("\n\ndef of_three(a, b, c): return 1.0\n")
    with pytest.raises(ConfigError) as caught:
        ReasoningJob(tiny_math(f"reward._target_={target}")).require_checkpoint(None)
    assert [p for p in (f"reward._target_ is {target!r}", *parts) if p not in str(caught.value)] == [], caught.value


@pytest.mark.parametrize("returned", [None, "right", float("nan")])
def test_a_reward_is_a_finite_number(returned):
    said = r"reward\._target_ is .* for '#6' as a completion of '7\+8-9=', and a reward is a finite number: return one"
    verifier = Verifier(PromptTemplate("compact"), function=lambda completion, problem: returned)
    with pytest.raises(ConfigError, match=said):
        verifier.verify(["#6"], [SIX])


def test_a_reward_that_raises_is_shown_by_its_own_line(plug_ins):
    (plug_ins / "my_rewards.py").write_text("def score(completion, problem):\n    return {'7': 1.0}[problem.answer]\n")
    function = reward_function(RewardConfig(_target_="my_rewards.score"))
    asked = r"reward\._target_, called with '#6' as a completion of '7\+8-9=', raised KeyError: '6', from"
    with (
        pytest.raises(ConfigError, match=rf"{asked}\n  /.*/my_rewards\.py, line 2, in score: return"),
        Verifier(PromptTemplate("compact"), function=function) as verifier,
    ):
        verifier.verify(["#6"], [SIX])


def test_a_chat_is_refused_where_no_template_could_write_it(tmp_path):
    model = model_folder(tmp_path / "model", "qwen2")
    config = LanguagePolicyConfig(folder=str(model), chat_template_args={"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"chat_template_args is .* does not read enable_thinkin: use names"):
        CausalLM.from_config(config, model, seed=0)
    with pytest.raises(ConfigError, match=r"system_prompt is 'Be brief\.', but the tokenizer has no chat template"):
        CausalLM.from_config(LanguagePolicyConfig(system_prompt="Be brief."), None, seed=0)


def test_calls_of_a_reward_that_waits_run_at_once_and_keep_their_order() -> None:
    together = threading.Barrier(3, timeout=30.0)

    def judged(completion: str, problem: Problem) -> float:
        together.wait()  # or breaks, where fewer than three run at once
        return float(completion)

    async def awaited(completions: list[str], problems: list[Problem]) -> list[float]:
        waiting.append(None)
        while len(waiting) < 3:
            await asyncio.sleep(0.001)
        return [float(completion) for completion in completions]

    waiting: list[None] = []
    for function, batch_size, texts in ((judged, 0, ["1", "0.5", "2"]), (awaited, 2, ["1", "0.5", "2", "3", "4"])):
        config = RewardConfig(_target_="a.judge", concurrency=3, batch_size=batch_size)
        with Verifier(PromptTemplate("compact"), config, function) as verifier:
            assert verifier.verify(texts, [SIX] * len(texts)).raw.tolist() == list(map(float, texts))


def test_the_pages_named_rewards_are_summed_by_weight_and_reported(plug_ins, tmp_path):
    config = tiny_math(*shortened(command_with("right_and_short"), tmp_path))
    train(config)
    (row,) = metric_rows(tmp_path / "run")
    assert row["reward/right"] == row["rollout/accuracy"]
    assert row["rollout/reward"] == pytest.approx(row["reward/right"] + 0.2 * row["reward/short"])
    assert 0 < row["reward/short"] < 1
    function = reward_function(config.reward)
    with Verifier(PromptTemplate("compact"), config.reward, function) as verifier:
        verified = verifier.verify(["#6", "#6", "=" * 24 + "#6"], [SIX] * 3, [True, False, True])
    assert verified.raw.tolist() == pytest.approx([1.2, 0.0, 1.0])
    assert {name: found.tolist() for name, found in verified.named.items()} == {"right": [1, 0, 1], "short": [1, 0, 0]}


@pytest.mark.parametrize(
    ("returned", "weights", "words"),
    [
        (
            [{"right": 1.0}],
            {"wright": 1.0},
            r"reward\.weights is {'wright': 1\.0}, but .* returned rewards named 'right'",
        ),
        ([1.0], {"right": 1.0}, r"reward\.weights is {'right': 1\.0}, but .* returned a number: give the weight"),
        ([{"right": 1.0}], {}, r"reward\.weights is {}, but .* returned rewards named 'right': give the weight"),
        ([], {}, r"reward\._target_ is \[\], but it returned that for 1 completions .* a list of as many rewards"),
    ],
)
def test_rewards_by_name_or_in_lists_that_do_not_fit_are_named(returned, weights, words):
    config = RewardConfig(_target_="a.judge", batch_size=4, weights=weights)
    with (
        Verifier(PromptTemplate("compact"), config, lambda completions, problems: returned) as verifier,
        pytest.raises(ConfigError, match=words),
    ):
        verifier.verify(["#6"], [SIX])
