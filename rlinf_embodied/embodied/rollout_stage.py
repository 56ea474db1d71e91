"""The policy as a stage: it answers observations with action chunks and keeps what training will need of them.

A call of the policy has the rows of as many blocks as it may (`env.rows_per_call`): on an accelerator, and on a CPU
with run.exact=off, all that are in the worker.  Where equal bits are promised a call has one block, whose rows are the
same under every plan: a row's last bits depend on the size of its batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.batch import PolicyColumns
from rlinf_embodied.config import Critic, EnvConfig, PolicyConfig, Precision, PrefixSchedule
from rlinf_embodied.config.checks import require, within
from rlinf_embodied.device import computing, is_accelerator
from rlinf_embodied.embodied.policy_folder import load_policy, require_fitting
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.interfaces.policies import Evaluation, Features, Noise, Policy, PolicyOutput
from rlinf_embodied.learning.weights import SharedPolicy, WeightsUser
from rlinf_embodied.randomness import uniform
from rlinf_embodied.runtime.host import Output, StageContext, StepContext


@dataclass(frozen=True, slots=True)
class PolicyStageConfig:
    """What a stage that holds the policy needs to know."""

    policy: PolicyConfig
    folder: str  # the checkpoint folder it starts from
    env: EnvConfig  # whose blocks it acts for
    seed: int
    _: KW_ONLY
    exact: bool = True  # a CPU's calls are of one block
    precision: Precision = Precision.float32  # of rollouts that are trained on
    name: str = "policy"  # of the weights: what a worker's stages share, what noise is for
    greedy: bool = False  # the most likely actions instead of samples
    greedy_rounds: int | None = None  # in an iteration's first rounds only; None: in all
    records: bool = True  # false: it leaves no columns, as nobody trains on them
    uniform_until: int = 0  # iterations before this one have uniform actions
    evaluates: bool = False  # whether its noise is keyed by the episode


def episodes_of(env: EnvConfig, round: int, rows: np.ndarray) -> np.ndarray:
    """Returns the number of the episode that each row runs in a round of an evaluation.

    Episodes are dealt to the blocks in turn, so that the first ones, which are filmed, and those of a last round with
    fewer episodes than rows do not all run on one worker.
    """
    return round * env.num_envs + rows % env.block_size * env.num_blocks + rows // env.block_size


_AHEAD = 16  # chunk-steps whose noise is drawn at once: each draw of so few numbers is mostly Python


@dataclass(slots=True)
class _Rollout:
    features: list[Features] = field(default_factory=list)
    outputs: list[PolicyOutput] = field(default_factory=list)
    noise: Tensor | None = None  # [_AHEAD, B, ...], of the chunk-step `noise_from` and those behind it
    noise_from: int = 0


def require_acting(policy: Policy, config: PolicyConfig, env: EnvConfig, trained: bool) -> None:
    """Checks that a policy can act as its and the env's sections require; `trained`: RL trains it on its actions."""
    repeat, spec = config.noise_repeat, policy.spec
    fits = not repeat or spec.noise.shape[0] == spec.chunk
    rule = f"{spec.name} takes no separate noise for each action of a chunk"
    require(fits, "policy.noise_repeat", repeat, rule, "use 0")
    flows = getattr(policy, "continues_chunks", False)
    rule = f"{spec.name} is no flow policy: its chunks cannot be drawn to others"
    require(flows or env.rtc is PrefixSchedule.off, "env.rtc", env.rtc.value, rule, "use off")
    rule = f"{spec.name} is scored for the first actions of its chunks, and others are executed"
    fits = flows or not (trained and env.overlaps)
    require(fits, "env.perturb", env.perturb.axes, rule, "use inference_delay in evaluations alone")


