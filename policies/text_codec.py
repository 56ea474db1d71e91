"""Conversion between text and tokens with a language model's tokenizer and chat template, without its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from policies.language_folder import read_context, read_tokenizer, weight_files
from rlinf_embodied.config import LanguagePolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import ChatMessage

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
MATH_CHARACTERS = "0123456789+-*/=;#()x,:?"


def char_tokenizer(characters: str = MATH_CHARACTERS) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of `characters`: <pad> is 0, <eos> is 1, character i is i + 2; others are unknown.

    Raises:
        ConfigError: a character appears twice, or there is none.
    """
    unique = bool(characters) and len(set(characters)) == len(characters)
    require(unique, "policy.characters", characters, "it lists each character once", "remove what is double")
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


class TextCodec:
    """A tokenizer with the system prompt and the arguments of its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context_length: int | None,
        system_prompt: str | None = None,
        template_args: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Takes the system prompt (None: none) and the arguments of the chat template.

        Raises:
            ConfigError: the tokenizer has no chat template, or its template does not use an argument.
        """
        self.tokenizer, self.context_length = tokenizer, context_length
        template = tokenizer.chat_template
        for path, value in (("policy.system_prompt", system_prompt), ("policy.chat_template_args", template_args)):
            rule = "the tokenizer has no chat template, which it needs"
            require(not value or template is not None, path, value, rule, "leave it out, or use a chat model's folder")
        unknown = [name for name in template_args if name not in str(template)]
        rule = f"the model's chat template does not read {', '.join(unknown)}"
        require(not unknown, "policy.chat_template_args", dict(template_args), rule, "use names that it reads")
        # first messages of a chat
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._template_args: dict[str, Any] = dict(template_args)

    @classmethod
    def from_config(cls, config: LanguagePolicyConfig, folder: Path | None) -> TextCodec:
        """Returns the codec of a model folder, or of the untrained model.

        Raises:
            CheckpointError: the folder has no usable config or tokenizer.
            ConfigError: the chat template is missing, or does not use an argument.
        """
        chat = config.system_prompt, config.chat_template_args
        if folder is None:
            return cls(char_tokenizer(config.characters), config.context_length, *chat)
        weight_files(folder)
        return cls(read_tokenizer(folder), read_context(folder), *chat)

    def chat(self, text: str, history: Sequence[tuple[str, str]] = ()) -> list[ChatMessage]:
        """Returns the messages of a prompt.

        Args:
            text: the user's message.
            history: (role, text) of earlier messages; a system message among them replaces policy.system_prompt.

        Raises:
            ConfigError: there is a history but no chat template.
        """
        rule = "questions come after other messages, which the tokenizer has no chat template to write"
        action = "use a chat model's folder, or another data.question_column"
        require(not history or self.tokenizer.chat_template is not None, "data.files", list(history), rule, action)
        previous = [{"role": role, "content": content} for role, content in history]
        system = [] if any(message["role"] == "system" for message in previous) else self._system
        return [*system, *previous, {"role": "user", "content": text}]

    def encode_chat(self, chat: Sequence[ChatMessage]) -> list[int]:
        """Returns the tokens of messages up to the model's reply; without a template, of their concatenated texts.

        Raises:
            ConfigError: there are no tokens, an unknown character, or the chat template rejects the messages.
        """
        text = self._written(chat)
        tokens = self._tokens(text, add_special_tokens=self.tokenizer.chat_template is None)
        if not tokens:
            raise ConfigError(f"the prompt {text!r} has no tokens: a prompt has at least one; correct the data")
        return tokens

    def encode_next_turn(self, tokens: Sequence[int], chat: Sequence[ChatMessage]) -> list[int] | None:
        """Returns the tokens of a longer chat after `tokens` (prompt and the model's turns), up to its next reply.

        Returns None if the text of the longer chat does not begin with the text of `tokens`.
        """
        previous = str(self.tokenizer.decode(list(tokens), skip_special_tokens=self.tokenizer.chat_template is None))
        text = self._written(chat)
        addition = text[len(previous) :]
        return self._tokens(addition, add_special_tokens=False) if text.startswith(previous) and addition else None

    def _written(self, chat: Sequence[ChatMessage]) -> str:
        if self.tokenizer.chat_template is None:
            return "".join(message["content"] for message in chat)
        apply = self.tokenizer.apply_chat_template
        try:
            return str(apply(list(chat), tokenize=False, add_generation_prompt=True, **self._template_args))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in chat)
            refused = "policy.system_prompt with a user's message" if self._system else f"messages of {roles}"
            raise ConfigError(
                f"the tokenizer's chat template refuses {refused} ({error}): change chat_template in "
                "the model folder (policy.folder), or use another model"
            ) from error

    def encode_answer(self, text: str) -> list[int]:
        """Returns the tokens of an answer without an end token; raises as `encode_chat`."""
        return self._tokens(text, add_special_tokens=False)

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except Exception as error:  # the tokenizers library raises plain Exceptions
            raise ConfigError(
                f"the tokenizer cannot read {text[:200]!r} ({error}): use its characters only, or a model whose "
                "tokenizer knows them all (for the model from scratch: policy.characters)"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
