"""The critic's stage: values of every token, advantages for the actor, and the critic's update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rlinf_embodied.algorithms.advantages import gae, next_values, standardized
from rlinf_embodied.algorithms.losses import explained_variance, value_loss
from rlinf_embodied.config.checks import require
from rlinf_embodied.interfaces.language import TokenBatch, ValueModel
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.gradients import LossSums, Pass
from rlinf_embodied.learning.learner import AdamSettings, Learner
from rlinf_embodied.learning.learner_stage import LearnerStage, Moment
from rlinf_embodied.learning.reduce import make_reducer
from rlinf_embodied.learning.update import VALUE_STATISTICS, fit, minibatches
from rlinf_embodied.learning.weights import Groups, SharedPolicy
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.reasoning.batch import Completions, Rewards, dynamic_batches, token_table
from rlinf_embodied.reasoning.policy_folder import StageConfig, load_policy
from rlinf_embodied.runtime.host import Output, StageContext, StepContext
from rlinf_embodied.runtime.tensor_wire import to_device

OPTIMIZER, MODULE = "critic_optimizer", "critic_module"  # in a checkpoint


@dataclass(frozen=True, slots=True)
class _Rows:
    """A block's completions; tables are [B, R]."""

    sequences: TokenBatch  # tokens that a tool inserted have values as well
    values: Tensor  # before the update
    advantages: Tensor
    returns: Tensor


class CriticStage(LearnerStage):
    """Generalised advantage estimation over tokens: the reward is given at the last token, which ends the episode.

    This also holds for a completion that was cut off.
    """

    user = "critic"

    def __init__(self, stage_config: StageConfig) -> None:
        self._folder, self._config, self._algorithm = stage_config.folder, stage_config.config, stage_config.config.rl

    def setup(self, context: StageContext) -> None:
        """Creates a critic from the policy's trunk, and its learner."""
        config, algorithm = self._config, self._algorithm
        critic_class = cast(type[ValueModel], load_target(config.policy.critic_target))
        policy = load_policy(config.policy, self._folder, config.run.seed, "cpu").policy
        self._critic = critic_class.from_policy(policy)
        shared = SharedPolicy(self._critic, device=context.device)
        shared.enter(self.user)
        self._reducer = make_reducer(algorithm.reduction, context.group, context.owners, context.device)
        settings = AdamSettings(algorithm.value_lr, (0.9, algorithm.beta2), algorithm.max_grad_norm)
        self._learner = Learner(list(self._critic.module.parameters()), settings, VALUE_STATISTICS, self._reducer)
        self.hold(shared, context.group, context.device, {OPTIMIZER: self._learner})

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Returns each block's advantages [K x G, R], standardised over all blocks, and fits the values."""
        blocks = {
            block: self._rows(cast(Completions, completions), cast(Rewards, rewards))
            for block, (completions, rewards) in inputs.items()
        }
        columns = {b: (r.advantages, r.sequences.mask) for b, r in blocks.items()}
        advantages = standardized(columns, self._reducer.sum_blocks)
        algorithm, shuffle = self._algorithm, (self._config.run.seed, "value", step_context.iteration)
        sizes = {block: len(rows.sequences) for block, rows in blocks.items()}
        batches = minibatches(shuffle, sizes, algorithm.num_minibatches, algorithm.value_epochs)
        passes = lambda rows: [p for b, index in rows.items() for p in self._passes(blocks[b], index.tolist())]  # noqa: E731
        fitted = fit(self._learner, batches, passes)
        predictions = {b: (r.values, r.returns, r.sequences.mask) for b, r in blocks.items()}
        explained = explained_variance(predictions, self._reducer.sum_blocks)
        metrics = {"losses/value_loss": fitted.loss, "losses/explained_variance": explained}
        return Output({b: advantages[b] * r.sequences.mask for b, r in blocks.items()}, metrics)

    def _rows(self, completions: Completions, rewards: Rewards) -> _Rows:
        sequences, algorithm = replace(completions.rows, given=None, support=None).to(self.device), self._algorithm
        rule = "the chat template began another row within an episode, and a critic takes episodes of one row"
        target, action = self._config.tool._target_, "use algorithm=grpo, or a model with another template"
        require(len(sequences) == len(completions.texts), "tool._target_", target, rule, action)
        mask, lengths = sequences.mask, sequences.lengths - sequences.prompt_lengths
        values = token_table(self._critic.values, sequences, algorithm.tokens_per_microbatch, self.device)
        token_rewards, terminated = torch.zeros_like(values), torch.zeros_like(mask)
        last = torch.arange(len(lengths), device=self.device), lengths - 1
        token_rewards[last] = cast(Tensor, to_device(rewards.rewards, self.device)).reshape(-1)
        terminated[last] = True
        no_values, truncated = torch.zeros_like(values.T), torch.zeros_like(mask.T)
        following = next_values(values.T, no_values, no_values[0], truncated, mask.T)
        columns = token_rewards.T, values.T, following, terminated.T, truncated, mask.T
        advantages, returns = gae(*columns, algorithm.gamma, algorithm.gae_lambda)
        return _Rows(sequences, values, advantages.T.contiguous(), returns.T.contiguous())

    def _passes(self, rows: _Rows, index: Sequence[int]) -> list[Pass]:
        budget = self._algorithm.tokens_per_microbatch
        parts = dynamic_batches(rows.sequences.lengths.tolist(), budget, rows=index)
        return [Pass(float(rows.sequences.mask[part].sum()), partial(self._loss, rows, part)) for part in parts]

    def _loss(self, rows: _Rows, index: Sequence[int]) -> LossSums:
        batch = rows.sequences.select(index)
        mask = batch.mask
        loss = value_loss(self._critic.values(batch), rows.returns[list(index), : mask.shape[1]], mask)
        return LossSums(loss, mask.sum().to(torch.float32), loss.detach().reshape(1))

    # ----------------------------------------------------------------------------------------------------------- state
    def export_training(self) -> Groups:
        """Returns the optimizer's state and the weights, which the actor adds to its checkpoint."""
        return super().export_training() | {MODULE: dict(self._critic.module.state_dict())}

    def load(self, step_context: Moment, folder: str) -> None:
        """Restores weights and learner."""
        self._critic.module.load_state_dict(load_tensors(Path(folder), MODULE))
        super().load(step_context, folder)
