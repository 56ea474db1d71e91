"""Episodes of several turns: token for token what was sampled and given, and the same weights under every plan."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from math_runs import tiny_math
from model_folders import BOS, bpe_tokenizer
from runs import train
from stopped_runs import interrupt_in, same_end

from experiments.examples.calculator import calculate
from policies.causal_lm import CausalLM
from policies.text_codec import TextCodec
from rlinf_embodied.compose.commands import compose_answers
from rlinf_embodied.config import ClusterConfig, LanguagePolicyConfig, MathConfig, PlanConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.interfaces.language import padded
from rlinf_embodied.reasoning.batch import GenerationBlock, Prompt, all_log_probs
from rlinf_embodied.reasoning.engine import Generated, generate
from rlinf_embodied.reasoning.episodes import Episode, Episodes, completions_of, episodes_of, run_episodes
from rlinf_embodied.reasoning.evaluation import evaluate_command
from rlinf_embodied.reasoning.fine_tuning import with_calls
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.helper_process import HelperProcess
from rlinf_embodied.reasoning.tool_calls import ToolCalls
from rlinf_embodied.tools.chaos import Chaos, Fault, disturbed

TOOL = ["tool._target_=experiments.examples.calculator.calculate", "warm_start.tool_share=0.5"]
APART = PlanConfig(name="apart", variants=[{"items": ["episodes on 0 | generation on 1", "reward+actor on all"]}])
ON_WAITING = PlanConfig(
    name="waiting", variants=[{"items": ["episodes on 2 | generation on 0,1", "reward+actor on 0,1"]}]
)
TWO = ["cluster.num_devices=2"]
PROBLEMS = [Problem(i, f"{3 + i}+4=", str(7 + i), None, "sum", "sum1-1-9") for i in range(4)]


def echo(text: str, problem: Problem) -> str | None:
    """Answers every turn of an even number of characters, by the problem's first character and the turn's length."""
    return f"{problem.question[0]}{len(text)};" if len(text) % 2 == 0 else None


@pytest.fixture(scope="module")
def policy() -> CausalLM:
    made = CausalLM.from_config(
        LanguagePolicyConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32), None, 5
    )
    with torch.no_grad():
        made.model.get_input_embeddings().weight[1] *= 6  # turns end, but not all of them at once
    return made


def asked(policy: CausalLM) -> list[tuple[Problem, Prompt]]:
    return [
        (problem, Prompt(problem.id, tuple(policy.codec.encode_chat(policy.codec.chat(problem.question)))))
        for problem in PROBLEMS
    ]


def some(policy: CausalLM, *overrides: str) -> tuple[Episodes, int, GenerationBlock]:
    config = tiny_math(f"tool._target_={__name__}.echo", "generation.max_new_tokens=60", *overrides)
    block = GenerationBlock((), config.generation, 9, 2)
    return episodes_of(asked(policy), 3, config, policy.codec, ToolCalls(config.tool)), 3, block


@pytest.mark.parametrize("restrictions", [[], ["generation.top_k=12", "generation.top_p=0.95"]])
def test_what_was_sampled_and_what_was_given_stays_as_it_was_token_for_token(policy, restrictions) -> None:
    episodes, _, block = some(policy, *restrictions)
    said: dict[tuple[int, int], list[int]] = {}  # every row's continuation by the engine and the tool, by (id, sample)
    written: dict[tuple[int, int], str] = {}  # its last turn
    turns = 0
    while turn := episodes.turn():
        turns += 1
        rows = generate(ExactEngine(policy), replace(block, prompts=tuple(turn.values())))
        for prompt, generated in zip(turn.values(), rows, strict=True):
            problem, key = PROBLEMS[prompt.id], (prompt.id, prompt.sample)
            start = policy.codec.encode_chat(policy.codec.chat(problem.question))
            row = said.setdefault(key, [])
            read = list(prompt.tokens[len(start) + len(row) :])
            assert list(prompt.tokens) == [*start, *row, *read]  # what was said, and the tool's answer
            assert not row or policy.codec.decode(read) == echo(written[key], problem)
            sampled = generated.tokens
            row += [*read, *sampled]
            written[key] = policy.codec.decode(sampled)
        episodes.take(dict(zip(turn, rows, strict=True)))
    made = completions_of(episodes.finished(), 3, 0)
    assert turns >= 3
    assert made.turns > 12
    assert made.rows.completions() == [said[k, g] for k in range(4) for g in range(3)]
    found = all_log_probs(policy, made.rows, 1.0, 1024)
    torch.testing.assert_close(found, made.log_probs, atol=2e-5, rtol=0)
    assert torch.equal(found != 0, made.rows.mask)
    assert made.rows.given is not None
    assert (made.rows.support is None) == (not restrictions)
    assert made.rows.support is None or torch.equal(made.rows.support[0] > 0, made.rows.mask)


def test_one_turn_is_a_completion(policy) -> None:
    episodes, size, block = some(policy, "tool.max_turns=1")
    made = run_episodes(ExactEngine(policy), episodes, size, block)
    prompts = tuple(replace(prompt, sample=g) for _, prompt in asked(policy) for g in range(size))
    plain = generate(ExactEngine(policy), replace(block, prompts=prompts))
    assert made.rows.completions() == [row.tokens for row in plain]
    assert torch.equal(made.log_probs, padded([row.log_probs for row in plain], torch.float32))
    assert made.ended.tolist() == [row.ended for row in plain]


def test_a_tools_answer_that_does_not_fit_ends_the_episode(policy) -> None:
    episodes, size, block = some(policy, "generation.max_new_tokens=9")
    made = run_episodes(ExactEngine(policy), episodes, size, block)
    lengths = [len(row) for row in made.rows.completions()]
    assert max(lengths) <= 9
    assert made.rows.given is not None
    assert not any(made.rows.given[row, n - 1] for row, n in enumerate(lengths))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*4=", "48;"),
        ("3+4=7;7-9=", "-2;"),
        ("48 / 6 =", " 8\n"),
        ("7/2=", None),
        ("8/0=", None),
        ("#48", None),
        ("1.5+2=", None),
    ],
)
def test_the_calculator(text, value) -> None:
    assert calculate(text, PROBLEMS[0]) == value


def test_a_worked_answer_as_calls() -> None:
    assert with_calls(calculate, PROBLEMS[0], "12*4=48;48+50=98;#98") == [
        *(("12*4=", False), ("48;", True), ("48+50=", False), ("98;", True), ("#98", False))
    ]
    assert with_calls(calculate, PROBLEMS[0], "12*4=47;#47") == [("12*4=47;#47", False)]  # wrong: no tool says that


CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMED = (  # Llama 3 and Gemma 2, but for the names of their special tokens
    "{{ bos_token }}{% for m in messages %}[HEAD]{{ 'MODEL' if m.role == 'assistant' else m.role }}[BREAK]"
    "{{ m.content | trim }}{{ eos_token }}[END]{% endfor %}{% if add_generation_prompt %}[HEAD]MODEL[BREAK]{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
QWEN3 = (  # keeps thoughts since the last message of a user, in one form
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set thought, text = '', m.content %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and thought %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ text }}{{ eos_token }}\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>{{ eos_token }}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEPT_THOUGHT = re.compile(r"<think>\n(?!\n)((?!</?think>).)*(?<!\n)\n</think>\n\n(?!\n)((?!</think>).)*", re.DOTALL)


def headed(head: str, model: str, line_break: str, end: str) -> str:
    names = {"[HEAD]": head, "MODEL": model, "[BREAK]": line_break, "[END]": end}
    return functools.reduce(lambda text, name: text.replace(name, names[name]), names, TRIMMED)


FORMS = {  # (template, role of the answer, whether it writes this turn unchanged, so that the row continues)
    "ChatML": (CHAT, "tool", lambda turn: True),
    "without line breaks": (CHAT.replace("\n", ""), "tool", lambda turn: True),
    "shortened": (CHAT.replace("m.content", "m.content if loop.last or m.role == 'user'"), "tool", lambda turn: False),
    "Llama 3": (
        headed("<|start_header_id|>", "assistant", "<|end_header_id|>\n\n", ""),
        "tool",
        lambda turn: turn == turn.strip(),
    ),
    "Gemma": (headed("<start_of_turn>", "model", "\n", "\n"), "user", lambda turn: turn == turn.strip()),
    "Mistral": (MISTRAL, "tool", lambda turn: turn == " " + turn.strip()),
    "Qwen3, tool": (QWEN3, "tool", lambda turn: "</think>" not in turn or KEPT_THOUGHT.fullmatch(turn) is not None),
    "Qwen3, user": (QWEN3, "user", lambda turn: "</think>" not in turn),
}
TOKENIZER = bpe_tokenizer(pad=True)
TOKENIZER.bos_token = BOS
SPELLED = ["<think>\n", "\n</think>\n\n", " apples", "\n", "12*4="]
ANY_ID = st.integers(len(TOKENIZER.all_special_ids), len(TOKENIZER) - 1)
SAMPLED = (
    st.lists(  # tokens that no tokenizer would write, whose bytes may be no text; or a text character by character
        st.one_of(
            ANY_ID.map(lambda token: [token]),
            st.sampled_from(SPELLED).map(lambda text: [token for c in text for token in TOKENIZER(c)["input_ids"]]),
        ),
        min_size=1,
        max_size=6,
    ).map(lambda parts: list(itertools.chain(*parts)))
)
THOUGHT = [token for c in "<think>\n12*4=\n</think>\n\n48" for token in TOKENIZER(c)["input_ids"]]


@pytest.mark.parametrize(("template", "role", "keeps"), FORMS.values(), ids=list(FORMS))
@example(sampled=THOUGHT, answer="48;")
@example(sampled=[*TOKENIZER(" ")["input_ids"], *THOUGHT[-2:]], answer="48;")
@given(sampled=SAMPLED, answer=st.text("0123456789;\n", max_size=5))
@settings(deadline=None, max_examples=25)
def test_rows_are_the_sampled_tokens_and_continue_where_the_template_keeps_the_text(
    template, role, keeps, sampled, answer
) -> None:
    TOKENIZER.chat_template = template
    codec = TextCodec(TOKENIZER, None)
    chat = [{"role": "user", "content": "What is 12*4?"}]
    start, turn = codec.encode_chat(chat), [*sampled, TOKENIZER.eos_token_id]
    episode = Episode((PROBLEMS[0], Prompt(0, tuple(start))), 0, codec, 1000, None, each_turn=False)
    episode.next_prompt(chat)
    episode.add(Generated(0, turn, [0.0] * len(turn), [0] * len(turn), True))
    chat += [{"role": "assistant", "content": episode.text}, {"role": role, "content": answer}]
    prompt = episode.next_prompt(chat)
    assert prompt is not None
    assert episode.rows[0].tokens[: len(turn)] == turn
    assert len(episode.rows) == (1 if keeps(episode.text) else 2)
    assert prompt.tokens[: len(start) + len(turn)] == (*start, *turn) or len(episode.rows) == 2
    assert TOKENIZER.decode(prompt.tokens) == TOKENIZER.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


# ----------------------------------------------------------------------------------------------------------- training
def trained(folder, *overrides: str) -> None:
    config = tiny_math(*TOOL, "run.num_iterations=3", "checkpoint.every=1", *overrides)
    config.run.dir = str(folder)
    train(config)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    trained(folder)
    return folder


def test_a_model_with_a_tool_trains(straight) -> None:
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    turns = [row["rollout/turns"] for row in rows if "rollout/turns" in row]
    assert len(turns) == 3
    assert min(turns) > 1.2
    found = compose_answers(
        [f"checkpoint={straight}/checkpoints/latest", "cluster=serial", "eval.num_samples=0", "eval.num_problems=24"]
    )
    assert found is not None
    assert found.tool == tiny_math(*TOOL).tool
    found.run.dir = str(straight / "again")
    after = json.loads((straight / "summary.json").read_text())["accuracy_after"]
    assert evaluate_command(found)["accuracy"] == after
    assert "ended" not in (straight / "samples.md").read_text()


@pytest.mark.parametrize(
    "plan", [["plan=disaggregated", *TWO], ["plan=hybrid", *TWO], ["plan=collocated", *TWO]], ids=lambda plan: plan[0]
)
def test_plans_and_an_interruption_do_not_change_the_weights(straight, monkeypatch, tmp_path, plan) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, 1)
        config = tiny_math(*TOOL, "run.num_iterations=3", "checkpoint.every=1", *plan)
        config.run.dir = str(tmp_path)
        assert train(config, code=130) == {}
    trained(tmp_path, *plan)
    same_end(tmp_path, straight)


def test_queue_and_tail_are_reported_turn_by_turn_and_free_under_the_same_names(tmp_path) -> None:
    reported = []
    for way in ("false", "true"):
        few = ["generation.max_num_seqs=4", "run.exact=false", "run.num_iterations=1", "eval.num_samples=0"]
        config = tiny_math(*TOOL, *few, f"episodes.free={way}", f"run.dir={tmp_path / way}")
        train(config)
        rows = [json.loads(line) for line in (tmp_path / way / "metrics.jsonl").read_text().splitlines()]
        reported += [row for row in rows if "rollout/turns" in row]
    by_turns, free = ({name for name in row if not name.startswith("time/")} for row in reported)
    assert by_turns == free
    for row in reported:  # four of a block's eight rows decode
        assert 0 < row["charts/rows_waiting"] < 32
        assert row["charts/queue_s"] > 0
        assert 0 <= row["charts/tail_share"] < 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[MathConfig, str]:
    """A run with a tool that has processes, by one worker."""
    words = ["tool._target_=experiments.examples.python_tool.evaluate", "warm_start.num_examples=256", *TOOL[1:]]
    config = tiny_math(*words, "eval.num_samples=0", f"run.dir={tmp_path_factory.mktemp('one')}")
    return config, train(config)["weights_sha256"]


def test_killed_processes_of_a_tool_do_not_change_the_weights(undisturbed, monkeypatch, tmp_path) -> None:
    config, weights = undisturbed
    reply, asked, killed = HelperProcess._reply, itertools.count(), []

    def killing(process: HelperProcess, question: bytes) -> bytes:
        if next(asked) % 16 == 3 and process.pid is not None:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        return reply(process, question)

    monkeypatch.setattr(HelperProcess, "_reply", killing)
    elsewhere = replace(config.run, dir=str(tmp_path))
    config = replace(config, plan=APART, run=elsewhere, cluster=replace(config.cluster, num_devices=2))
    assert train(config)["weights_sha256"] == weights
    assert len(set(killed)) > 3


KILLED = ["tool", "generation", "tool", "episodes", "tool"]  # an iteration each; a stage: its worker


@pytest.mark.ray
@pytest.mark.parametrize(
    ("plan", "killed", "waiting"),
    [(PlanConfig(), ["tool"] * 3, 0), (APART, KILLED, 0), (ON_WAITING, KILLED, 1)],
    ids=["auto", "apart", "waiting device"],
)
def test_killed_processes_of_a_tool_and_engines_do_not_change_the_weights(
    undisturbed, tmp_path, plan, killed, waiting
) -> None:
    config, weights = undisturbed
    cluster = ClusterConfig(num_devices=2, waiting_devices=waiting, object_store_bytes=256 << 20)
    tool = replace(config.tool, waits=waiting > 0)
    config = replace(config, plan=plan, run=replace(config.run, dir=str(tmp_path)), cluster=cluster, tool=tool)
    chaos = Chaos([Fault(where, "SIGKILL", 0.2 * number, 0.1) for number, where in enumerate(killed)])
    assert disturbed(config, chaos) == weights
    assert chaos.come == chaos.faults


@pytest.mark.parametrize(
    "algorithm",
    [["algorithm=dapo"], ["algorithm=gspo"], ["algorithm=ppo", "algorithm.group_size=1"]],
    ids=lambda a: a[0],
)
def test_other_algorithms_take_episodes(tmp_path, algorithm) -> None:
    trained(tmp_path, *algorithm, "run.num_iterations=1", "eval.num_samples=0")