class RolloutStage(WeightsUser[Policy]):
    """Samples actions with noise that is keyed by row.

    In an evaluation it holds the weights on the device from an episode's first chunk-step to its last only, so that
    training's switches free the memory.
    """

    def __init__(self, config: PolicyStageConfig) -> None:
        self._config = config
        self._user = "eval_policy" if config.evaluates else "policy"  # of the worker's one copy of the weights
        self._rollouts: dict[int, _Rollout] = {}
        self._fits = False  # whether the env has been compared with the policy's
        self._mixing = 0.0  # in an evaluation: by how much an action has changed with the other rows of its call

    def setup(self, context: StageContext) -> None:
        """Loads the policy, or takes the one that this worker's actor uses."""
        config = self._config
        with within("" if config.name == "policy" else "hierarchy"):
            shared = context.share(config.name, lambda: load_policy(config.policy, config.folder, context.device))
        self._shared = cast(SharedPolicy[Policy], shared)
        self._shared.enter(self._user)
        if config.evaluates:
            self._shared.leave(self._user)
        self._device = context.device
        rows = config.env.rows_per_call
        self._blocks_per_call = None if rows is None else rows // config.env.block_size or 1
        if config.exact and not is_accelerator(self._device):
            self._blocks_per_call = 1
        purpose = "evaluate" if config.evaluates else "action"
        self._purpose = purpose if config.name == "policy" else f"{config.name} {purpose}"
        self._policy = computed_in(config.precision, self._shared.policy, config.policy, context.device)
        require_acting(self._policy, config.policy, config.env, trained=config.records)

    @torch.no_grad()
    def step(
        self, step_context: StepContext, observations: Mapping[int, Observation | None]
    ) -> dict[int, Tensor | None]:
        """Returns an action chunk [B, C, A] per block; None where the block has nothing to show."""
        if step_context.chunk_step == 0:
            self._rollouts |= {block: _Rollout() for block in observations}
            if self._config.evaluates:
                self._shared.enter(self._user)
        actions: dict[int, Tensor | None] = dict.fromkeys(observations)
        active = [block for block, observation in observations.items() if observation is not None]
        size = self._blocks_per_call or len(active)
        for blocks in (active[k : k + size] for k in range(0, len(active), max(size, 1))):
            if step_context.iteration < self._config.uniform_until:
                actions |= {block: self._uniform(step_context, block) for block in blocks}
            else:
                parts = cast("list[Observation]", [observations[block] for block in blocks])
                actions |= self._act(step_context, blocks, Observation.concatenate(parts))
        return actions

    def _act(self, step_context: StepContext, blocks: Sequence[int], observation: Observation) -> dict[int, Tensor]:
        policy, config = self._policy, self._config
        observation = observation.prompted(config.policy.prompt_suffix)
        assert len(observation) == len(blocks) * config.env.block_size
        if not self._fits:
            criticised = config.records and config.policy.critic is Critic.privileged
            require_fitting(config.folder, observation, criticised)
            self._fits = True
        features = policy.encode(observation.to(self._device))
        greedy = config.greedy and (config.greedy_rounds is None or step_context.round < config.greedy_rounds)
        kind, temperature = policy.spec.noise, config.policy.temperature
        if greedy and (kind := policy.spec.greedy_noise) is not None:
            temperature = 0.0
        noise = None if kind is None else torch.cat([self._noise(step_context, block, kind) for block in blocks])
        output = policy.act(features, noise, temperature)
        if config.evaluates and step_context.chunk_step == step_context.round == 0:
            self._mixing = max(self._mixing, self._change_alone(observation, noise, temperature, output.actions))
        for number, block in enumerate(blocks if config.records else ()):
            rows = slice(number * config.env.block_size, (number + 1) * config.env.block_size)
            self._rollouts[block].features.append({name: value[rows] for name, value in features.items()})
            self._rollouts[block].outputs.append(output.rows(rows))
        return dict(zip(blocks, output.actions.split(config.env.block_size), strict=True))

    def _change_alone(
        self, observation: Observation, noise: Tensor | None, temperature: float, actions: Tensor
    ) -> float:
        """Returns by how much two rows' actions change at most where all rows of the call are copies of theirs."""
        n, changes = len(observation), [0.0]
        for row in {n // 2, n - 1} if n > 1 else ():
            features = self._policy.encode(observation.rows([row] * n).to(self._device))
            again = self._policy.act(features, None if noise is None else noise[[row] * n], temperature)
            changes.append(float((again.actions[row] - actions[row]).abs().max()))
        return max(changes)

    def largest_change_alone(self, step_context: StepContext) -> float:
        """Returns by how much an evaluation's actions have changed at most with the other rows of their call."""
        return self._mixing

    def _uniform(self, step_context: StepContext, block: int) -> Tensor:
        """Returns actions from all over their range, keyed as the noise is."""
        size, spec = self._config.env.block_size, self._policy.spec
        ids = np.arange(block * size, (block + 1) * size)
        when = (step_context.iteration, step_context.round, step_context.chunk_step)
        drawn = uniform(self._config.seed, "uniform action", ids, *when, shape=(spec.chunk, spec.action_dim))
        return torch.from_numpy(drawn * 2 - 1).to(self._device)

    def _noise(self, step_context: StepContext, block: int, kind: Noise) -> Tensor:
        """Returns the noise of a chunk-step [B, ...], keyed by row, iteration, round and chunk-step, or by episode."""
        rollout, step, size = self._rollouts[block], step_context.chunk_step, self._config.env.block_size
        place = step - rollout.noise_from
        if rollout.noise is None or not 0 <= place < _AHEAD:
            ids, steps = np.arange(block * size, (block + 1) * size), np.arange(step, step + _AHEAD)[:, None]
            keys = (ids, step_context.iteration, step_context.round, steps)
            if self._config.evaluates:
                keys = (episodes_of(self._config.env, step_context.round, ids), steps)
            drawn = kind.draw(self._config.seed, self._purpose, *keys)
            drawn = self._repeated(drawn, keys) if kind is self._policy.spec.noise else drawn
            rollout.noise, rollout.noise_from, place = drawn.to(self._device), step, 0
        return rollout.noise[place]

    def _repeated(self, noise: Tensor, keys: tuple) -> Tensor:
        """Returns noise [_AHEAD, B, C, ...] in which actions of a chunk repeat that of the one before, dimension-wise.

        Each action by itself is distributed as before.  Independent noise mostly cancels out over a chunk; what is
        repeated moves the robot, so that its effect can be told from chance (coloured noise: arXiv 2312.11091).
        """
        repeat, shape = self._config.policy.noise_repeat, self._policy.spec.noise.shape
        if repeat:
            drawn = uniform(self._config.seed, f"{self._purpose} repeats", *keys, shape=shape)
            again = torch.from_numpy(drawn) < repeat
            for c in range(1, shape[0]):
                noise[:, :, c] = torch.where(again[:, :, c], noise[:, :, c - 1], noise[:, :, c])
        return noise

    def close(self, step_context: StepContext, observations: Mapping[int, Observation | None]) -> Output:
        """Returns each block's columns; they are heavy and stay here if the actor does."""
        if self._config.evaluates:
            self._shared.leave(self._user)
        rollouts = {block: self._rollouts.pop(block) for block in observations}
        return Output({b: self._columns(rollout) if self._config.records else None for b, rollout in rollouts.items()})

    def _columns(self, rollout: _Rollout) -> PolicyColumns:
        outputs = rollout.outputs
        values = [output.values for output in outputs if output.values is not None]
        return PolicyColumns(
            features=_stacked(rollout.features),
            record=_stacked([output.record for output in outputs]),
            log_probs=torch.stack([output.log_probs for output in outputs]),
            version=self._shared.version,
            values=torch.stack(values) if values else None,
        )


def _stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


_Policy = TypeVar("_Policy", bound=Policy)
_COMPUTES = (
    *("encode", "act", "evaluate", "value", "value_features"),
    *("encode_trainable", "encode_frozen", "pooled", "imitation_loss"),  # of a policy that can imitate
)


def computed_in(precision: Precision, policy: _Policy, config: PolicyConfig, device: str) -> _Policy:
    """Returns the policy itself, or in bfloat16 one that has its weights and computes on `device` by autocast.

    Features stay as they come out, which halves what is kept of a frozen part.  A critic on privileged state is small,
    and stays in float32.
    """
    if precision is Precision.float32:
        return policy
    kind = type(policy)
    methods = {name: _autocast(getattr(kind, name), precision, device) for name in _COMPUTES if hasattr(kind, name)}
    if config.critic is Critic.privileged:
        del methods["value"]
    made = copy.copy(policy)  # of the same module
    made.__class__ = type(kind.__name__, (kind,), methods)  # pyright: ignore[reportAttributeAccessIssue]
    return cast(_Policy, made)


def _autocast(method: Callable[..., Any], precision: Precision, device: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*arguments: Any, **named: Any) -> Any:
        with computing(precision, device):
            found = method(*arguments, **named)
        if isinstance(found, PolicyOutput | Evaluation):
            parts = {part.name: getattr(found, part.name) for part in fields(found)}
            return replace(found, **{name: t.float() for name, t in parts.items() if isinstance(t, Tensor)})
        return found.float() if isinstance(found, Tensor) else found

    return run
