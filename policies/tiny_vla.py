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
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from policies.checkpoint_folder import KeptInFolder, seeded
from policies.critic import Criticised, Standardise, ValueHead
from policies.lerobot_processors import read_normalisers, write_normalisers
from policies.pretrained import Vision, WordPieces, Words, WordVectors, imagenet_tower, require_shipped
from policies.tokenizer import WordTokenizer
from policies.transformer import Transformer
from policies.vision import IMAGES, MAPS, Pool, Stem, conv_tower, image_features, of_cameras, require_seen
from rlinf_embodied.algorithms.log_probs import mean_near_mode, sample_tokens, token_log_probs
from rlinf_embodied.algorithms.log_probs import token_log_probs_and_entropy as log_probs_and_entropy
from rlinf_embodied.config import Critic, PolicyConfig
from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.data.normalisation import Normalisation
from rlinf_embodied.data.recorded import ACTION, STATE
from rlinf_embodied.interfaces.envs import EnvSpec, Observation
from rlinf_embodied.interfaces.options import typed
from rlinf_embodied.interfaces.policies import (
    Evaluation,
    Features,
    ImitationPolicy,
    PolicyOutput,
    Record,
    mean_of_rows,
    token_spec,
)

_REACH = 2  # the greedy action is the mean over so many bins on both sides of the mode (docs/results/recipe.md)


@dataclass(kw_only=True, slots=True)
class TinyVLAOptions:
    """The section policy.options."""

    num_bins: int = 33  # values per action dimension
    stem_width: int = 64  # channels of the convolutional stem
    keypoints: int = 32  # spatial-softmax keypoints per camera
    instruction_length: int = 8  # tokens: words, or parts of words; the last one stands for the rest of a longer one
    hidden_size: int = 128  # of the causal transformer
    num_layers: int = 2
    num_heads: int = 4
    critic_hidden_size: int = 256
    freeze_stem: bool = True  # in RL: its feature maps are cached with the rollout
    vision: Vision = Vision.stem  # or efficientnet_lite0, pretrained on ImageNet (policies/pretrained.py)
    words: Words = Words.learned  # or wordllama, pretrained word vectors

    def __post_init__(self) -> None:
        require_numbers(
            self, "policy.options", "stem_width", "keypoints", "instruction_length", "hidden_size", "num_layers", low=1
        )
        require_numbers(self, "policy.options", "num_heads", "critic_hidden_size", low=1)
        require_numbers(self, "policy.options", "num_bins", low=2)
        rule = f"it must be a multiple of policy.options.num_heads={self.num_heads}"
        fits = self.hidden_size % self.num_heads == 0
        require(fits, "policy.options.hidden_size", self.hidden_size, rule, "change one of the two")
        require_shipped(self.vision, self.words)


def _adapter(in_features: int, hidden_size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_features, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))


def _of_rows(tensor: Tensor, row: Tensor) -> Tensor:
    """Returns tensor[row]; unlike that, its gradient is always summed in the same order on a GPU."""
    return F.embedding(row, tensor.flatten(1)).unflatten(1, tensor.shape[1:])


class TinyVLANet(nn.Module):
    """All parameters of the policy: stem, pooling, adapters, transformer, action head, value head, helper head."""

    def __init__(self, options: TinyVLAOptions, critic: Critic, env: EnvSpec) -> None:
        """Builds the modules for an env's cameras, proprioception and chunk."""
        super().__init__()
        num_cameras, d = len(env.cameras), options.hidden_size
        tower = conv_tower if options.vision is Vision.stem else imagenet_tower
        self.stem = Stem(num_cameras, options.stem_width, tower)
        self.pool = Pool(options.stem_width, options.keypoints, env.image_sizes)
        self.vision_scale = Standardise(num_cameras * self.pool.out_features)
        self.proprio_scale = Standardise(env.proprio_dim)
        learned = options.words is Words.learned
        self.words = nn.Embedding(WordTokenizer(options.instruction_length).size, d) if learned else WordVectors(d)
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
        # Few instructions are in a batch, and attention is causal: the words of each are computed once.
        if torch.compiler.is_compiling():  # no shape may depend on values then
            instructions, row = tokens, torch.arange(len(tokens), device=tokens.device)
        else:
            instructions, row = torch.unique(tokens, dim=0, return_inverse=True)
        past = self.transformer.keys_and_values(self.words(instructions))
        past = [(_of_rows(keys, row), _of_rows(values, row)) for keys, values in past]
        return self.transformer(torch.cat([state, queries], dim=1), past)[:, -self.queries.shape[0] :]


