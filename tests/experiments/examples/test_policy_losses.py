"""The example losses are their papers' formulas, and part of a run: config, report, resume, and other workflows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from math_runs import tiny_math
from runs import four, metric_rows, train

from experiments.examples import spo
from experiments.examples.kl_to_clone import KLToClone
from experiments.examples.spo import SPO
from rlinf_embodied.algorithms.losses import policy_loss
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.errors import ConfigError, ObjectiveError
from rlinf_embodied.reporting.page import page
from rlinf_embodied.telemetry.run_reader import read_run

SPO_TARGET = "algorithm.loss._target_=experiments.examples.spo.SPO"
KL_TARGET = "algorithm.loss._target_=experiments.examples.kl_to_clone.KLToClone"


def test_the_page_shows_the_file() -> None:
    assert f"```python\n{Path(spo.__file__).read_text()}```" in Path("docs/own_algorithm.md").read_text()


def test_spo_is_the_papers_formula() -> None:
    ratio, advantages = torch.tensor([0.7, 1.0, 1.1, 1.5]), torch.tensor([2.0, -1.0, -3.0, 0.5])
    weights, mask = torch.tensor([1.0, 2.0, 0.5, 1.0]), torch.ones(4, dtype=torch.bool)
    found = policy_loss(ratio.log(), torch.zeros(4), advantages, mask, 0.2, 0.2, weights, loss=SPO(epsilon=0.25))
    expected = 0.0
    for r, a, w in zip(*(part.tolist() for part in (ratio, advantages, weights)), strict=True):
        expected -= w * (a * r - abs(a) / (2 * 0.25) * (r - 1) ** 2)  # arXiv 2401.16025
    assert float(found.loss) == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_the_kl_term_is_that_of_the_kl_of_the_policy_from_the_clone() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=draw, dtype=torch.float64, requires_grad=True)
    old, clone = (torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    now, mask = logits.log_softmax(-1), torch.ones(6, dtype=torch.bool)
    # each value is an entry, weighted as often as pi_old samples it; without advantages the KL alone is left
    rows = (now, old, torch.zeros(6, dtype=torch.float64), mask, 0.2, 0.2, old.exp())
    found = policy_loss(*rows, loss=KLToClone(coef=0.3), reference=clone)
    expected = 0.3 * (now.exp() * (now - clone)).sum()
    ours, theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found.loss, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("loss", "option", "other"), [(SPO_TARGET, "epsilon=0.3", "epsilon=0.2"), (KL_TARGET, "coef=0.5", "coef=0.4")]
)
def test_a_run_with_a_custom_loss_resumes_and_its_page_names_it(tmp_path, loss, option, other) -> None:
    words = [loss, f"algorithm.loss.{option}"]
    whole = train(four(tmp_path / "whole", *words))
    shutil.copytree(tmp_path / "whole/checkpoints/step_000002", tmp_path / "other/checkpoints/step_000002")
    assert train(four(tmp_path / "other", *words))["weights_sha256"] == whole["weights_sha256"]
    rows = metric_rows(tmp_path / "whole")
    assert metric_rows(tmp_path / "other") == rows[2:]
    assert ("losses/reference_kl" in rows[-1]) == (loss == KL_TARGET)
    with pytest.raises(ConfigError, match=rf"algorithm.loss.{other.replace('=', ' is ')} here"):
        train(four(tmp_path / "other", loss, f"algorithm.loss.{other}"))
    found = page([read_run(tmp_path / "whole")], 0)
    assert all(part in found for part in (loss.partition("=")[2], f"algorithm.loss.{option.partition('=')[0]}"))


def test_the_same_losses_train_language_models(tmp_path) -> None:
    words = ["run.num_iterations=2", "eval.num_problems=8", "eval.num_samples=0", "algorithm.num_minibatches=2"]
    ends = set()
    for number, more in enumerate([[], [SPO_TARGET], [KL_TARGET], [KL_TARGET, "algorithm.loss.coef=0"]]):
        config = tiny_math(*words, *more)
        config.run.dir = str(tmp_path / str(number))
        ends.add(train(config)["weights_sha256"])
    assert len(ends) == 3  # without its coefficient the last loss is the first
    rows = metric_rows(tmp_path / "2")
    assert rows[-1]["losses/reference_kl"] > 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "algorithm.loss=ppo",
            "algorithm.loss is 'ppo'|one of clipped, cispo, dppo, gspo, sequence|give one, or algorithm.loss._targ",
        ),
        (f"{SPO_TARGET} algorithm.loss.epsilon=0", "algorithm.loss.epsilon is 0.0|positive|use 0.2"),
        (f"{SPO_TARGET} algorithm.loss.epsilom=1", "algorithm.loss.epsilom is unknown|mean algorithm.loss.epsilon?"),
        (f"{SPO_TARGET} algorithm.loss.epsilon=x", "algorithm.loss.epsilon is 'x'|must be float"),
        (f"{SPO_TARGET}2", "algorithm.loss._target_ is|no attribute 'SPO2'|correct that"),
        ("algorithm.loss._target_=envs.gym.env.make_env", "algorithm.loss._target_|below PolicyLoss|own_algorithm.md"),
        (f"{SPO_TARGET} algorithm.dual_clip=3", "algorithm.dual_clip is 3.0|SPO has no such bound|leave it out"),
    ],
)
def test_a_wrong_loss_is_refused_before_anything_starts(words, parts) -> None:
    for compose in (compose_train, compose_math):
        with pytest.raises(ConfigError) as caught:
            compose(words.split())
        assert [part for part in parts.split("|") if part not in str(caught.value)] == [], str(caught.value)


def test_a_loss_of_a_file_may_be_replaced_with_its_options(tmp_path) -> None:
    path = tmp_path / "spo.yaml"
    path.write_text(
        "_target_: rlinf_embodied.algorithms.ppo.PPOConfig\n"
        "loss: {_target_: experiments.examples.spo.SPO, epsilon: 0.3}\n"
    )
    assert compose_train([f"algorithm={path}"]).algorithm.loss.epsilon == 0.3
    assert compose_train([f"algorithm={path}", "algorithm.loss.epsilon=0.4"]).algorithm.loss.epsilon == 0.4
    assert type(compose_train([f"algorithm={path}", "algorithm.loss=cispo"]).algorithm.loss).__name__ == "CISPO"


def test_a_loss_is_one_number_per_entry() -> None:
    class Mean(SPO):
        def __call__(self, entries):
            return SPO.__call__(self, entries).mean()

    ones = torch.ones(3)
    with pytest.raises(ObjectiveError, match=r"algorithm.loss is Mean, which returned .* shape \(\) .* shape \(3,\)"):
        policy_loss(ones, ones, ones, ones.bool(), 0.2, 0.2, ones, loss=Mean())
