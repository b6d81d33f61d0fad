"""LLMTokenizer: what `LLM.get_tokenizer` returns, the model's tokenizer and chat template by transformers' names.

It has those methods of transformers' tokenizers that callers of vLLM use. It must not be used by the engine itself,
whose `Tokenizer` and `Renderer` it calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.renderer import Renderer
from argosy_protocol.openai import ChatCompletionRequest


class Encoding(dict[str, Any]):
    """What a call of the tokenizer returns, with items that are attributes as well: `input_ids` and `attention_mask`,
    lists of integers for one text, and lists of these for several."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """Ones: nothing is padded."""
        return self["attention_mask"]


class LLMTokenizer:
    """The model's tokenizer. Methods have the names, defaults and results of transformers' tokenizers."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tokenizer = renderer.tokenizer

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The first token that ends an output, or None if the model has none."""
        return next(iter(self._renderer.config.eos_token_ids), None)

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """Tokenise a text or several, without padding and truncation.

        Raises:
            InvalidRequest: as `encode`.
        """
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        batch = [self.encode(each, add_special_tokens) for each in text]
        return Encoding(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a text.

        Raises:
            InvalidRequest: it is not valid Unicode, or longer than any prompt of the model.
        """
        return self._renderer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequest: an id is beyond the vocabulary.
        """
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        self._renderer.check_token_ids(ids, "token_ids")
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[int | Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each sequence of token ids.

        Raises:
            InvalidRequest: as `decode`.
        """
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Return the tokens, as spelled in the vocabulary, with their ids."""
        return self._tokenizer.backend.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token as spelled in the vocabulary; None if there is none."""
        return self._tokenizer.backend.token_to_id(token)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as spelled in the vocabulary; empty for an id without a token."""
        return self._tokenizer.token_strs(token_ids)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **chat_template_kwargs: Any,
    ) -> list[int] | str:
        """Return the prompt of a conversation, as token ids, or as text without `tokenize`.

        Ids are those that `LLM.chat` would use: control tokens that a message spells are text in it. Tokenising the
        text would make them control tokens again.

        Args:
            add_generation_prompt: end with the beginning of an assistant's message. Off here, on in `LLM.chat`.
            continue_final_message: end with the last message's content.
            **chat_template_kwargs: variables of the model's chat template.

        Raises:
            InvalidRequest: malformed messages, the template cannot take them, or the model has none.
        """
        fields = {
            "messages": conversation,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs or None,
        }
        try:
            request = msgspec.convert(fields, ChatCompletionRequest)
        except msgspec.ValidationError as error:
            raise InvalidRequest(str(error), param="messages") from None
        return self._renderer.chat_tokens(request) if tokenize else self._renderer.chat_text(request)
