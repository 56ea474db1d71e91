"""What plug-ins meet: the data that envs, policies and language models give and take, and their protocols.

Axes: N env rows (B in a block), K cameras, S picture size, C actions per chunk, A action dimensions, P proprioception,
Q privileged state.  Every tensor below lives on the device of the env or policy that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rlinf_embodied.config import LanguagePolicyConfig, PolicyConfig

# ---------------------------------------------------------------------------------------------------------------- envs
# An observation, as every policy of this project sees it:
#   images       uint8    [N, K, S, S, 3]  RGB 0..255, cameras in the order of EnvSpec.cameras; None where not rendered
#                                          (an env without cameras renders nothing)
#   proprio      float32  [N, P]           joint positions, tool pose, goal position and the way from the tool to
#                                          it: what the robot may know (SI units)
#   privileged   float32  [N, Q]           simulator state for a critic or a teacher; the policy that is to leave the
#                                          simulator never reads it; None if there is none.  Its last CLOCK_COLUMNS are
#                                          the time in the episode and the phase within the chunk, in [-1, 1]
#   instruction  N strings                 what to do, in words
CLOCK_COLUMNS = 2  # of privileged state; they depend on env.horizon and env.chunk, all others on the simulator alone
OBSERVATION_VERSION = 3  # raised when images or proprioception of one config change: policies learned from these


@dataclass(frozen=True, slots=True)
class Observation:
    """What N rows of an env show; see the block comment above for keys, dtypes, axes and ranges."""

    proprio: Tensor
    instruction: tuple[str, ...]
    images: Tensor | None = None
    privileged: Tensor | None = None

    def __len__(self) -> int:
        """Returns the number of rows N."""
        return len(self.proprio)

    def rows(self, index: Sequence[int] | slice) -> Observation:
        """Returns the observation of these rows, in this order."""
        picked = range(len(self))[index] if isinstance(index, slice) else index
        take = index if isinstance(index, slice) else torch.as_tensor(list(index), dtype=torch.long)
        return Observation(
            proprio=self.proprio[take],
            instruction=tuple(self.instruction[i] for i in picked),
            images=None if self.images is None else self.images[take],
            privileged=None if self.privileged is None else self.privileged[take],
        )

    def to(self, device: str) -> Observation:
        """Returns the observation on a device."""
        move = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
        return Observation(self.proprio.to(device), self.instruction, move(self.images), move(self.privileged))

    def padded(self, size: int) -> Observation:
        """Returns `size` rows, the last one repeated as often as needed (policy calls have fixed sizes)."""
        return self.rows([*range(len(self)), *[len(self) - 1] * (size - len(self))])

    @staticmethod
    def concatenate(parts: Sequence[Observation]) -> Observation:
        """Returns the rows of all parts, in order."""
        join = lambda name: (  # noqa: E731
            None if getattr(parts[0], name) is None else torch.cat([getattr(part, name) for part in parts])
        )
        return Observation(
            proprio=torch.cat([part.proprio for part in parts]),
            instruction=tuple(text for part in parts for text in part.instruction),
            images=join("images"),
            privileged=join("privileged"),
        )


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Plain facts about an env, as EnvSpec("PickCube-v1", 32, 5, 50, 7, 19, 45, 64, ("base_camera",), "cpu")."""

    task: str
    num_envs: int  # N
    chunk: int  # C
    horizon: int  # env steps per episode, a multiple of C
    action_dim: int  # A
    proprio_dim: int  # P
    privileged_dim: int  # Q, 0 without
    obs_size: int  # S
    cameras: tuple[str, ...]
    backend: str  # which physics ran, for example "physx_cpu (batched)"


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """One finished episode: its row, its reset seed, and ManiSkill's episode metrics.

    `metrics` has at least success_once, success_at_end, return, episode_len and reward (return / episode_len); `return`
    is the sum of the task's own reward, not of the shaped reward that training sees.
    """

    row: int
    seed: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What C env steps of N rows gave.

    Sub-steps after an episode's end are not valid; a frozen row (ended, not reset) has no valid sub-step and is neither
    stepped nor rendered.  Where `valid` is False the other entries are zero / False.
    """

    rewards: Tensor  # float32 [N, C]
    terminated: Tensor  # bool [N, C], the episode ended in this sub-step by the task's own rule
    truncated: Tensor  # bool [N, C], the episode ended in this sub-step by the time limit (and not by the task)
    valid: Tensor  # bool [N, C]
    success: Tensor  # bool [N, C], the task is solved after this sub-step
    privileged: Tensor | None  # float32 [N, C, Q], simulator state before each action
    final_rows: tuple[int, ...]  # rows whose episode ended in this chunk, ascending
    final_observation: Observation | None  # of final_rows, before any reset; None if there are none
    observation: Observation  # of all N rows, after any reset: what the policy sees next
    episodes: tuple[EpisodeEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class RunningEpisode:
    """A running episode as its cause: replaying `actions` [t, A] after a history-free reset with `seed` restores it."""

    seed: int
    actions: Tensor


@runtime_checkable
class VectorEnv(Protocol):
    """N rows of one task.  A row is running, or frozen (its episode ended and nobody reset it)."""

    spec: EnvSpec

    def reset(self, seeds: Sequence[int], rows: Sequence[int] | None = None) -> Observation:
        """Starts an episode in each of `rows` (default: all) from its own seed and returns the observation of all rows.

        The episode is a pure function of (seed, actions): nothing that the env ran before has any influence.
        """
        ...

    def step_chunk(
        self, actions: Tensor | Callable[[int], Tensor], next_seeds: Sequence[int] | None = None
    ) -> ChunkResult:
        """Runs C env steps.

        Args:
            actions: float32 [N, C, A], in [-1, 1] (clipped by the controllers); or a closed-loop controller: a function
                that is called with each sub-step's number just before it runs and returns float32 [N, A].
            next_seeds: one seed per row; a row whose episode ends in this chunk starts the next one with it (partial
                reset, at the end of the chunk).  None: such rows freeze.

        Raises:
            SimulatorError: wrong shape, or actions that are not finite (names the rows; nothing was stepped).
        """
        ...

    def running(self) -> list[RunningEpisode | None]:
        """Returns the running episode of each row, None for frozen rows."""
        ...

    def restore(self, episodes: Sequence[RunningEpisode | None]) -> Observation:
        """Brings every row to the given point by reset and replay (None: frozen); bit-equal on CPU."""
        ...

    def expert_actions(self) -> Tensor:
        """Returns the scripted expert's next single action for every row, float32 [N, A].

        Raises:
            SimulatorError: this task has no expert.
        """
        ...

    def state(self) -> Observation:
        """Returns what all N rows show now, without pictures: for controllers that are asked within a chunk."""
        ...

    def object_positions(self) -> Tensor | None:
        """Returns where the object to handle is, float32 [N, 3] in metres (a helper target for cloning), or None."""
        ...

    def record(self, rows: Sequence[int], size: int = 256) -> None:
        """From now on keeps one picture [size, size, 3] per env step of each of these rows (an empty list ends it)."""
        ...

    def take_frames(self) -> dict[int, list[Tensor]]:
        """Returns the pictures kept since the last call, uint8 [size, size, 3] by row, and forgets them."""
        ...

    def close(self) -> None:
        """Frees the simulator."""
        ...


# ------------------------------------------------------------------------------------------------------------ policies
Features = dict[str, Tensor]  # what a policy's frozen part made of an observation; every tensor has B rows


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Plain facts about a policy."""

    name: str
    chunk: int  # C
    action_dim: int  # A
    num_bins: int  # values per action token


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Actions sampled (or chosen) for B rows."""

    actions: Tensor  # float32 [B, C, A] in [-1, 1]
    tokens: Tensor  # int64 [B, C, A], index of the bin
    log_probs: Tensor  # float32 [B, C, A], under the distribution sampled from (temperature included)


@runtime_checkable
class Policy(Protocol):
    """A VLA: observation -> distribution over a chunk of action tokens, and a value per action.

    A policy draws nothing: it is handed its noise.  `encode` is the part that RL may cache with the rollout: what it
    contains is frozen during RL (or it hands the raw observation on where nothing is frozen).
    """

    spec: PolicySpec
    module: nn.Module

    def encode(self, observation: Observation) -> Features:
        """Returns what `act`, `evaluate` and `value` need of B rows; rows do not influence each other."""
        ...

    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Samples by inverting the cumulative distribution at `noise` [B, C, A] in (0, 1); None takes the likeliest."""
        ...

    def evaluate(
        self, features: Features, tokens: Tensor, temperature: float, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns (log_probs, entropy), both float32 [B, C, A], of given tokens, differentiable.

        Without `entropy_gradient` the entropy is a number to look at, and costs no memory until the backward pass.
        """
        ...

    def value(self, features: Features, privileged: Tensor | None) -> Tensor:
        """Returns V before each action, float32 [B, C]; `privileged` is [B, C, Q] (a critic may use it, or not)."""
        ...

    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns what the policy loss trains in RL, in a fixed order (frozen parts left out)."""
        ...

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns what the value loss trains in RL, in a fixed order; disjoint from `policy_parameters`."""
        ...

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        """Returns what cloning trains: the whole policy, or all but what `encode_frozen` computes."""
        ...

    def encode_trainable(self, observation: Observation) -> Features:
        """Returns features through which every parameter gets a gradient."""
        ...

    def encode_frozen(self, observation: Observation) -> Features:
        """Returns features that hold what the frozen part computes, without a gradient."""
        ...

    def pooled(self, features: Features) -> Tensor:
        """Returns what the statistics "vision" standardise, float32 [B, D]."""
        ...

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        """Sets what an input is standardised with: "proprio", "privileged" or "vision", each [D]."""
        ...

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed behaviour-cloning loss over the B rows (scalar).

        Args:
            features: of B rows.
            actions: float32 [B, C, A] in [-1, 1].
            targets: helper targets, for example "object_position" [B, 3] in metres.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes config.json, model.safetensors and dataset_statistics.json (Hugging Face folder form)."""
        ...

    @classmethod
    def load(cls, folder: Path, config: PolicyConfig | None = None) -> Policy:
        """Returns the policy of a folder; `config` may change how it is used, not what it is.

        Raises:
            CheckpointError: the folder is missing, damaged, or holds a policy of another shape.
        """
        ...


# ----------------------------------------------------------------------------------------------------- language models
# N prompts, B sequences, L tokens of the longest prompt with its completion, R of the longest completion, V vocabulary.


@dataclass(frozen=True, slots=True)
class LanguageSpec:
    """Plain facts about a language model, as LanguageSpec("qwen2", 25, 128, 0, (1,))."""

    name: str
    vocab_size: int  # V, width of the logits
    context_length: int | None  # tokens of prompt and completion together; None: no limit
    pad_id: int
    eos_ids: tuple[int, ...]  # any of them ends a completion


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B sequences, prompt then completion, padded on the right.

    [[5, 6, 7, 1], [8, 9, 1, 0]] with prompt_lengths [2, 1], lengths [4, 3]: completions [7, 1] and [9, 1], both R = 2.
    """

    tokens: Tensor  # int64 [B, L]
    prompt_lengths: Tensor  # int64 [B], at least 1
    lengths: Tensor  # int64 [B], prompt and completion

    @property
    def mask(self) -> Tensor:
        """Where [B, R] holds a token of a completion, bool."""
        counts = self.lengths - self.prompt_lengths
        return torch.arange(int(counts.max()), device=counts.device) < counts[:, None]

    def to(self, device: str) -> TokenBatch:
        """Returns the batch on a device."""
        return TokenBatch(self.tokens.to(device), self.prompt_lengths.to(device), self.lengths.to(device))


@runtime_checkable
class Prefix(Protocol):
    """N prompts that a decoder has read."""

    @property
    def logits(self) -> Tensor:
        """Logits of each prompt's first completion token, float [N, V]."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """The memory (KV cache) of up to S rows that decode together; it keeps slots 0..n-1, n = tokens of the last step.

    Made for the weights as they are when it is made; they must not change while it is used.  A row joins with a prompt,
    is handed one token per step, and is dropped when another row joins or moves into its slot, or when the caller steps
    with fewer tokens.
    """

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefix:
        """Reads N prompts; not one of them has a slot yet."""
        ...

    def join(self, prefix: Prefix, prompts: Tensor, slots: Tensor) -> None:
        """Puts copies of prompts (int64 [k], numbers within `prefix`) into slots (int64 [k])."""
        ...

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Moves rows (int64 [k] slots, disjoint from `targets`) into other slots."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token to each of slots 0..n-1 (int64 [n]) and returns the next one's logits [n, V]."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """What a model says about the completions of a batch; 0 where a row has no token."""

    log_probs: Tensor  # float32 [B, R]
    entropy: Tensor | None  # float32 [B, R] nats; None where it was not asked for


@runtime_checkable
class LanguagePolicy(Protocol):
    """A causal language model with its tokenizer.

    It draws nothing, and its forward pass is the same in training and in generation (no dropout).  The padding token
    is never predicted: generation and training exclude it alike.
    """

    spec: LanguageSpec
    module: nn.Module

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, in the model's chat template where it has one."""
        ...

    def encode_completion(self, text: str) -> list[int]:
        """Returns the tokens of an answer, end of sequence included (for supervised training)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones left out."""
        ...

    def log_probs(
        self, batch: TokenBatch, temperature: float, with_entropy: bool = True, entropy_gradient: bool = True
    ) -> TokenLogProbs:
        """Returns log-probs of the completions' tokens at a temperature, differentiable, and so is the entropy.

        Without `entropy_gradient` the entropy is a number to look at, and costs no memory until the backward pass.
        """
        ...

    def decoder(self, num_slots: int, width: int) -> Decoder:
        """Returns memory for S rows of at most `width` tokens each, with the weights as they are now."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """Returns what RL trains, in a fixed order."""
        ...

    def save(self, folder: Path) -> None:
        """Writes a folder that transformers' from_pretrained loads to the same logits (adapters merged)."""
        ...

    @classmethod
    def from_config(cls, config: LanguagePolicyConfig, folder: Path | None, seed: int) -> LanguagePolicy:
        """Returns the policy of a folder, or a new one; adapters and new weights are drawn from the seed.

        Raises:
            CheckpointError: the folder is incomplete or damaged.
            ConfigError: settings that do not fit the model.
        """
        ...


@runtime_checkable
class ValueModel(Protocol):
    """A critic for completions."""

    module: nn.Module

    def values(self, batch: TokenBatch) -> Tensor:
        """Returns V before each token of the completions, float32 [B, R], differentiable; 0 where a row has none."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """Returns what the value loss trains, in a fixed order."""
        ...

    @classmethod
    def from_policy(cls, policy: LanguagePolicy) -> ValueModel:
        """Returns a new critic that starts from a policy's weights and shares none with it."""
        ...
