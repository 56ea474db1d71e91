"""A tokenizer built in code: one token per character, for small models on generated problems."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlinf_embodied.errors import ConfigError

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
MATH_CHARACTERS = "0123456789+-*/=;#()x,:?"


def char_tokenizer(characters: str = MATH_CHARACTERS) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of `characters`: <pad> is 0, <eos> is 1, character i is i + 2; others are unknown to it.

    Raises:
        ConfigError: a character appears twice, or there is none.
    """
    if not characters or len(set(characters)) != len(characters):
        raise ConfigError(
            f"policy.characters is {characters!r}, but it lists each character once: remove what is double"
        )
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
