"""RECAP: what is labelled positive, and that the policy does under a label what was done under it."""

from __future__ import annotations

import pytest
import torch
from control_runs import RECAP, learning, reach

from rlinf_embodied.algorithms.recap import TEXTS, Recap, positive
from rlinf_embodied.algorithms.transitions import Columns, episode_returns, text_column
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.runtime.host import StepContext
from tests.observations import env_spec, observed

TASK = "do it"
UPDATES, ROWS = 150, 16


def test_returns_are_minus_the_steps_left_as_a_share_or_minus_one() -> None:
    nan = float("nan")
    # two rows: one ends solved at its third step and runs on, the other fails at its second and is solved at its fourth
    outcomes = torch.tensor([[0, 0], [0, -1], [1, 0], [0, 1], [0, 0]])
    expected = torch.tensor([[-0.2, -1], [-0.1, -1], [0, -0.1], [nan, 0], [nan, nan]])
    found = episode_returns(outcomes.float().flatten(), 2, 10)
    torch.testing.assert_close(found, expected.flatten(), equal_nan=True)


def test_a_share_of_each_task_is_positive_and_all_that_a_human_did() -> None:
    advantages = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, -9.0, 7.0, 8.0, 9.0, -1.0])
    human = torch.tensor([0, 0, 0, 0, 0, 1, 0, 0, 0, 1])
    tasks = torch.tensor([1, 1, 1, 1, 1, 1, 2, 2, 2, 3])
    # 40 % of 5 is 2, of 3 is 1; the third task has a human's sample only
    expected = [False, False, False, True, True, True, False, False, True, True]
    assert positive(advantages, human, tasks, 0.4).tolist() == expected
    assert positive(advantages, human, tasks, 1.0).all()


def bandit(privileged: bool) -> Columns:
    """One step: half of the actions are 0.5 and solve the task, the others are -0.5 and fail."""
    generator, size = torch.Generator().manual_seed(0), (UPDATES, ROWS)
    good = (torch.rand(size, generator=generator) < 0.5).float()
    columns = {
        "state": torch.zeros(*size, 2),
        "action": (good - 0.5)[..., None],
        "return": good - 1.0,
        "is_intervention": torch.zeros(size),
        "images.base_camera": torch.zeros(*size, 16, 16, 3, dtype=torch.uint8),
        "instruction": text_column([TASK]).expand(*size, -1),
    }
    return columns | ({"privileged": torch.zeros(*size, 4)} if privileged else {})


@pytest.mark.parametrize(("name", "critic"), [("tiny_vla", "privileged"), ("flow_vla", "observation")])
def test_the_policy_does_under_a_label_what_was_done_under_it(name: str, critic: str) -> None:
    words = [word for word in RECAP if not word.startswith(("policy=", "policy.critic"))]
    own = [f"policy={name}", f"policy.critic={critic}", "algorithm.lr=3e-3", "algorithm.value_lr=3e-3"]
    own.append("algorithm.positive_share=0.6")  # half of the samples have the same, largest advantage
    config = reach(*words, *own)
    spec = env_spec("Bandit-v0", 8, 1, 10, 1, 2, 4, 16, ("base_camera",))
    policy = load_target(config.policy._target_)(config.policy, spec, seed=1)
    columns, half = bandit(critic == "privileged"), ROWS // 2
    updates = learning(Recap, policy, config.algorithm, 2, seed=1)
    halves = {b: {key: c[:, b * half : (b + 1) * half] for key, c in columns.items()} for b in (0, 1)}
    metrics = updates.update(StepContext(0), halves)
    assert metrics["losses/value"] == pytest.approx(-0.4, abs=0.15)  # on the way from 0 to the mean return
    assert metrics["losses/positive_share"] == pytest.approx(0.5, abs=0.1)
    images = torch.zeros(1, 1, 16, 16, 3, dtype=torch.uint8)
    seen = observed(torch.zeros(1, 2), (TASK,), images, torch.zeros(1, 4))
    good, bad = (float(policy.act(policy.encode(seen.prompted(TEXTS[k])), None, 1.0).actions) for k in (1, 0))
    assert good > 0.3
    assert bad < -0.3
