"""The section policy.options of OpenVLA and OpenVLA-OFT: what a published folder does not say about its use."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from policies.openvla.oft import Head
from policies.openvla.oft_folder import OftSettings
from policies.openvla.statistics import Scaling
from rlinf_embodied.config import LoraSettings, Precision
from rlinf_embodied.config.checks import require, require_numbers

OPTIONS = "policy.options"  # in the config


class Decoding(StrEnum):
    """How the tokens of a chunk come about."""

    autoregressive = "autoregressive"  # OpenVLA: one after the other, one action at a time
    parallel = "parallel"  # OpenVLA-OFT: a chunk at once


class Gripper(StrEnum):
    """What becomes of the last dimension of an action, which opens and closes the gripper."""

    as_it_is = "as_it_is"
    binary = "binary"  # of data in which 1 opens, for envs in which 1 opens: 1 above 0.5, else -1
    inverted = "inverted"  # of data in which 1 opens, for envs in which -1 opens (LIBERO): -1 above 0.5, else 1


@dataclass(kw_only=True, slots=True)
class OpenVLAOptions:
    """How a folder's policy acts and what of it is trained."""

    decoding: Decoding = Decoding.autoregressive
    unnorm_key: str | None = None  # the data set whose statistics scale actions; None where there is only one
    scaling: Scaling = Scaling.quantiles  # what -1 and 1 stand for; bounds for ALOHA
    gripper: Gripper = Gripper.as_it_is
    head: Head = Head.discrete  # l1 can be evaluated only
    proprio: bool = False  # whether the robot's own state is a token
    film: bool = False  # whether the instruction modulates the towers
    stop_token: bool = True  # whether a parallel sequence ends in it, as in the reference
    prompt_length: int = 48  # tokens of an instruction with what stands around it
    whole_vocabulary: bool = False  # whether any token may be drawn, not only those that are actions
    top_k: int = 0  # of so many likeliest tokens is drawn; 0: of all
    freeze_vision: bool = True  # in RL and cloning; frozen towers get no adapters either
    lora: LoraSettings = field(default_factory=lambda: LoraSettings(rank=0))
    checkpoint_activations: bool = False  # compute those of a pass again in its backward pass, block by block
    precision: Precision = Precision.float32  # of the weights
    critic_hidden_size: int = 256

    def __post_init__(self) -> None:
        parallel = self.decoding is Decoding.parallel
        for name in ("proprio", "film"):
            rule = "only OpenVLA-OFT has such a part"
            require(parallel or not getattr(self, name), f"{OPTIONS}.{name}", True, rule, "set decoding=parallel")
        rule = "only OpenVLA-OFT has an action head"
        require(parallel or self.head is Head.discrete, f"{OPTIONS}.head", self.head, rule, "set decoding=parallel")
        require(self.prompt_length >= 4, f"{OPTIONS}.prompt_length", self.prompt_length, "a prompt is longer", "use 48")
        require_numbers(self, "policy.options", "critic_hidden_size", low=1)
        require(self.top_k >= 0, f"{OPTIONS}.top_k", self.top_k, "it counts tokens", "use 0 for all")

    def settings(self, chunk: int, num_images: int) -> OftSettings:
        """Returns what reading a folder of OpenVLA-OFT needs to know."""
        return OftSettings(
            unnorm_key=self.unnorm_key,
            chunk_len=chunk,
            num_images=num_images,
            head=self.head,
            proprio=self.proprio,
            film=self.film,
            scaling=self.scaling,
        )
