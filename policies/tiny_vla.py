"""A small vision-language-action policy, trained from scratch: a causal transformer that decodes a chunk in parallel.

    instruction --words--> embeddings -----------------------\
    images --stem (frozen in RL)--> maps --pool--> per camera --+--> [words | cameras | body | C queries]
    proprioception --standardise--> body ---------------------/                  |  transformer
                                                 logits [B, C, A, bins] <--head-- C hidden states

All C actions come from one forward pass: query c attends to everything before it, and sampled tokens are not fed back,
so the chunk's log-prob is the exact sum over its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from policies.checkpoint_folder import seeded
from policies.critic import Standardise, ValueHead
from policies.tokenizer import WordTokenizer
from policies.transformer import Transformer
from policies.vision import IMAGES, MAPS, Pool, Stem, VisionPolicy, of_cameras, require_seen
from rlinf_embodied.algorithms.log_probs import mean_near_mode, sample_tokens, token_log_probs
from rlinf_embodied.algorithms.log_probs import token_log_probs_and_entropy as log_probs_and_entropy
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import Evaluation, Features, PolicyOutput, Record, mean_of_rows, token_spec

_REACH = 2  # the greedy action is the mean over so many bins on both sides of the mode (docs/results/recipe.md)


@dataclass(kw_only=True, slots=True)
class TinyVLAOptions:
    """The section policy.options."""

    num_bins: int = 33  # values per action dimension
    stem_width: int = 64  # channels of the convolutional stem
    keypoints: int = 32  # spatial-softmax keypoints per camera
    instruction_length: int = 8  # word tokens; the rest of a longer instruction is folded into the last one
    hidden_size: int = 128  # of the causal transformer
    num_layers: int = 2
    num_heads: int = 4
    critic_hidden_size: int = 256
    freeze_stem: bool = True  # in RL: its feature maps are cached with the rollout

    def __post_init__(self) -> None:
        require_numbers(
            self, "policy.options", "stem_width", "keypoints", "instruction_length", "hidden_size", "num_layers", low=1
        )
        require_numbers(self, "policy.options", "num_heads", "critic_hidden_size", low=1)
        require_numbers(self, "policy.options", "num_bins", low=2)
        rule = f"it must be a multiple of policy.options.num_heads={self.num_heads}"
        fits = self.hidden_size % self.num_heads == 0
        require(fits, "policy.options.hidden_size", self.hidden_size, rule, "change one of the two")


def _adapter(in_features: int, hidden_size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_features, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))


class TinyVLANet(nn.Module):
    """All parameters of the policy: stem, pooling, adapters, transformer, action head, value head, helper head."""

    def __init__(self, options: TinyVLAOptions, critic: Critic, env: EnvSpec) -> None:
        """Builds the modules for an env's cameras, proprioception and chunk."""
        super().__init__()
        num_cameras, d = len(env.cameras), options.hidden_size
        self.stem = Stem(num_cameras, options.stem_width)
        self.pool = Pool(options.stem_width, options.keypoints, env.image_sizes)
        self.vision_scale = Standardise(num_cameras * self.pool.out_features)
        self.proprio_scale = Standardise(env.proprio_dim)
        self.words = nn.Embedding(WordTokenizer(options.instruction_length).size, d)
        self.cameras = nn.ModuleList([_adapter(self.pool.out_features, d) for _ in range(num_cameras)])
        self.body = _adapter(env.proprio_dim, d)
        self.queries = nn.Parameter(torch.randn(env.chunk, d))
        self.transformer = Transformer(d, options.num_layers, options.num_heads)
        self.head: nn.Module = nn.Linear(d, env.action_dim * options.num_bins)
        self.object_position = nn.Linear(num_cameras * self.pool.out_features, 3)
        privileged = critic is Critic.privileged
        self.privileged_scale = Standardise(env.privileged_dim if privileged else 0)
        self.value = ValueHead(env.privileged_dim if privileged else d, options.critic_hidden_size)

    def hidden(self, pooled: Tensor, proprio: Tensor, tokens: Tensor) -> Tensor:
        """Returns the queries' hidden states [B, C, d] of pooled vision [B, K, D], proprioception and word numbers."""
        vision = self.vision_scale(pooled.flatten(1)).view_as(pooled)
        cameras = [adapter(vision[:, k]) for k, adapter in enumerate(self.cameras)]
        body = self.body(self.proprio_scale(proprio))
        state = torch.stack([*cameras, body], dim=1)
        queries = self.queries.expand(len(proprio), -1, -1)
        sequence = torch.cat([self.words(tokens), state, queries], dim=1)
        return self.transformer(sequence)[:, -self.queries.shape[0] :]


