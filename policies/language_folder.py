"""Reads language models from local Hugging Face folders; errors name the missing files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from policies.checkpoint_folder import CONFIG, WEIGHTS
from rlinf_embodied.errors import CheckpointError

INDEX = f"{WEIGHTS}.index.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_log = logging.getLogger(__name__)


def read_model(
    folder: Path, dtype: torch.dtype, kind: Any = AutoModelForCausalLM, name: str = "causal language model"
) -> PreTrainedModel:
    """Returns the model of a folder, in eval mode on the CPU; `kind` is the transformers class that loads it.

    Raises:
        CheckpointError: files (shards by name) are missing or damaged, or lack parameters of the model.
    """
    weight_files(folder)
    transformers_logging.disable_progress_bar()
    try:
        loaded = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
        model, info = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no {name} that transformers can load ({error}): give another folder"
        ) from error
    if missing := sorted(info["missing_keys"]):
        # transformers only warns, and initialises them at random
        raise CheckpointError(
            f"the weights in {folder} lack {len(missing)} parameters of the model, first {missing[:3]}: "
            "the folder is incomplete or of another architecture; copy it again"
        )
    return model.eval()


def read_context(folder: Path) -> int | None:
    """Returns the context length in tokens, of a prompt with its completion; None: no limit.

    Raises:
        CheckpointError: there is no config that transformers can load.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} has no {CONFIG} that transformers can load ({error})") from error
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder: one, or all shards of the index.

    Raises:
        CheckpointError: the config or a weight file is missing; names the missing files.
    """
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}: give a folder that save_pretrained wrote")
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}: copy the weights there, too")
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}): copy the folder again") from error
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(shards)} weight files that {INDEX} lists: {', '.join(missing)}; "
            "copy them there, too"
        )
    return [folder / name for name in shards]


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a folder.

    Raises:
        CheckpointError: there is none, or transformers cannot load it.
    """
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        # transformers would create an empty tokenizer for the model's type
        raise CheckpointError(f"{folder} holds no tokenizer (none of {', '.join(_VOCABULARIES)}): copy it there, too")
    # the class chosen by model type adds special tokens; tokenizer.json is complete without it
    kind = PreTrainedTokenizerFast if (folder / _VOCABULARIES[0]).is_file() else AutoTokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} holds no tokenizer that transformers can load ({error}): copy its files again"
        ) from error


def special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, tuple[int, ...]]:
    """Returns (padding token, tokens that end a sequence); without a padding token, the first of the latter pads.

    Raises:
        CheckpointError: no token ends a sequence, or one of these tokens exceeds the model's vocabulary.
    """
    config, where = model.generation_config, tokenizer.name_or_path or "the model"
    configured = None if config is None else config.eos_token_id
    candidates = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    eos_ids = tuple(dict.fromkeys(cast(int, token) for token in candidates if token is not None))
    num_tokens = model.config.get_text_config().vocab_size
    if beyond := [token for token in (*eos_ids, tokenizer.pad_token_id or 0) if token >= num_tokens]:
        raise CheckpointError(
            f"the tokenizer of {where} pads or ends sequences with tokens {beyond}, but the model has {num_tokens}: "
            "the tokenizer belongs to another model; copy this model's tokenizer"
        )
    if not eos_ids:
        raise CheckpointError(
            f"the tokenizer of {where} has neither eos_token nor eos_token_id in generation_config.json, so nothing "
            "ends a completion: set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is not None:
        return cast(int, tokenizer.pad_token_id), eos_ids
    _log.warning(
        "the tokenizer of %s has no pad token: eos token %d pads, and stays a token to predict", where, eos_ids[0]
    )
    return eos_ids[0], eos_ids
