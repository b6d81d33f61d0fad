"""Prompt tokenizers: how many tokens a text has, and texts of so many tokens.

Owns: finding a tokenizer on this machine, in the store or at its source, and the stand-in for a model that publishes
none. Must not know: data sets. Nothing but config and tokenizer is fetched, and no code of a checkpoint runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from argosy_engine.benchmarks.benchmark_error import FAILURE, BenchmarkError
from argosy_engine.errors import ConfigError, InvalidRequest


class PromptTokenizer(Protocol):
    """What data sets need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without those that were added to the vocabulary."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that a random prompt must not have."""

    @property
    def num_special_tokens(self) -> int:
        """Number of tokens that the server adds to a prompt."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    def chat_prompt(self, content: str, arguments: Mapping[str, Any] | None = None) -> str:
        """Render a user's message with the model's chat template, or return it as it is if the model has none.

        Args:
            arguments: variables of the template.

        Raises:
            BenchmarkError: the template cannot take it.
        """


class WordTokenizer:
    """Stands in for a tokenizer that is not to be had: one token per word, of words that most vocabularies have whole.

    The lengths of its prompts are about right, and the server's usage tells the exact ones.
    """

    num_special_tokens = 0
    special_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._ids = {word: number for number, word in enumerate(_WORDS)}

    @property
    def vocab_size(self) -> int:
        return len(_WORDS)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(word, 0) for word in re.findall(r"\w+|[^\w\s]", text)]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(_WORDS[token_id] for token_id in ids)

    def chat_prompt(self, content: str, arguments: Mapping[str, Any] | None = None) -> str:
        return content


class FolderTokenizer:
    """The tokenizer of a model's folder.

    Raises (from the constructor):
        ConfigError: the folder has no readable tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        from argosy_engine.checkpoint.tokenizer_files import prepare_tokenizer
        from argosy_engine.frontend.renderer import open_tokenizer

        self._folder = folder
        self._tokenizer = open_tokenizer(prepare_tokenizer(folder))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.backend.get_vocab_size(with_added_tokens=False)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._tokenizer.special_ids

    @property
    def num_special_tokens(self) -> int:
        return sum(self._tokenizer.num_added)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def chat_prompt(self, content: str, arguments: Mapping[str, Any] | None = None) -> str:
        from argosy_engine.frontend.chat_template import ChatTemplate
        from argosy_protocol.openai import ChatCompletionRequest, ChatMessage

        try:
            template = ChatTemplate.load(self._folder)
            if template is None:
                return content
            message = ChatMessage(role="user", content=content)
            return template.render(
                ChatCompletionRequest(messages=[message], chat_template_kwargs=dict(arguments or {}) or None)
            )
        except (ConfigError, InvalidRequest) as error:
            raise BenchmarkError(
                f"the chat template of {self._folder}: {error}; --skip-chat-template sends prompts as they are"
            ) from None


def load_tokenizer(name: str) -> PromptTokenizer:
    """Load a tokenizer by the model's name: a directory, `builtin://tiny`, `ORG/NAME` of a hub, or another source.

    Raises:
        BenchmarkError: there is none, or its source does not answer.
    """
    try:
        return FolderTokenizer(_folder(name))
    except ConfigError as error:
        raise BenchmarkError(
            f"no tokenizer for {name!r} ({error}): it must be a directory or ORG/NAME that has one"
        ) from None


def _folder(name: str) -> Path:
    """Return a directory with the model's tokenizer, fetched if it is not on this machine.

    Raises:
        ConfigError: there is no such model.
        BenchmarkError: its source does not answer.
    """
    from argosy_engine.checkpoint.model_path import resolve_model
    from argosy_fetcher.errors import FetchError, TransientError
    from argosy_fetcher.progress_display import progress_display
    from argosy_fetcher.source_uri import from_argument

    try:
        uri = from_argument(name)
        if not uri.is_remote:
            folder = Path(name.removeprefix("file://")).expanduser()
            # A tokenizer's folder need not have a config.json.
            return folder if folder.is_dir() else resolve_model(name)
        from argosy_fetcher.pull import pull_model

        with progress_display() as progress:
            return pull_model(uri, progress=progress, has_weights=False).path
    except TransientError as error:
        raise BenchmarkError(f"the tokenizer of {name!r} cannot be fetched now: {error}", FAILURE) from None
    except FetchError as error:
        raise ConfigError(str(error)) from None


_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were her all she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go came right used take
three house use school water home small part place night head city public away food far white room book country
light story line land hand high power group name money side door word paper
""".split()  # noqa: SIM905 - a list would be a line per word
