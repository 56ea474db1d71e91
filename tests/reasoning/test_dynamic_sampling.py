"""Dynamic sampling: which groups are trained on, when it gives up, and which problems it takes."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
from math_runs import DAPO, tiny_math
from model_folders import write_rows
from runs import clone, executor_for, iterate

from rlinf_embodied.config import DataConfig
from rlinf_embodied.data.generated import GeneratedProblems
from rlinf_embodied.data.problems import Split
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reasoning import workflow
from rlinf_embodied.reasoning.actor_stage import ActorStage
from rlinf_embodied.reasoning.batch import ScoredGroup
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.reasoning.prompt_stage import Prompts, PromptStage
from rlinf_embodied.reasoning.workflow import choose_groups
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.training.job import Progress

MIXED, RIGHT, WRONG = (True, False), (True, True), (False, False)


def report(correct: dict[int, tuple[tuple[bool, ...], ...]]) -> list[ScoredGroup]:
    return [
        ScoredGroup(block, k, group, len(set(group)) == 1, float(sum(group)), 0)
        for block, groups in correct.items()
        for k, group in enumerate(groups)
    ]


# --------------------------------------------------------------------------------------------------------------- filter
def test_only_groups_whose_members_differ_are_useful_in_the_order_of_rounds_and_blocks():
    decide = partial(choose_groups, 4)
    first = [report({1: (RIGHT, MIXED)}), report({0: (MIXED, WRONG)})]  # two workers, in any order
    decision = decide([first])
    assert (decision.enough, decision.message) == (False, ((0, 0, 0), (0, 1, 1)))
    second = [report({0: (MIXED, MIXED), 1: (MIXED, RIGHT)})]
    decision = decide([first, second])
    assert (decision.enough, decision.message) == (True, ((0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)))


# ---------------------------------------------------------------------------------------------------------------- runs
def test_a_policy_that_is_always_wrong_makes_no_step_after_the_last_round():
    config = tiny_math(*DAPO, "algorithm.max_resamples=2", "generation.max_new_tokens=1")  # no answer comes to its end
    (row,) = iterate(config, executor_for(config, config.plan.variants, 1, SerialSession()), 1)
    assert [row[f"rollout/{name}"] for name in ("rounds", "useful_groups", "completions")] == [3.0, 0.0, 96.0]
    assert row["charts/optimizer_steps"] == 0


@pytest.fixture
def taken(monkeypatch) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """(iteration, round, block, problems) of what the prompts stage gives out."""
    seen = []
    original = PromptStage.run

    def run(self, step_context, inputs):
        output = original(self, step_context, inputs)
        for block, made in output.blocks.items():
            problems = tuple(problem.id for problem, _ in made[block % self._config.blocks_per_batch])
            seen.append((step_context.iteration, step_context.round, block, problems))
        return output

    monkeypatch.setattr(PromptStage, "run", run)
    return seen


def test_every_round_of_every_iteration_takes_the_next_problems_of_the_stream(taken):
    config = tiny_math(*DAPO)
    executor = executor_for(config, config.plan.variants, 1, SerialSession())
    job, progress, rounds = ReasoningJob(config), Progress(), []
    for _ in range(3):
        rounds.append(job.run_iteration(executor, progress)[1]["rollout/rounds"])
        progress.iteration += 1
        assert progress.counts == {"problems": 8 * sum(rounds)}
    assert max(rounds) > 1
    ids = [number for *_, problems in sorted(taken) for number in problems]
    assert len(ids) == 8 * sum(rounds)
    assert ids == list(range(ids[0], ids[0] + len(ids)))  # none is left out, none comes twice


def test_the_actor_trains_on_the_groups_that_were_chosen(monkeypatch):
    questions, decisions, trained = {}, [], []
    give, decide, rows_of = PromptStage.run, choose_groups, ActorStage._rows_of

    def given(self, step_context, inputs):
        output = give(self, step_context, inputs)
        for block, made in output.blocks.items():
            asked = made[block % self._config.blocks_per_batch]
            questions[step_context.round, block] = [problem.question for problem, _ in asked]
        return output

    def recorded(wanted, rounds):
        decisions.append(decide(wanted, rounds))
        return decisions[-1]

    def rows(self, step_context, block, payloads):
        made = rows_of(self, step_context, block, payloads)
        decode = self.shared.policy.codec.decode
        prompts = zip(made.sequences.tokens.tolist(), made.sequences.prompt_lengths.tolist(), strict=True)
        trained.extend((block, decode(row[:n])) for row, n in list(prompts)[: made.num_trained])
        return made

    monkeypatch.setattr(PromptStage, "run", given)
    monkeypatch.setattr(workflow, "choose_groups", recorded)
    monkeypatch.setattr(ActorStage, "_rows_of", rows)
    config = tiny_math(*DAPO)
    iterate(config, executor_for(config, config.plan.variants, 1, SerialSession()), 1)
    chosen = sorted(decisions[-1].message, key=lambda place: (place[1], place[0], place[2]))  # block by block
    assert len(chosen) == 8
    assert len({number for number, _, _ in chosen}) > 1
    expected = [(block, questions[number, block][group]) for number, block, group in chosen]
    assert trained == [row for row in expected for _ in range(4)]


# ----------------------------------------------------------------------------------------------------- difficulty pools
def test_problems_that_taught_nothing_are_drawn_less_often(tmp_path):
    rows = [{"question": f"{k}+0=", "answer": str(k)} for k in range(41)]
    files = {"train": write_rows(tmp_path / "a.jsonl", rows[:40]), "test": write_rows(tmp_path / "b.jsonl", rows[40:])}
    config = tiny_math()
    config.data = DataConfig(files=files, solved_share=0.25, unsolved_share=0.5)
    prompts = Prompts(config, None, Split.train)
    every = {problem.question: problem.key for problem, _ in prompts.batch(0, 40)}
    pools = {every[f"{k}+0="]: k < 10 for k in range(20)}
    drawn = prompts.batch(0, 4000, pools)
    counts = Counter(int(problem.answer) for problem, _ in drawn)
    mean = lambda first: sum(counts[k] for k in range(first, first + 10)) / 10  # noqa: E731
    assert mean(0) / mean(30) == pytest.approx(0.25, abs=0.05)
    assert mean(10) / mean(30) == pytest.approx(0.5, abs=0.07)
    assert drawn[1000:1060] == prompts.batch(1000, 60, pools)
    assert len({problem.id for problem, _ in drawn}) == 4000
    assert len(prompts.batch(0, 9, dict.fromkeys(every.values(), True))) == 9  # all are in a pool


def test_pools_are_those_of_the_iterations_before_and_part_of_a_checkpoint(tmp_path, taken):
    problems = GeneratedProblems("sum1-2-9", 0).batch(Split.train, 0, 60)
    rows = list({p.question: {"question": p.question, "answer": p.answer} for p in problems}.values())
    parts = {"train": rows[:12], "test": rows[12:]}  # the third iteration is in the second epoch
    files = [f"data.files.{name}={write_rows(tmp_path / f'{name}.jsonl', part)}" for name, part in parts.items()]
    pools = ["data.solved_share=0.2", "data.unsolved_share=0.2"]
    start = f"warm_start.checkpoint={clone(tiny_math())}"
    config = tiny_math(*files, start, *pools)
    executor, progress = executor_for(config, config.plan.variants, 1, SerialSession()), Progress()
    iterate(config, executor, 2, progress)
    found = {key: n for key, n in progress.counts.items() if key != "problems"}
    assert 0 < len(found) <= 16
    assert set(found.values()) <= {0, 1}
    again, other = copy.deepcopy(progress), Progress(iteration=2, counts={"problems": 16})
    asked = []
    for kept in (progress, again, other):
        taken.clear()
        iterate(config, executor, 1, kept)
        asked.append(list(taken))
    assert asked[0] == asked[1] != asked[2]
    with pytest.raises(ConfigError, match="problems are chosen by the previous iteration"):
        ReasoningJob(config).require_staleness(1)
