"""RECAP (Physical Intelligence 2025, arXiv:2511.14759): a policy conditioned on whether its data is better than usual.

    episodes that have ended --> returns --fit--> V --> advantages R - V --threshold of each task--> labels
    labels --text after the instruction, or none--> imitation of all actions

The policy acts with the text of a positive label (policy.prompt_suffix).  Rollouts, demonstrations and corrections
share one replay buffer; a human's actions are always positive.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.algorithm import Training, adam
from rlinf_embodied.algorithms.imitation import HgDaggerConfig, Imitation
from rlinf_embodied.algorithms.transitions import (
    INSTRUCTION,
    IS_INTERVENTION,
    RETURN,
    Columns,
    ReplayConfig,
    each_update,
    observation_of,
    step_on,
)
from rlinf_embodied.config import Critic, TrainConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.envs import PRIVILEGED, Observation
from rlinf_embodied.learning.gradients import LossSums, loss_sums
from rlinf_embodied.learning.learner import Learner
from rlinf_embodied.learning.update import Fitted
from rlinf_embodied.randomness import uniform
from rlinf_embodied.runtime.host import StepContext

TEXTS = {1: "Advantage: positive", 0: "Advantage: negative"}  # of labels, section V-B
_LABEL, _DROPPED = "label", -1  # a column of a batch, int64 [U, R]
_VALUE = "value_optimizer"  # in a checkpoint


@dataclass(kw_only=True, slots=True)
class RecapConfig(HgDaggerConfig):
    """RECAP (arXiv:2511.14759): imitation of labelled data; a human may correct the policy, as in HG-DAgger."""

    name = "recap"
    columns = ("state", "action", "is_intervention", "outcome")
    has_returns = True

    positive_share: float = 0.4  # of a task's transitions with actions of the policy
    label_dropout: float = 0.3  # share of the samples whose instruction has no label
    value_lr: float = 3e-4  # of the policy's value head

    def __post_init__(self) -> None:
        HgDaggerConfig.__post_init__(self)
        require_numbers(self, "algorithm", "positive_share", "label_dropout", high=1)
        require_numbers(self, "algorithm", "value_lr", low=0, above=True)

    @property
    def needs_success(self) -> bool:
        return True

    def all_columns(self, config: TrainConfig) -> tuple[str, ...]:
        privileged = (PRIVILEGED,) if config.policy.critic is Critic.privileged else ()
        return (*ReplayConfig.all_columns(self, config), *privileged)

    def check(self, config: TrainConfig) -> None:
        env, rule = config.env, "RECAP learns from what it gathers, because returns need whole episodes"
        action = "leave it out; for demonstrations set algorithm.expert_steps, or fine-tune on data with algorithm=sft"
        action += " and start from that with warm_start.checkpoint=<run.dir>/checkpoints/latest"
        require(not config.files, "data", config.data, rule, action)
        rule, action = "a label is a text in the prompt, and policies on a state read none", "name a camera"
        require(bool(env.cameras), "env.cameras", list(env.cameras), rule, f"{action}, and use policy=tiny_vla")
        rule = "returns are of whole episodes"
        require(env.carry_over, "env.carry_over", env.carry_over, rule, "set env.carry_over=true")
        episodes = env.num_envs * env.horizon
        holds = self.capacity % env.num_envs == 0 and self.capacity >= episodes
        rule = f"it holds steps of all env.num_envs={env.num_envs} rows, and an episode of env.horizon={env.horizon}"
        action = f"use {max(self.capacity // env.num_envs * env.num_envs, episodes)}"
        require(holds, "algorithm.capacity", self.capacity, rule, action)
        first = self.schedule(env).first_update * env.chunks_per_rollout
        rule = "with algorithm.expert_steps it lasts until an episode of every row has ended"
        action = f"use {max(episodes - self.expert_steps, 0)}"
        require(first >= env.horizon, "algorithm.warmup_steps", self.warmup_steps, rule, action)
        ReplayConfig.check(self, config)

    def make(self, training: Training) -> Recap:
        return Recap(training)


def positive(advantages: Tensor, is_intervention: Tensor, tasks: Tensor, share: float) -> Tensor:
    """Returns which of M samples are labelled positive, bool [M]; arguments are [M].

    They are those of a human, and of each task's others the `share` with the largest advantages, fewer with ties.
    """
    labels = is_intervention > 0
    rollouts = ~labels
    for task in tasks.unique():
        candidates = rollouts & (tasks == task)
        number = int(candidates.sum())
        num_negative = number - int(share * number)
        threshold = advantages[candidates].kthvalue(num_negative).values if num_negative else -torch.inf
        labels = labels | (candidates & (advantages > threshold))
    return labels


def _tasks(instructions: Tensor) -> Tensor:
    """Returns a 24-bit id of each instruction, uint8 [M, 256], equal in all workers: float32 [M]."""
    texts, inverse = instructions.cpu().unique(dim=0, return_inverse=True)
    numbers = [zlib.crc32(text.numpy().tobytes()) & 0xFFFFFF for text in texts]
    return torch.tensor(numbers, dtype=torch.float32)[inverse]


class Recap(Imitation):
    """Fits the policy's value head to returns, labels the sampled transitions, and imitates them."""

    algorithm: RecapConfig

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        parameters, imitation = self._policy.value_parameters(), self._policy.imitation_parameters(whole=True)
        separate = parameters and not {*map(id, parameters)} & {*map(id, imitation)}
        rule, action = "it has no value head, or one that trains what acts, too", "use policy=tiny_vla"
        action += ", or policy.critic=privileged"
        require(bool(separate), "policy._target_", training.settings._target_, rule, action)
        settings = adam(self.algorithm, self.algorithm.value_lr)
        self.learners[_VALUE] = Learner(parameters, settings, ("loss", "values"), training.reducer)

    def update(self, step_context: StepContext, data: Mapping[int, Columns]) -> dict[str, float]:
        fitted, iteration = Fitted(), step_context.iteration
        for batch in each_update(data):
            fitted.add(step_on(self.learners[_VALUE], batch, self._value_sums))
        labels, share = self._labels(data)
        for block, label in labels.items():
            ids = np.arange(label.numel()).reshape(label.shape)
            drawn = torch.from_numpy(uniform(self.training.seed, "label dropout", iteration, block, ids))
            label[drawn < self.algorithm.label_dropout] = _DROPPED
        metrics = super().update(step_context, {b: columns | {_LABEL: labels[b]} for b, columns in data.items()})
        metrics |= {"losses/value_loss": fitted.loss, "losses/value": fitted.mean("values")}
        return metrics | {"losses/positive_share": share}

    def _values(self, columns: Columns) -> Tensor:
        """Returns V [R], from observations without a label or from the simulator's state."""
        if PRIVILEGED in columns:
            return self._policy.value({}, columns[PRIVILEGED][:, None])[:, 0]
        return self._policy.value(self._policy.encode_trainable(observation_of(columns)), None)[:, 0]

    def _value_sums(self, columns: Columns) -> LossSums:
        """Sums (V - R)^2 / 2; the paper's value function is a distribution over 201 bins."""
        values = self._values(columns)
        return loss_sums(0.5 * (values - columns[RETURN]).square().sum(), len(values), values.detach().sum())

    @torch.no_grad()
    def _labels(self, data: Mapping[int, Columns]) -> tuple[dict[int, Tensor], float]:
        """Returns labels of this worker's samples, int64 [U, R] by block, and the positive share of all workers'."""
        parts: dict[int, list[Tensor]] = {block: [] for block in data}
        for batch in each_update(data):
            for block, columns in batch.items():
                advantages = (columns[RETURN] - self._values(columns)).cpu()
                human = columns[IS_INTERVENTION].cpu()
                parts[block].append(torch.stack([advantages, human, _tasks(columns[INSTRUCTION])]))
        own = {block: torch.stack(of_block, 1) for block, of_block in parts.items()}  # [3, U, R]
        every = self.training.reducer.gather_blocks(own)
        advantages, human, tasks = torch.cat([part.flatten(1) for part in every.values()], 1)
        labels = positive(advantages, human, tasks, self.algorithm.positive_share)
        shapes = [part.shape[1:] for part in every.values()]
        by_block = zip(every, labels.split([shape.numel() for shape in shapes]), shapes, strict=True)
        return {b: part.view(shape).long() for b, part, shape in by_block if b in data}, float(labels.float().mean())

    def _observation(self, columns: Columns) -> Observation:
        seen, labels = observation_of(columns), columns[_LABEL].tolist()
        texts = zip(seen.instruction, labels, strict=True)
        return replace(seen, instruction=tuple(f"{text} {TEXTS[k]}" if k in TEXTS else text for text, k in texts))
