"""The goldens of one oracle folder, and the differences found so far."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from policies.openvla.images import ImageProcessor
from rlinf_embodied.errors import DataError

_BF16, _BF16_FACTOR, _BF16_LIMIT = ".bf16", 2.0, 0.1
_SMALLEST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Difference:
    """A golden and how far off it is: of the largest golden value, or the number of unequal integers."""

    name: str
    largest: float
    limit: float

    @property
    def too_large(self) -> bool:
        """Whether it is beyond the limit; NaN is."""
        return not self.largest <= self.limit


@dataclass
class Goldens:
    """What golden/ holds: tensors by name, and the facts of golden.json.

    Attributes:
        folder: the oracle folder.
        limit: the largest relative difference of a float32 golden.
        tensors: by name.
        facts: golden.json.
        found: the differences so far.
        used: goldens that served as inputs.
    """

    folder: Path
    limit: float
    tensors: Mapping[str, Tensor] = field(init=False)
    facts: Mapping = field(init=False)
    found: list[Difference] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        golden = self.folder / "golden"
        try:
            self.tensors = load_file(golden / "golden.safetensors")
            self.facts = json.loads((golden / "golden.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, SafetensorError) as error:
            raise DataError(f"{golden} cannot be read ({error}): give a complete oracle folder") from error

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint."""
        return self.folder / "checkpoint"

    @property
    def unchecked(self) -> list[str]:
        """Goldens that were neither compared nor used."""
        compared = {difference.name for difference in self.found} | self.used
        return sorted(name for name in self.tensors if name not in compared)

    def given(self, name: str) -> Tensor:
        """Returns a golden that is an input of what follows."""
        self.used.add(name)
        return self.tensors[name]

    def cases(self, prefix: str = "") -> list[int]:
        """Returns the cases that have goldens named <prefix>case<number>.<what>."""
        return sorted({int(match[1]) for match in self.names(rf"{re.escape(prefix)}case(\d+)\..*")})

    @property
    def chunk_len(self) -> int:
        """Actions per chunk, by the shape of the goldens."""
        return self.tensors[self.names(r".*actions_f64")[0][0]].shape[-2]

    def names(self, pattern: str) -> list[re.Match[str]]:
        """Returns matches of goldens whose whole name matches a regular expression."""
        return [match for name in self.tensors if (match := re.fullmatch(pattern, name))]

    def image(self, name: str) -> NDArray[np.uint8]:
        """Returns an image of golden/, uint8 [H, W, 3]."""
        return np.array(Image.open(self.folder / "golden" / name).convert("RGB"))

    def pixels(self, processor: ImageProcessor, names: Sequence[str]) -> Tensor:
        """Returns the pixel values [1, K * 6, S, S] of images of golden/."""
        squared = np.stack([processor.squared(self.image(name)) for name in names])
        return processor.normalised(torch.from_numpy(squared)[None])

    def compare(self, name: str, value: Tensor | NDArray, where: Tensor | None = None) -> None:
        """Notes the difference of a value from a golden, if there is such a golden.

        Args:
            name: of the golden.
            value: what was computed here.
            where: bool, of the leading axes: the places that count; all if it is not given.
        """
        if name not in self.tensors:
            return
        golden, here = self.tensors[name], torch.as_tensor(value).detach()
        if golden.shape != here.shape:
            self.found.append(Difference(name, float("inf"), self.limit))
            return
        if where is not None:
            golden, here = golden[where], here[where]
        if golden.dtype in (torch.int64, torch.int32, torch.bool):
            self.found.append(Difference(name, float((golden != here).sum()), 0.0))
            return
        self.found.append(Difference(name, relative(here, golden), self._limit_of(name, golden)))

    def _limit_of(self, name: str, golden: Tensor) -> float:
        """Returns the limit; two runs in bfloat16 may each be as far from float32 as the reference's was."""
        if _BF16 not in name:
            return self.limit
        full = self.tensors.get(name.replace(_BF16, ""))
        return _BF16_LIMIT if full is None else max(self.limit, _BF16_FACTOR * relative(golden, full))

    def compare_columns(self, prefix: str, logits: Tensor, where: Tensor | None = None) -> None:
        """Compares columns of logits with goldens named <prefix>_cols_<first>_<last>."""
        for match in self.names(rf"{re.escape(prefix)}_cols_(\d+)_(\d+)"):
            self.compare(match[0], logits[..., int(match[1]) : int(match[2])], where)

    def compare_pixels(self, prefix: str, pixel_values: Tensor) -> None:
        """Compares pixel values [B, 6, S, S] with every n-th golden pixel and the sums of the channels."""
        for match in self.names(rf"{re.escape(prefix)}\.pixel_values_every(\d+)th"):
            step = int(match[1])
            self.compare(match[0], pixel_values[..., ::step, ::step])
        self.compare(f"{prefix}.pixel_values_sum_f64", pixel_values.double().sum((-1, -2)))


def relative(here: Tensor, golden: Tensor) -> float:
    """Returns the largest difference divided by the largest finite golden; infinities must be at the same places."""
    here, golden = here.double(), golden.double()
    finite = torch.isfinite(golden)
    if not torch.equal(torch.isfinite(here), finite) or not torch.equal(here[~finite], golden[~finite]):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = golden[finite].abs().max().clamp(min=_SMALLEST_SCALE)
    return float((here[finite] - golden[finite]).abs().max() / scale)
