"""Engines as a service, and episodes that run freely on them: the same tokens, whoever waits for whom."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from math_runs import tiny_math
from runs import train

from experiments.bench.emulated_engine import EmulatedEngine
from policies.causal_lm import CausalLM
from rlinf_embodied.config import LanguagePolicyConfig, ToolConfig
from rlinf_embodied.config.reasoning import GenerationConfig
from rlinf_embodied.data.problems import Problem
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.reasoning import engine as engine_module
from rlinf_embodied.reasoning.batch import (
    Completions,
    EngineLoad,
    GenerationBlock,
    Prompt,
    PromptedProblem,
    all_log_probs,
)
from rlinf_embodied.reasoning.engine import Engine, Generated, generate, poll, update
from rlinf_embodied.reasoning.episode_runner import EpisodeRunner
from rlinf_embodied.reasoning.episodes import episodes_of, run_episodes
from rlinf_embodied.reasoning.generation import ExactEngine
from rlinf_embodied.reasoning.tool_calls import ToolCalls
from rlinf_embodied.telemetry.progress import report_progress

SAMPLING = GenerationConfig(max_new_tokens=24, max_num_seqs=5)
SHAPE = LanguagePolicyConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
PROBLEMS = [Problem(i, f"{3 + i}+4=", str(7 + i), None, "sum", "sum1-1-9") for i in range(6)]


def model(seed: int) -> CausalLM:
    made = CausalLM.from_config(SHAPE, None, seed)
    with torch.no_grad():
        made.model.get_input_embeddings().weight[1] *= 4  # some rows end early
    return made


@pytest.fixture(scope="module")
def policies() -> tuple[CausalLM, CausalLM]:
    return model(5), model(6)


def requests(policy: CausalLM, problems: list[Problem] = PROBLEMS, **changes) -> GenerationBlock:
    prompts = tuple(replace(prompt, sample=sample) for _, prompt in with_prompts(policy, problems) for sample in (0, 1))
    return replace(GenerationBlock(prompts, SAMPLING, 9, 2), **changes)


def with_prompts(policy: CausalLM, problems: list[Problem]) -> list[PromptedProblem]:
    encode = lambda text: tuple(policy.codec.encode_chat(policy.codec.chat(text)))  # noqa: E731
    return [(problem, Prompt(problem.id, encode(problem.question))) for problem in problems]


def ended(engine: Engine) -> dict[int, Generated]:
    found: dict[int, Generated] = {}
    while any(engine.stats()):
        found |= {row.row: row for row in engine.poll()}
    return found


def tokens_of(rows: dict[int, Generated]) -> list[list[int]]:
    return [rows[number].tokens for number in sorted(rows)]


# ------------------------------------------------------------------------------------------------------------- engines
def test_the_load_is_that_of_a_queue_in_front_of_the_slots(policies, monkeypatch) -> None:
    clock = iter(range(1 << 20))
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))  # a poll takes 1 s
    load, engine, found = EngineLoad(), ExactEngine(policies[0]), dict[int, Generated]()
    numbers = engine.submit(requests(policies[0]))
    while len(found) < len(numbers):
        found |= {row.row: row for row in poll(engine, load)}
    lengths = [len(found[number].tokens) for number in numbers]
    slots, spans = [1] * SAMPLING.max_num_seqs, list[tuple[int, int]]()  # polls of a row's first and last token
    for length in lengths:  # in the order of the queue, each into the slot that is free first
        begun = min(slots)
        spans.append((begun, begun + length - 1))
        slots[slots.index(begun)] = begun + length - 1
    counts = [sum(first <= poll < last for first, last in spans) for poll in range(1, max(slots) + 1)]
    assert len(set(lengths)) > 2
    assert (load.seconds, load.rows, load.most) == (max(slots), 12, max(counts))
    assert load.waiting_s == sum(first - 1 for first, _ in spans)
    assert load.tail_s == sum(4 * count < max(counts) for count in counts)
    assert load.take().rows == 12
    assert (load.seconds, load.rows) == (0, 0)


@pytest.mark.parametrize("greedy", [True, False])
def test_a_pause_other_requests_and_the_same_weights_again_change_no_token(policies, greedy) -> None:
    policy, _ = policies
    block = requests(policy, greedy=greedy)
    alone = generate(ExactEngine(policy), block)
    engine = ExactEngine(policy)
    found = {row.row: row for row in _begun(engine, block, steps=4)}
    engine.pause()
    assert engine.poll() == []
    engine.load(0, policy)
    engine.resume()
    more = engine.submit(requests(policy, [Problem(77, "1+2+3+4+5+6=", "21", None, "sum", "x")], greedy=greedy))
    found |= ended(engine)
    assert [found[number].tokens for number in range(12)] == [row.tokens for row in alone]
    assert set(found) == {*range(12), *more}
    assert all(row.versions == [0] * len(row.tokens) for row in found.values())


def _begun(engine: Engine, block: GenerationBlock, steps: int) -> list[Generated]:
    engine.submit(block)
    return [row for _ in range(steps) for row in engine.poll()]


def test_versions_say_which_weights_sampled_each_token(policies) -> None:
    old, new = policies
    engine = ExactEngine(old, version=3)
    found = {row.row: row for row in _begun(engine, requests(old), steps=6)}
    update(engine, 4, new)
    found |= ended(engine)
    log_probs = [all_log_probs(policy, _sequences(old, found), 1.0, 1024) for policy in policies]
    assert {len(set(row.versions)) for row in found.values()} == {1, 2}
    for number, row in found.items():
        assert len(row.versions) == len(row.tokens)
        exact = torch.stack(log_probs)[torch.tensor(row.versions) - 3, number, torch.arange(len(row.tokens))]
        torch.testing.assert_close(torch.tensor(row.log_probs), exact, atol=2e-5, rtol=0)


def _sequences(policy: CausalLM, rows: dict[int, Generated]) -> TokenBatch:
    return TokenBatch.of([prompt.tokens for prompt in requests(policy).prompts], tokens_of(rows))


def test_an_aborted_row_continues_elsewhere_with_the_same_noise(policies) -> None:
    policy, _ = policies
    whole = ended_of(ExactEngine(policy), requests(policy))
    engine = ExactEngine(policy)
    found = {row.row: row for row in _begun(engine, requests(policy), steps=5)}
    engine.pause()
    parts = {row.row: row for row in engine.abort(range(12))}
    assert found.keys() | parts.keys() == set(range(12))
    assert engine.stats() == (0, 0)
    engine.resume()
    for number, part in parts.items():
        first = requests(policy).prompts[number]
        said, left = part.tokens, SAMPLING.max_new_tokens - len(part.tokens)
        prompt = replace(first, tokens=(*first.tokens, *said), place=len(said), room=left)
        (rest,) = ended_of(engine, requests(policy, prompts=(prompt,))).values()
        assert [*said, *rest.tokens] == whole[number].tokens


def ended_of(engine: Engine, block: GenerationBlock) -> dict[int, Generated]:
    engine.submit(block)
    return ended(engine)


class Quick(EmulatedEngine):
    step_s, row_s, median, spread = 2e-3, 1e-4, 6.0, 0.6


class Slow(Quick):
    step_s = 0.05


def test_an_emulated_engine_takes_the_time_and_keeps_to_the_protocol(policies) -> None:
    policy, _ = policies
    engine, block = Quick(tiny_math("generation.max_num_seqs=5"), policy, 0, ["cpu"]), requests(policy)
    assert isinstance(engine, Engine)
    rows = ended_of(engine, block)
    again = Slow(
        tiny_math("generation.max_num_seqs=12"), policy, 0, ["cpu"]
    )  # some rows are unfinished after two polls
    half = {row.row: row for row in _begun(again, block, steps=2)}
    again.pause()
    time.sleep(0.1)
    assert not again.poll()
    again.load(1, policy)
    again.resume()
    half |= ended(again)
    assert tokens_of(half) == tokens_of(rows)  # however many decode at once
    assert all(len(row.versions) == len(row.tokens) for row in half.values())
    assert any(row.versions[-1] == 1 for row in half.values())


class Several(ExactEngine):
    devices: ClassVar[list[list[str]]] = []

    def __init__(self, config, policy, version, devices) -> None:
        super().__init__(policy, version)
        self.devices.append([*devices])


def test_the_plan_gives_engines_several_devices_and_training_does_not_depend_on_it(tmp_path) -> None:
    words = [
        f"generation.engine={__name__}.Several",
        "cluster.num_devices=4",
        "eval.num_samples=0",
        "generation.rows_per_batch=8",
    ]
    digests = []
    for size, plan in (
        (1, "collocated"),
        (2, "collocated"),
        (2, "disaggregated"),
        (2, "hybrid"),
        (4, "collocated"),
        (2, "auto"),
    ):
        Several.devices.clear()
        sized = [f"generation.tensor_parallel_size={size}", f"plan={plan}", f"run.dir={tmp_path}/{size}{plan}"]
        digests.append(train(tiny_math(*words, *sized))["weights_sha256"])
        assert all(devices == ["cpu"] * size for devices in Several.devices)
    assert len(set(digests)) == 1
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size is 3, but an engine is on one node, .*\[4\], are not mult"
    ):
        train(tiny_math(*words, "generation.tensor_parallel_size=3", f"run.dir={tmp_path}/three"))


# --------------------------------------------------------------------------------------------------------------- tools
def late(text: str, problem: Problem) -> str | None:
    """Answers turns of an even number of characters, later for some problems than for others."""
    time.sleep(0.004 * (problem.id % 3))
    return f"{problem.question[0]};" if len(text) % 2 == 0 else None


def stuck(text: str, problem: Problem) -> str | None:
    time.sleep(60)
    return None


def long(text: str, problem: Problem) -> str | None:
    for _ in range(8):
        time.sleep(0.2)
        report_progress()
    return text


def test_a_stuck_tool_is_named_and_a_long_call_with_progress_is_none(policies) -> None:
    config = ToolConfig(_target_=f"{__name__}.long", timeout_s=1.0)
    calls = ToolCalls(config)
    assert calls.call("12*4=", PROBLEMS[0]) == "12*4="  # after 1.6 s
    calls = ToolCalls(replace(config, _target_=f"{__name__}.stuck"))
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"(?s)timeout_s is 1.*stuck, called with '12\*4=' for '3\+4='.*sleep\(60\)"):
        calls.call("12*4=", PROBLEMS[0])
    assert time.monotonic() - start < 10


# -------------------------------------------------------------------------------------------------------- free running
def free_config(*overrides: str):
    words = (f"tool._target_={__name__}.late", "tool.concurrency=4", "generation.max_new_tokens=24", "run.exact=false")
    return tiny_math(*words, "algorithm.group_size=2", "generation.rows_per_block=8", "episodes.free=true", *overrides)


def asked(policy: CausalLM, numbers: range) -> list[PromptedProblem]:
    return with_prompts(policy, [Problem(i, f"{1 + i % 9}+4=", "5", None, "sum", "sum1-1-9") for i in numbers])


def taken(free: EpisodeRunner, block: int) -> Completions:
    while (found := free.take(block)) is None:
        free.advance()
    return found


def test_free_episodes_say_what_they_say_turn_by_turn(policies) -> None:
    policy, _ = policies
    config = free_config()
    problems = asked(policy, range(4))
    turns = episodes_of(problems, 2, config, policy.codec, ToolCalls(config.tool))
    expected = run_episodes(ExactEngine(policy), turns, 2, GenerationBlock((), config.generation, config.run.seed, 0))
    free = EpisodeRunner(config, policy.codec, ExactEngine(policy))
    free.begin(0, [problems])
    taken(free, 0)
    free.begin(0, [problems])  # a profile runs an iteration again
    free.begin(0, [problems])
    found = taken(free, 0)
    assert found.texts == expected.texts
    assert found.turns == expected.turns > 8
    assert found.rows.completions() == expected.rows.completions()
    assert torch.equal(found.rows.mask, expected.rows.mask)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_long_episodes_are_carried_over_and_none_is_lost(policies, late, top_p) -> None:
    limits = "episodes.max_behind=1", f"episodes.drop_late={late}", f"generation.top_p={top_p}"
    config = free_config("episodes.carried=0.5", *limits)
    engine = ExactEngine(policies[0])
    free = EpisodeRunner(config, policies[0].codec, engine)
    seen: list[int] = []
    behind = 0
    for iteration in range(4):  # 4 prompts of each, and 2 of the next one ahead
        update(engine, iteration, policies[iteration % 2])
        free.enter(0, iteration, 0)
        free.begin(0, [asked(policies[0], range(4 * iteration, 4 * iteration + 6))])
        made = taken(free, 0)
        assert made.version == iteration
        seen += [problem.id for problem in made.problems]
        if made.versions is not None:
            behind = max(behind, iteration - int(made.versions[made.rows.mask].min()))
            assert int(made.versions.max()) <= iteration
            log_probs = [all_log_probs(one, made.rows, 1.0, 4096) for one in policies]
            expected = torch.where(made.versions % 2 == 0, *log_probs)
            torch.testing.assert_close(made.log_probs, expected, atol=2e-5, rtol=0)
    assert len(seen) == len(set(seen)) == 16
    assert set(seen) <= set(range(18))
    assert behind == 1


def test_a_training_with_partial_rollouts(tmp_path) -> None:
    config = free_config("episodes.carried=0.5", "run.num_iterations=3", "eval.num_samples=0")
    config.run.dir = str(tmp_path)
    train(config)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    stale = [row["rollout/stale_tokens"] for row in rows if "rollout/stale_tokens" in row]
    assert len(stale) == 3
    assert stale[0] == 0
    assert 0 < max(stale) < 1
    assert all(row["rollout/completions"] == 16 for row in rows if "rollout/completions" in row)


def test_what_free_running_does_not_go_with() -> None:
    for words, path in (
        (["run.exact=true"], "episodes.free"),
        (["episodes.free=false", "episodes.carried=0.5"], "episodes.carried"),
        (["episodes.carried=0.5", "algorithm.tis_cap=null"], "algorithm.tis_cap"),
        (
            ["episodes.carried=0.5", "data.unsolved_share=0", "data.files.all=a.jsonl"],
            "data.unsolved_share is 0.*, but an",
        ),
        (["tool.waits=true"], "tool.waits"),
        (["tool._target_=null", "agent._target_=a.b", "agent.waits=true"], "agent.waits"),
    ):
        with pytest.raises(ConfigError, match=path):
            free_config(*words)
