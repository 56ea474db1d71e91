"""The planner against exhaustive enumeration, and the formulas against a simulation, on random workflows."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning import all_trees, random_case, random_tree

from rlinf_embodied.errors import PlanError
from rlinf_embodied.flow import cost
from rlinf_embodied.flow.planner import find_plans, plan_tree
from rlinf_embodied.flow.simulate import simulate


@settings(max_examples=40, derandomize=True)
@given(st.integers(0, 10**6))
def test_the_best_plan_is_the_best_of_all_trees(seed: int) -> None:
    pricer = random_case(seed, blocks=6)
    best_s, _ = all_trees(pricer)
    if np.isinf(best_s):
        with pytest.raises(PlanError, match=r"GB short|do not suit"):
            find_plans(pricer, width=16)
        return
    plans = find_plans(pricer, width=16)
    assert plans[0].iteration_s == pytest.approx(best_s, rel=1e-9)


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_predictions_are_those_of_the_tree_and_its_memory_fits(seed: int) -> None:
    pricer = random_case(seed)
    try:
        plans = find_plans(pricer)
    except PlanError:
        return
    for plan in plans[:6]:
        price = pricer.price(plan_tree(plan, pricer))
        assert float(cost.iteration_s(price)[0]) == pytest.approx(plan.iteration_s)
        memory = pricer.memory(plan_tree(plan, pricer))
        assert max(memory.values()) <= plan.peak_bytes <= pricer.classes[0].memory_bytes


@settings(max_examples=120)
@given(st.integers(0, 10**6))
def test_formulas_agree_with_a_simulation_within_one_percent(seed: int) -> None:
    predicted_s, simulated_s = predicted_and_simulated(seed, chain=True)
    if np.isfinite(predicted_s):
        assert predicted_s == pytest.approx(simulated_s, rel=0.01)


@settings(max_examples=80)
@given(st.integers(0, 10**6))
def test_formulas_never_promise_more_than_a_simulation_keeps(seed: int) -> None:
    # forks, and data that a receiver could fetch while others still work, are priced as if all waited
    predicted_s, simulated_s = predicted_and_simulated(seed, chain=False)
    if np.isfinite(predicted_s):
        assert 0.99 * simulated_s <= predicted_s


def predicted_and_simulated(seed: int, chain: bool) -> tuple[float, float]:
    pricer = random_case(seed, chain=chain)
    tree = random_tree(pricer, random.Random(seed + 1))
    predicted_s = float(cost.iteration_s(pricer.price(tree))[0])
    return predicted_s, simulate(tree, pricer).iteration_s if np.isfinite(predicted_s) else np.inf