class TinyVLA(KeptInFolder, Criticised, ImitationPolicy):
    """The policy behind the `Policy` protocol.

    Features: "proprio" [B, P], normalised, "tokens" int64 [B, L], and "maps.<name>" of each camera from a frozen stem,
    or else the raw "images.<name>".  Without a normalisation, actions lie in [-1, 1].
    """

    _net = TinyVLANet
    options_type: ClassVar[type[TinyVLAOptions]] = TinyVLAOptions
    normalisation: Mapping[str, Normalisation] = {}

    def __init__(self, config: PolicyConfig, env: EnvSpec, seed: int) -> None:
        """Builds a policy with weights that are a function of the seed; the global generator is left as it was.

        Raises:
            ConfigError: the env has no cameras, or no privileged state for a privileged critic.
        """
        require_seen(config, env)
        self.config, self.env = config, env
        self.options = typed(config.options, self.options_type, "policy.options")
        self.spec = token_spec(config, env)
        tokenizer = WordTokenizer if self.options.words is Words.learned else WordPieces
        self._tokenizer = tokenizer(self.options.instruction_length)
        with seeded(seed):
            net = self._net(self.options, config.critic, env)
        self.module: TinyVLANet = net.eval()

    # ------------------------------------------------------------------------------------------------------ inference
    def encode(self, observation: Observation) -> Features:
        """Returns the features that RL caches: those of a frozen stem, else the images."""
        return self.encode_frozen(observation) if self.options.freeze_stem else self.encode_trainable(observation)

    @torch.no_grad()
    def encode_frozen(self, observation: Observation) -> Features:
        """Returns features with the stem's maps, through which it gets no gradient."""
        images = image_features(observation)
        names = [name.replace(IMAGES, MAPS, 1) for name in images]
        maps = dict(zip(names, self.module.stem(of_cameras(images)), strict=True))
        return maps | self._without_images(observation)

    def encode_trainable(self, observation: Observation) -> Features:
        """Returns features with the images, so that the stem is trained with the rest."""
        return image_features(observation) | self._without_images(observation)

    def _without_images(self, observation: Observation) -> Features:
        tokens = self._tokenizer(observation.instruction).to(observation.proprio.device)
        return {"proprio": self.network_state(observation.proprio), "tokens": tokens}

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

    # ---------------------------------------------------------------------------------------------------------- units
    def normalise_by(self, statistics: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Sets the normalisation from a dataset's statistics, as policy.normalise_* require.

        Raises:
            ConfigError: a feature has no statistics, or of another size.
            DataError: the statistics lack what a mode needs.
        """
        config, sizes = self.config, _sizes(self.env)
        self.normalisation = {}
        for name, path, mode in (
            (STATE, "policy.normalise_state", config.normalise_state),
            (ACTION, "policy.normalise_actions", config.normalise_actions),
        ):
            if mode is None:
                continue
            require(name in statistics, path, mode.name, f"the data has no {name}", "use a LeRobot or RLDS dataset")
            normalisation = Normalisation(name, mode, statistics[name])
            rule = f"the data's {name} has {normalisation.size} dimensions, and the env's {sizes[name]}"
            require(normalisation.size in (None, sizes[name]), path, mode.name, rule, "use data of this robot")
            self.normalisation = {**self.normalisation, name: normalisation}

    def set_statistics(self, name: str, mean: Tensor, std: Tensor) -> None:
        if name != "proprio" or STATE not in self.normalisation:  # which is normalised already
            super().set_statistics(name, mean, std)

    def network_state(self, proprio: Tensor) -> Tensor:
        """Returns the network's input for the state vectors [B, F * D] of F env steps."""
        normalisation = self.normalisation.get(STATE)
        if normalisation is None:
            return proprio
        return normalisation.forward(proprio.unflatten(1, (self.env.history, -1))).flatten(1)

    def network_actions(self, actions: Tensor) -> Tensor:
        """Returns the network's targets for actions [B, C, A]."""
        normalisation = self.normalisation.get(ACTION)
        return actions if normalisation is None else normalisation.forward(actions)

    def robot_actions(self, actions: Tensor) -> Tensor:
        """Returns the robot's actions for network outputs [B, C, A]."""
        normalisation = self.normalisation.get(ACTION)
        return actions if normalisation is None else normalisation.inverse(actions)

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.normalisation:
            write_normalisers(folder, self.normalisation, _sizes(self.env))

    @classmethod
    def from_folder(cls, folder: Path, env: EnvSpec | None = None, config: PolicyConfig | None = None) -> Self:
        policy = super().from_folder(folder, env, config)
        state, action = policy.config.normalise_state, policy.config.normalise_actions
        if state or action:
            policy.normalisation = read_normalisers(folder, {STATE: state, ACTION: action})
        return policy

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
        parameters = self.module.named_parameters()
        return [p for name, p in parameters if p.requires_grad and not name.startswith(exclude)]

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


def _sizes(env: EnvSpec) -> dict[str, int]:
    """Returns the dimensions of the data's state and actions."""
    return {STATE: env.proprio_dim // env.history, ACTION: env.action_dim}
