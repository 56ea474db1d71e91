"""The tokenizer of a published folder, through tokenizer.json and tokenizer_config.json alone."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from policies.checkpoint_folder import read_json
from rlinf_embodied.errors import CheckpointError

TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_ACTION = "copy the files of the tokenizer there"


class PromptTokenizer:
    """Texts as token ids, without padding."""

    def __init__(self, folder: Path, max_length: int | None = None, action: str = _ACTION) -> None:
        """Reads it; tokens from `max_length` on are cut off, and `action` ends the message of what is wrong.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        path, config = folder / TOKENIZER, folder / _CONFIG
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(
                f"{path}, which turns instructions into tokens, cannot be read ({error}): {action}"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if max_length is not None:
            self._tokenizer.enable_truncation(max_length)
        self._named = read_json(config, action) if config.is_file() else {}
        self._action = f"{path} has no such token: {action}"

    def ids(self, text: str) -> list[int]:
        """Returns the tokens of a text, with those that the tokenizer puts around it."""
        return self._tokenizer.encode(text).ids

    def special(self, name: str, otherwise: str) -> int:
        """Returns the id of the token that the config calls by a name such as "pad_token", or of another token."""
        token = self._named.get(name, otherwise)
        number = self._tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token)
        if number is None:
            raise CheckpointError(f"{name} is {token!r}, but {self._action}")
        return number
