"""Do TRL and we compute the same loss and gradient?  One batch, the same weights, completions and rewards.

Our engine generates a batch; TRL's trainer takes it through its `rollout_func`, scores it, forms advantages and its
loss.  Ours is the actor's: its rows, advantages, microbatches and sums, under the settings of ours.py.  Old
log-probs are those of the same weights (ratio 1) and shifted ones (some ratios clipped); the mean is over tokens and
over completions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from experiments.bench.llm.bare import old_log_probs
from experiments.bench.llm.ours import overrides
from experiments.bench.llm.trl_peer import Settings, make_trainer
from experiments.bench.llm.work import FORM, Work, generated, scored, step_problems
from policies.causal_lm import CausalLM
from rlinf_embodied.compose import compose_math
from rlinf_embodied.config import ReasoningAlgorithmConfig
from rlinf_embodied.errors import ObjectiveError
from rlinf_embodied.learning.gradients import block_sums
from rlinf_embodied.randomness import uniform
from rlinf_embodied.reasoning.batch import Completions, Group, LogProbs, Sequences
from rlinf_embodied.reasoning.objective import STATISTICS, Objective, Round, training_rows
from rlinf_embodied.reasoning.reward_stage import Verifier

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

LIMIT = 1e-4
SHIFT = 0.35  # largest |log ratio|: e^0.35 = 1.42, so that ratios leave 0.8 .. 1.2 on both sides


@dataclass(frozen=True, slots=True)
class Difference:
    """A loss and its gradient on both sides."""

    case: str
    ours: float
    theirs: float
    gradient: float  # norm of the difference over the norm of ours
    clipped: float  # share of tokens with a ratio out of the clip range

    def __str__(self) -> str:
        """Returns, for example, "token, ratio 1: 0.0123 (ours) 0.0123 (TRL), gradient 1e-06, clipped 0 %"."""
        return (
            f"{self.case}: {self.ours:+.6f} (ours) {self.theirs:+.6f} (TRL), "
            f"difference {self.ours - self.theirs:+.1e}, gradient {self.gradient:.1e}, clipped {self.clipped:.0%}"
        )


def compare(work: Work, *changes: str) -> list[Difference]:
    """Returns both losses in all cases; `changes` are overrides of our trainer's settings.

    The numbers differ where a group's std is small: we add 1e-6 to it and TRL 1e-4.

    Raises:
        ObjectiveError: a loss differs by more than 1e-4, or a gradient by more than a thousandth of its norm.
    """
    policy = CausalLM.load(Path(work.start))
    problems = step_problems(work, 0)
    groups = generated(policy, problems, work, 256, 0)
    with Verifier(FORM) as verifier:
        rewards = scored(policy, verifier, groups, problems)
    completions = Completions(tuple(problems), tuple(groups), (), 0)
    found = [
        _difference(replace(work, loss=loss), policy, Round(completions, rewards), shift, changes)
        for loss in ("token", "sequence")
        for shift in (0.0, SHIFT)
    ]
    for difference in found:
        if abs(difference.ours - difference.theirs) > LIMIT or not difference.gradient < 10 * LIMIT:
            raise ObjectiveError(
                f"the objectives differ ({difference}), but on an identical batch losses agree to {LIMIT:g}: the "
                "comparison would be one of unlike trainings; look for other advantages, masks or denominators"
            )
    return found


def _difference(work: Work, policy: CausalLM, made: Round, shift: float, changes: Sequence[str]) -> Difference:
    groups = list(made.generation.groups)
    shifted = [_shifted(group, shift, work) for group in groups]
    if shift:
        made = replace(made, old_log_probs=LogProbs(old_log_probs(shifted), 0))
    config = compose_math([*overrides(work, 1, 1, Path("unused")), *changes])
    ours, gradient = _our_loss(policy, config.algorithm, work, made)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(work, groups, folder)
        theirs, their_gradient = _trl_loss(trainer, work, shifted if shift else None)
    ratios = torch.cat([(g.log_probs - s.log_probs).exp()[_mask(g)] for g, s in zip(groups, shifted, strict=True)])
    return Difference(
        f"{work.loss} mean, ratio {'shifted' if shift else '1'}",
        ours,
        theirs,
        float((gradient - their_gradient).norm() / gradient.norm()),
        float(((ratios < 1 - work.clip) | (ratios > 1 + work.clip)).float().mean()),
    )


def _our_loss(policy: CausalLM, algorithm: ReasoningAlgorithmConfig, work: Work, made: Round) -> tuple[float, Tensor]:
    """Returns the mean loss and its gradient [D] as the actor forms them."""
    rows = training_rows([made], algorithm, None)
    objective, parameters = Objective(policy, algorithm, work.temperature, work.new_tokens, {}), policy.parameters()
    passes = objective.passes(0, rows, torch.arange(len(rows)), "cpu")
    total = block_sums(passes, parameters, len(STATISTICS))
    size = sum(parameter.numel() for parameter in parameters)
    mean = total / total[size]
    return float(mean[size + 1 + STATISTICS.index("loss")]), mean[:size]


def _shifted(group: Group, shift: float, work: Work) -> Group:
    """Returns the group as if other weights had generated it."""
    drawn = torch.from_numpy(uniform(work.seed, "shift", group.prompt.id, shape=tuple(group.log_probs.shape)))
    return replace(group, log_probs=group.log_probs + shift * (2 * drawn - 1))


def _mask(group: Group) -> Tensor:
    return torch.arange(group.tokens.shape[1]) < group.lengths[:, None]


# ------------------------------------------------------------------------------------------------------------------ TRL
def _trainer(work: Work, groups: list[Group], folder: str) -> GRPOTrainer:
    """Returns a trainer whose completions are these."""
    sequences = Sequences.of(groups)

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        assert len(prompts) == len(sequences)
        ours = [list(row) for row in sequences.completions]
        return {"prompt_ids": [list(row) for row in sequences.prompts], "completion_ids": ours, "logprobs": None}  # type: ignore[dict-item]

    return make_trainer(Settings.of(work, steps=1, out=folder), rollout=rollout)


def _trl_loss(trainer: GRPOTrainer, work: Work, shifted: list[Group] | None) -> tuple[float, Tensor]:
    """Returns TRL's loss and gradient of the first batch, over all its microbatches, as its training loop runs them.

    Old log-probs are these, or (None) those of its own weights.
    """
    rows = cast("Any", [dict(row) for row in cast("Iterable[dict]", trainer.train_dataset) for _ in range(work.group)])
    model = cast(torch.nn.Module, trainer.model).train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    if shifted is not None:
        scored = trainer._generate_and_score_completions
        known = {"old_per_token_logps": old_log_probs(shifted)}
        setattr(trainer, scored.__name__, lambda rows: {**scored(rows), **known})
    steps = range(trainer.args.gradient_accumulation_steps)
    loss = sum(float(trainer.training_step(model, rows, None)) for _ in steps)
    gradients = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    return loss, torch.cat(gradients)
