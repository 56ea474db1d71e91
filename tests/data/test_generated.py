"""Generated problems are functions of their key, in disjoint splits, and their worked solutions are right."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_embodied.config import LanguagePolicyConfig
from rlinf_embodied.data.generated import GeneratedProblems, parse_level
from rlinf_embodied.data.problems import Problem, Split, problem_id, split_of
from rlinf_embodied.data.prompt_templates import PromptTemplate
from rlinf_embodied.errors import ConfigError

LEVELS = ["sum4-6-9", "sum1-2-50", "chain1-1", "chain2-3", "chain8-8"]
seeds = st.integers(0, 2**31 - 1)
levels = st.sampled_from(LEVELS)
splits = st.sampled_from(list(Split))
positions = st.integers(0, 2**39)
COMPACT, NATURAL = PromptTemplate("compact"), PromptTemplate("natural")


def check(problem: Problem) -> None:
    """Every step of the solution holds, the last one states the answer, and that is right by the question alone."""
    assert problem.solution is not None
    steps = [step.split("=") for step in problem.solution.rstrip(";").split(";")]
    assert all(eval(left) == int(right) for left, right in steps), problem
    assert steps[-1][1] == problem.answer
    assert eval(problem.question.removesuffix("=")) == int(problem.answer)


@given(levels, seeds, splits, positions)
def test_answers_and_all_steps_of_worked_solutions_are_right(level, seed, split, position):
    (problem,) = GeneratedProblems(level, seed).batch(split, position, 1)
    check(problem)
    assert (problem.level, problem.family) == (level, parse_level(level)[0])


@given(levels, seeds, splits, positions)
def test_a_problem_does_not_depend_on_the_batch_that_it_is_drawn_in(level, seed, split, position):
    batch = GeneratedProblems(level, seed).batch(split, position, 4)
    assert batch[2:] == GeneratedProblems(level, seed).batch(split, position + 2, 2)
    assert [problem.id for problem in batch] == [problem_id(split, position + i) for i in range(4)]


@pytest.mark.parametrize("level", ["sum1-2-9", "chain2-2"])
def test_no_question_is_in_two_splits_whatever_the_seeds(level):
    # sum1-2-9 has some 2,800 questions: the same ones are met under several seeds
    drawn = {
        split: {p.question for seed in range(3) for p in GeneratedProblems(level, seed).batch(split, 0, 300)}
        for split in Split
    }
    assert all(drawn.values())
    assert drawn[Split.train].isdisjoint(drawn[Split.test])
    assert drawn[Split.train].isdisjoint(drawn[Split.validation])
    assert drawn[Split.test].isdisjoint(drawn[Split.validation])
    assert all(split_of(question) is split for split in Split for question in drawn[split])


@given(levels, seeds, splits, positions)
def test_forms_read_back_what_they_write(level, seed, split, position):
    (problem,) = GeneratedProblems(level, seed).batch(split, position, 1)
    for form in (COMPACT, NATURAL):
        for worked in (False, True):
            text = form.completion(problem, worked)
            answer = form.final_answer(text)
            assert answer is not None
            assert answer.replace(" ", "") == problem.answer
            assert form.is_formatted(text)
    for text in (COMPACT.prompt(problem), COMPACT.completion(problem, True)):
        assert set(text) <= set(LanguagePolicyConfig().characters)


def test_shares_of_the_splits_are_a_tenth_and_a_twentieth():
    # 20,000 questions: standard errors 0.0021 and 0.0015
    found = [split_of(f"{a}+{b}-{a + b}=") for a in range(200) for b in range(100)]
    assert abs(found.count(Split.test) / 20_000 - 0.10) < 0.01
    assert abs(found.count(Split.validation) / 20_000 - 0.05) < 0.01


def test_levels_are_drawn_in_equal_shares_and_are_as_hard_as_they_say():
    batch = GeneratedProblems("sum4-6-9, chain2-3", 5).batch(Split.train, 0, 2000)
    sums = [p.question for p in batch if p.level == "sum4-6-9"]
    assert abs(len(sums) - 1000) < 100  # four standard deviations are 90
    further = [len(re.findall("[-+]", question)) for question in sums]
    assert set(further) == {4, 5, 6}
    assert {int(term) for question in sums for term in re.findall(r"\d+", question)} == set(range(1, 10))
    operations = {len(re.findall("[-+*]", p.question)) for p in batch if p.level == "chain2-3"}
    assert operations == {2, 3}


@pytest.mark.parametrize(
    "level", ["", "sum", "sun4-6-9", "sum4-6", "sum6-4-9", "sum4-6-0", "sum0-1-9", "sum4-6-9-1", "chain0-1", "chain3-2"]
)
def test_a_level_that_is_none_is_refused_with_its_forms(level):
    with pytest.raises(ConfigError, match=r"data\.level is .*(choose)"):
        GeneratedProblems(level, 0)


def test_a_level_without_questions_for_a_split_says_so():
    # 1+1= and 1-1= are all there is, and neither hashes into the tests
    assert {split_of("1+1="), split_of("1-1=")} == {Split.train}
    assert len(GeneratedProblems("sum1-1-1", 0).batch(Split.train, 0, 3)) == 3
    with pytest.raises(ConfigError, match=r"'sum1-1-1'.*'test'.*larger sizes"):
        GeneratedProblems("sum1-1-1", 0).batch(Split.test, 0, 1)
