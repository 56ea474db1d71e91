"""Word tokenizer that needs no download: a small fixed vocabulary, and hash buckets for other words."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

PAD = 0
NUM_BUCKETS = 64  # shared by all unknown words, so that two unknown instructions still differ
_VOCABULARY = """
    pick up lift grasp take put place push pull move slide turn roll poke stack insert press open close reach bring
    pour hang rotate the a an to of on in into onto from with at and then it its robot gripper arm hand tool object
    cube block box ball sphere peg hole plate bowl cup can carrot spoon towel drawer door button handle charger goal
    target region table bin basket point marker red green blue yellow white black orange purple left right front back
    side top bottom middle upright near far small large
"""
WORDS = tuple(_VOCABULARY.split())


def words_of(text: str) -> list[str]:
    """Returns the words of an instruction, in lower case and without punctuation."""
    return re.findall(r"[a-z0-9]+", text.lower())


class WordTokenizer:
    """Gives each word of an instruction a number; upper case and punctuation do not matter.

    Numbers: 0 is padding, 1 .. len(WORDS) are known words, the last NUM_BUCKETS ones are hashes of unknown words.
    """

    def __init__(self, length: int) -> None:
        """Takes the number of tokens that every instruction is padded or cut to."""
        self.length = length
        self.size = 1 + len(WORDS) + NUM_BUCKETS
        self._numbers = {word: number for number, word in enumerate(WORDS, start=1)}

    def __call__(self, instructions: Sequence[str]) -> Tensor:
        """Returns int64 [B, length]; words beyond `length` share the last place, so that they still count.

        The last token is then a hash of the rest, so that long instructions with the same beginning differ.
        """
        known: dict[str, list[int]] = {}
        for text in instructions:
            if text not in known:
                known[text] = self._encode(text)
        return torch.tensor([known[text] for text in instructions], dtype=torch.long).reshape(-1, self.length)

    def _encode(self, text: str) -> list[int]:
        words = words_of(text)
        if len(words) > self.length:
            words = [*words[: self.length - 1], " ".join(words[self.length - 1 :])]
        numbers = [self._numbers.get(word) or self._bucket(word) for word in words]
        return numbers + [PAD] * (self.length - len(numbers))

    def _bucket(self, word: str) -> int:
        # crc32, since hash() differs between processes
        return 1 + len(WORDS) + zlib.crc32(word.encode()) % NUM_BUCKETS
