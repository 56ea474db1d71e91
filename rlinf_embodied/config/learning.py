"""The sections `policy` and `warm_start`: the policy that is trained, and what it starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlinf_embodied.config.checks import require, require_numbers


class Critic(StrEnum):
    """The input of the value head."""

    privileged = "privileged"  # the simulator's state (training only)
    observation = "observation"  # the policy's own features


class NormMode(StrEnum):
    """How a feature is normalised (data/normalisation.py); the values are LeRobot's."""

    mean_std = "MEAN_STD"
    min_max = "MIN_MAX"
    quantiles = "QUANTILES"
    quantile10 = "QUANTILE10"
    identity = "IDENTITY"


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """Settings that all policies have; the others are in `options`, a dataclass in the policy's module."""

    _target_: str = "policies.tiny_vla.TinyVLA"
    name: str = "tiny_vla"
    critic: Critic = Critic.privileged
    temperature: float = 0.4  # of sampling and of log-probs; small, since evaluation is greedy
    noise_repeat: float = 0.0  # probability that an action of a chunk is sampled with the noise of the previous action
    # tiny_vla outputs values in [-1, 1], so with mean_std it cannot choose actions beyond one standard deviation
    normalise_actions: NormMode | None = None  # by the statistics of the dataset; null: actions lie in [-1, 1]
    normalise_state: NormMode | None = None  # by the statistics of the dataset; null: states are standardised
    prompt_suffix: str | None = None  # appended to every instruction, for example "Advantage: positive"
    options: dict[str, Any] = field(default_factory=dict)  # of the policy's class, for example TinyVLAOptions

    def __post_init__(self) -> None:
        self.critic = Critic(self.critic)  # a file holds the plain value
        for name in ("normalise_actions", "normalise_state"):
            setattr(self, name, None if (mode := getattr(self, name)) is None else NormMode(mode))
        require_numbers(self, "policy", "temperature", low=0, above=True)
        require_numbers(self, "policy", "noise_repeat", high=1)


class ImageAugmentation(StrEnum):
    """A random change of images (data/augmentation.py)."""

    brightness = "brightness"
    contrast = "contrast"
    saturation = "saturation"
    hue = "hue"
    sharpness = "sharpness"
    affine = "affine"
    crop = "crop"
    blur = "blur"


@dataclass(kw_only=True)  # slots of two bases would conflict
class FineTuningPhases:
    """Supervised fine-tuning in two phases, for algorithm=sft and for a warm start."""

    epochs: int = 7  # of the whole policy
    head_epochs: int = 38  # afterwards, of everything but the stem, on cached features; a third was too few
    batch_size: int = 32  # chunks
    head_batch_size: int = 32
    lr: float = 1e-3
    head_lr: float = 2e-3
    weight_decay: float = 1e-2
    max_grad_norm: float = 1.0
    # in the units in which features hold proprioception: m, rad, or normalised
    proprio_jitter: float | None = None  # std of noise on proprioception; null: the policy's default, usually 0.005
    augment: list[ImageAugmentation] = field(default_factory=list)  # random changes of training images
    max_augmentations: int = 3  # of one image

    def require_phases(self, path: str) -> None:
        """Checks the numbers in the section at `path`."""
        require_numbers(self, path, "batch_size", "head_batch_size", "max_augmentations", low=1)
        require_numbers(self, path, "epochs", "head_epochs", "weight_decay", "proprio_jitter", low=0)
        require_numbers(self, path, "max_grad_norm", above=True, high=math.inf)
        require_numbers(self, path, "lr", "head_lr", low=0, above=True)


@dataclass(kw_only=True, slots=True)
class WarmStartConfig(FineTuningPhases):
    """The policy that RL starts from: cloned from the scripted expert, unless one of the first three fields is set."""

    checkpoint: str | None = None  # a checkpoint folder
    demonstrations: str | None = None  # clone these: a ManiSkill trajectory file (.h5), or a LeRobot folder
    from_scratch: bool = False  # a new policy
    num_demos: int = 480  # on PickCube 480 give 99 % success, 240 give 87 to 96 % (docs/results/recipe.md)
    speeds: list[float] = field(default_factory=lambda: [1.0])  # of the expert's hand, per episode; 1: fastest
    noise: list[float] = field(default_factory=lambda: [0.0, 0.05, 0.1, 0.3])  # of the expert's actions, per episode
    noise_steps: int = 15  # number of steps of the largest noise level
    cache_gb: float = 4.0  # memory of a worker for decoded images of datasets; as much again for cached features
    decoders: int = 1  # background threads of a worker that decode images of datasets
    convert_actions: list[str] = field(default_factory=list)  # of a dataset: 3:euler_xyz:rotation_vector
    convert_state: list[str] = field(default_factory=list)  # conversions in the same form (docs/datasets.md)
    cache_dir: str = "~/.cache/rlinf_embodied"  # RLINF_EMBODIED_CACHE overrides it

    def __post_init__(self) -> None:
        starts = [name for name in ("checkpoint", "demonstrations", "from_scratch") if getattr(self, name)]
        rule = f"training starts from one policy, and {', '.join(starts)} are given"
        first = (starts or ["checkpoint"])[0]
        require(len(starts) <= 1, f"warm_start.{first}", getattr(self, first), rule, "give one of these")
        rule = "each of the 4 blocks of demonstrations needs at least one"
        require(self.num_demos >= 4, "warm_start.num_demos", self.num_demos, rule, "use 480")
        self.require_phases("warm_start")
        require_numbers(self, "warm_start", "noise_steps", "cache_gb", low=0)
        require_numbers(self, "warm_start", "decoders", low=1)
        holds, rule = self.speeds and all(0 < speed <= 1 for speed in self.speeds), "each is above 0 and at most 1"
        require(bool(holds), "warm_start.speeds", self.speeds, rule, "use [1.0]")
        holds, rule = self.noise and min(self.noise) >= 0, "it holds at least one level, and none is negative"
        require(bool(holds), "warm_start.noise", self.noise, rule, "use [0.0]")