class TinyVLA(VisionPolicy):
    """The policy behind the `Policy` protocol; a frozen stem gives "maps.<name>" of each camera."""

    _net = TinyVLANet
    options_type: ClassVar[type[TinyVLAOptions]] = TinyVLAOptions

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Builds a policy with weights that are a function of the seed; the global generator is left as it was.

        Raises:
            ConfigError: the env has no cameras, or no privileged state for a privileged critic.
        """
        require_seen(config, env)
        self.config, self.env = config, env
        self.options = typed(config.options, self.options_type, "policy.options")
        self.spec = token_spec(config, env)
        self._tokenizer = WordTokenizer(self.options.instruction_length)
        with seeded(seed):
            net = self._net(self.options, config.critic, env)
        self.module: TinyVLANet = net.eval()

    # ------------------------------------------------------------------------------------------------------ inference
    def _seen(self, images: Features) -> Features:
        names = [name.replace(IMAGES, MAPS, 1) for name in images]
        return dict(zip(names, self.module.stem(of_cameras(images)), strict=True))

    def pooled(self, features: Features) -> Tensor:
        """Returns pooled vision before it is standardised, float32 [B, K * D]."""
        return self._pool(features).flatten(1)

    def _pool(self, features: Features) -> Tensor:
        return self.module.pool(of_cameras(features, MAPS) or self.module.stem(of_cameras(features)))

    def _hidden(self, features: Features) -> Tensor:
        return self.module.hidden(self._pool(features), features["proprio"], features["tokens"])

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.module.head(hidden).unflatten(-1, (self.spec.action_dim, self.options.num_bins))

    @torch.no_grad()
    def act(self, features: Features, noise: Tensor | None, temperature: float) -> PolicyOutput:
        """Samples by the inverse cumulative distribution at `noise`, uniforms (0, 1) [B, C, A].

        None: greedy.  Tokens are then the modes, and actions the means of the distribution near them, which lie between
        centres of bins.
        """
        logits = self._logits(self._hidden(features))
        tokens = logits.argmax(-1) if noise is None else sample_tokens(logits, noise, temperature)
        places = tokens.to(torch.float32) if noise is not None else mean_near_mode(logits, _REACH)
        actions = self.robot_actions(places * (2.0 / (self.options.num_bins - 1)) - 1.0)
        return PolicyOutput(actions, {"tokens": tokens}, token_log_probs(logits, tokens, temperature))

    def evaluate(
        self, features: Features, record: Record, temperature: float, entropy_gradient: bool = True
    ) -> Evaluation:
        logits = self._logits(self._hidden(features))
        return Evaluation(*log_probs_and_entropy(logits, record["tokens"], temperature, entropy_gradient))

    # ------------------------------------------------------------------------------------------------------- training
    def policy_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the policy loss in RL: all but value head, helper head and a frozen stem."""
        return self._parameters(
            exclude=("value.", "object_position.", *(("stem.",) if self.options.freeze_stem else ()))
        )

    def imitation_parameters(self, whole: bool) -> list[nn.Parameter]:
        """Returns the parameters of imitation: the whole policy and its helper head, or the policy without its stem."""
        return self._parameters(exclude=("value.",) if whole else ("value.", "object_position.", "stem."))

    def _parameters(self, exclude: tuple[str, ...]) -> list[nn.Parameter]:
        return [p for name, p in self.module.named_parameters() if not name.startswith(exclude)]

    def imitation_loss(self, features: Features, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed behaviour-cloning loss over the B rows (scalar).

        Cross-entropy against soft labels (a normal around the action, half a bin wide), averaged over the C * A tokens
        of a row; plus, where `targets` has "object_position" [B, 3] in metres, the squared error of predicting that
        position from the pooled vision, in decimetres, which moves the keypoints to the object.

        Args:
            features: of B rows; those of `encode_trainable` train the stem, those of `encode_frozen` do not.
            actions: float32 [B, C, A] in [-1, 1], or in the units of the data.
            targets: helper targets, and the mask of padded actions.
        """
        pooled = self._pool(features)
        hidden = self.module.hidden(pooled, features["proprio"], features["tokens"])
        loss = mean_of_rows(self._losses(hidden, self.network_actions(actions), targets), targets).sum()
        if "object_position" not in targets:
            return loss
        error = self.module.object_position(pooled.flatten(1)) - targets["object_position"] * 10.0
        return loss + error.square().mean(-1).sum()

    def _losses(self, hidden: Tensor, actions: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Returns the losses [B, C, A] of hidden states [B, C, d] for normalised target actions."""
        return -(self._soft_labels(actions) * self._logits(hidden).log_softmax(-1)).sum(-1)

    def _soft_labels(self, actions: Tensor) -> Tensor:
        last = self.options.num_bins - 1
        place = (actions.clamp(-1.0, 1.0) + 1.0) * (last / 2.0)
        distance = place[..., None] - torch.arange(self.options.num_bins, device=actions.device)
        return F.softmax(-2.0 * distance.square(), dim=-1)
