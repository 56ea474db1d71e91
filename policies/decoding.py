"""Decoding by transformers' forward pass, for any architecture whose layers cache keys and values.

Rows that decode together write to the same column of a ring of W columns, whatever their positions are:

    column      0   1   2   3   4   5        W = 6, the next column to write is 2 (the sixth step wrapped around)
    slot 0      c   c   .   p   p   c        p prompt, c completion, . masked: not of this row
    slot 1      p   c   .   .   .   p        a row that joined later; its prompt was copied in front of its column

A row occupies at most W columns, so the ring never overwrites a column that an active row needs.  One column per step
is a plain slice; positions (for rotary embeddings) are stored per row.  The ring grows by a few columns at a time up to
W, so that attention reads contiguous memory: on CPUs this is 2-5 times as fast as reading a part of each row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

Logits = Callable[[Tensor], Tensor]  # masks logits of tokens that are never predicted
_GROWTH = 8  # columns: more waste reads, fewer cause more copies


def has_plain_cache(model: PreTrainedModel, width: int) -> bool:
    """Returns whether every layer caches one key and value per token and keeps them for `width` tokens."""
    parameters = inspect.signature(type(model).forward).parameters
    if not {"position_ids", "past_key_values", "attention_mask"} <= set(parameters):
        return False
    text = model.config.get_text_config()
    layers = DynamicCache(config=model.config).layers
    return len(layers) == text.num_hidden_layers and all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > width)
        for layer in layers
    )


@dataclass(frozen=True, slots=True)
class _Prompts:
    """N prefilled prompts, padded on the left to P columns, with the keys and values of every layer."""

    lengths: Tensor  # int64 [N]
    keys: list[Tensor]  # per layer [N, heads, P, head size]
    values: list[Tensor]


class RingDecoder:
    """Keys and values of S slots in a ring of W columns, with each slot's mask and next position.

    The model's forward pass reads prompts; subclasses compute the steps.
    """

    def __init__(self, model: PreTrainedModel, max_num_seqs: int, width: int, masked: Logits) -> None:
        """Memory is allocated when the first prompt joins, which has the shapes."""
        self._model, self._masked = model, masked
        self.max_num_seqs, self.width = max_num_seqs, width
        device = next(model.parameters()).device
        self.keys: list[Tensor] = []  # per layer [S, heads, current columns, head size]
        self.values: list[Tensor] = []
        self.positions = torch.zeros(max_num_seqs, dtype=torch.long, device=device)
        self.hidden = torch.zeros(max_num_seqs, 0)  # added to scores: 0 in columns of the slot's row, else very low
        self.next = 0  # columns written since the start
        self._spare = torch.zeros(0)  # memory of one table: each table grows into what the previous one freed
        self._size = 0  # elements in each table's memory

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Reads N prompts by one forward pass; returns the next tokens' logits [N, V]."""
        model = self._model
        device = next(model.parameters()).device
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.arange(longest) >= longest - lengths[:, None]
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache()
        logits = model(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=cache,
            use_cache=True,
            **({"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}),
        ).logits[:, -1]
        layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        self._prompts = _Prompts(lengths.to(device), keys, values)  # pyright: ignore[reportArgumentType]
        return self._masked(logits)

    @torch.inference_mode()
    def join(self, prompts: Tensor, slots: Tensor) -> None:
        """Copies prompts into slots, before the next column to write."""
        prefix = self._prompts
        length = prefix.keys[0].shape[2]
        if not self.keys:
            self._allocate(prefix)
        if length > self.next and self.length < self.width:  # longer than all so far: it wraps around to the end
            self._lengthen(self.width, self.max_num_seqs)
        columns = torch.arange(self.next - length, self.next, device=slots.device) % self.width
        for ring, read in zip([*self.keys, *self.values], [*prefix.keys, *prefix.values], strict=True):
            ring[slots] = 0.0  # NaN or infinity would survive the mask
            ring[slots[:, None], :, columns] = read[prompts].transpose(1, 2)
        lowest = torch.finfo(self.hidden.dtype).min
        lengths = prefix.lengths[prompts]
        self.hidden[slots] = lowest
        padding = torch.arange(length, device=slots.device) < length - lengths[:, None]
        self.hidden[slots[:, None], columns] = padding.to(self.hidden.dtype) * lowest
        self.positions[slots] = lengths

    def _allocate(self, prefix: _Prompts) -> None:
        self.next = prefix.keys[0].shape[2]
        tables = [*prefix.keys, *prefix.values]
        self._size = max(self.max_num_seqs * read.shape[1] * self.width * read.shape[3] for read in tables)
        # all of one size, since tables swap memory; not filled, since most of it is never used
        memory = [read.new_empty(self._size) for read in tables]
        self._spare = memory[0].new_empty(self._size)
        length = min(self.next + _GROWTH, self.width)
        views = [_table(flat, self.max_num_seqs, read, length) for flat, read in zip(memory, tables, strict=True)]
        self.keys, self.values = views[: len(prefix.keys)], views[len(prefix.keys) :]
        self.hidden = memory[0].new_full((self.max_num_seqs, length), torch.finfo(memory[0].dtype).min)

    def _lengthen(self, length: int, num_rows: int) -> None:
        """Appends columns and keeps the content of the first rows; that of other slots is lost."""
        extra = length - self.length
        for tables in (self.keys, self.values):
            for layer, old in enumerate(tables):
                tables[layer] = _table(self._spare, self.max_num_seqs, old, length)
                tables[layer][:num_rows, :, : self.length] = old[:num_rows]
                tables[layer][:num_rows, :, self.length :] = 0.0
                self._spare = old.as_strided((self._size,), (1,))  # the whole memory of the old table
        masked = self.hidden.new_full((self.max_num_seqs, extra), torch.finfo(self.hidden.dtype).min)
        self.hidden = torch.cat([self.hidden, masked], dim=1)

    @torch.inference_mode()
    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies slots `sources` to slots `targets`."""
        for ring in (*self.keys, *self.values, self.hidden, self.positions):
            ring.index_copy_(0, targets, ring.index_select(0, sources))

    @property
    def length(self) -> int:
        """Number of allocated columns; unwritten ones are masked."""
        return self.hidden.shape[1]

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Appends one token to each of slots 0..n-1 and returns the next one's logits [n, V]."""
        n, column = len(tokens), self.next % self.width
        if self.length <= self.next < self.width:
            self._lengthen(min(self.length + _GROWTH, self.width), n)
        self.hidden[:n, column] = 0.0
        self.next += 1
        logits = self._logits(tokens, column)
        self.positions[:n] += 1
        return self._masked(logits)

    def _logits(self, tokens: Tensor, column: int) -> Tensor:
        """Writes keys and values of tokens [n] to a column, which is visible, and returns the next ones' logits."""
        raise NotImplementedError


def _table(memory: Tensor, max_num_seqs: int, like: Tensor, length: int) -> Tensor:
    """Returns the first part of flat memory as [S, heads, length, head size], with heads and size of `like`."""
    shape = max_num_seqs, like.shape[1], length, like.shape[3]
    return memory[: math.prod(shape)].view(shape)


class _RingLayer(CacheLayerMixin):
    """A layer's rows in one step, with the cache interface of transformers' attention modules."""

    def __init__(self, keys: Tensor, values: Tensor, column: int) -> None:
        """Takes the tables [n, heads, columns, head size], of which this step writes a column."""
        super().__init__()
        self._keys, self._values, self._column = keys, values, column
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the ring allocates the memory."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one column, [n, heads, 1, head size] each, and returns all columns, including masked ones."""
        self._keys[:, :, self._column] = key_states[:, :, 0]
        self._values[:, :, self._column] = value_states[:, :, 0]
        return self._keys, self._values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns (columns, offset), for models that build their own mask."""
        return self._keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Returns the number of columns before this step's."""
        return self._keys.shape[2] - 1

    def get_max_length(self) -> int:
        return self._keys.shape[2]


class CachedDecoder(RingDecoder):
    """Rows in a ring, stepped by the model's own forward pass."""

    def _logits(self, tokens: Tensor, column: int) -> Tensor:
        n, tables = len(tokens), zip(self.keys, self.values, strict=True)
        return self._model(
            input_ids=tokens[:, None],
            attention_mask=self.hidden[:n, None, None],
            position_ids=self.positions[:n, None],
            past_key_values=Cache(layers=[_RingLayer(keys[:n], values[:n], column) for keys, values in tables]),
            use_cache=True,
        ).logits[:, -1]
