"""From images and an instruction to actions of the robot: a checkpoint folder, ready to be asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from policies.openvla.action_tokens import ActionTokens
from policies.openvla.autoregressive import decode
from policies.openvla.folder import read_checkpoint
from policies.openvla.images import RawImage, read_processor
from policies.openvla.log_probs import TokenDistribution
from policies.openvla.oft import Head
from policies.openvla.oft_folder import OftSettings, read_oft
from policies.openvla.prompt import PromptTokenizer
from policies.openvla.statistics import OFT_EPSILON, range_of


class OpenVLAPredictor:
    """Asks an OpenVLA folder for one action at a time, greedily over the whole vocabulary, as the reference does."""

    def __init__(self, folder: Path, unnorm_key: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        """Reads the folder.

        Raises:
            CheckpointError: see `read_checkpoint`; or tokenizer or image processor are missing.
            ConfigError: there are no statistics of `unnorm_key`.
        """
        self.checkpoint = read_checkpoint(folder, dtype)
        config = self.checkpoint.config
        self.range = range_of(self.checkpoint.statistics, unnorm_key)
        self.tokenizer = PromptTokenizer(folder, config.pad_token_id)
        self.processor = read_processor(folder, config)
        self.tokens = ActionTokens.of(config)

    def act(self, image: RawImage, instruction: str) -> NDArray[np.float64]:
        """Returns the robot's action [A] for an image, uint8 [H, W, 3]."""
        pixel_values = self.processor([image])[None]
        rows = self.tokenizer.rows([instruction])
        done = decode(self.checkpoint.network, rows, pixel_values, self.range.dim, TokenDistribution())
        return self.range.expand(self.tokens.decode(done.tokens[0].numpy()))


class OftPredictor:
    """Asks an OpenVLA-OFT folder for a chunk of actions at a time."""

    def __init__(self, folder: Path, settings: OftSettings, dtype: torch.dtype = torch.float32) -> None:
        """Reads the folder; errors as those of `read_oft`."""
        self.checkpoint, self.model = read_oft(folder, settings, dtype)
        config, statistics = self.checkpoint.config, self.checkpoint.statistics
        key, scaling = settings.unnorm_key, settings.scaling
        self.range = range_of(statistics, key, scaling=scaling)
        self.proprio_range = range_of(statistics, key, "proprio", scaling) if settings.proprio else None
        self.tokenizer = PromptTokenizer(folder, config.pad_token_id)
        self.processor = read_processor(folder, config)
        self.tokens = ActionTokens.of(config)
        self._dtype = dtype

    @torch.no_grad()
    def act(
        self, images: Sequence[RawImage], instruction: str, proprio: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Returns the robot's actions [C, A].

        Args:
            images: K of them, uint8 [H, W, 3]; the main camera first, then the wrist's.
            instruction: what to do.
            proprio: the robot's own state [P], where the checkpoint reads it.

        Raises:
            DataError: another number of images, or proprioception is missing or unwanted.
        """
        pixel_values = self.processor(images)[None]
        rows = self.tokenizer.rows([instruction])
        state = self._state(proprio)
        if self.model.head is Head.l1:
            normalised = self.model.regress(rows, pixel_values, state)[0].float().numpy()
        else:
            done = self.model.decode(rows, pixel_values, TokenDistribution(), proprio=state)
            normalised = self.tokens.decode(done.tokens[0].numpy()).reshape(self.model.chunk_len, -1)
        return self.range.expand(normalised, OFT_EPSILON)

    def _state(self, proprio: ArrayLike | None) -> Tensor | None:
        if proprio is None:
            return None
        values = np.asarray(proprio) if self.proprio_range is None else self.proprio_range.normalise(proprio)
        return torch.from_numpy(values)[None].to(self._dtype)
