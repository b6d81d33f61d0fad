"""Prompt data sets: random tokens, repeated prefixes, conversations of a ShareGPT file, prompts of a JSONL file.

Owns: reading and making prompts, by the rules of vllm.benchmarks.datasets, their flags, and their tokenizer: one on
this machine, in the store or at its source, or the stand-in for a model that publishes none. Nothing but config and
tokenizer is fetched, and no code of a checkpoint runs. Must not know: where prompts are sent.
Invariant: a seed makes the same prompts again.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
import numpy as np
from msgspec import Meta, Struct

from argosy_engine.benchmarks.benchmark_command import FAILURE, BenchmarkError
from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_protocol.program.flags import Flag


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
    from argosy_engine.checkpoint.model_folder import resolve_model
    from argosy_fetcher.errors import FetchError, TransientError
    from argosy_fetcher.progress import progress_display
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


MAX_FILE_BYTES: Final = 4 << 30
_RETRIES: Final = 10
"""How often a text is cut or lengthened until it has the wanted number of tokens."""
_MIN_TOKENS: Final = 4
_MAX_PROMPT_TOKENS: Final = 1024
_MAX_TOKENS: Final = 2048
"""Conversations with fewer or more tokens are left out, as in all published ShareGPT measurements."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One prompt of a data set."""

    prompt: str | list[str] | list[int]
    """Several texts are one request for their embeddings; numbers are token ids."""
    prompt_len: int
    """In tokens, by the data set's tokenizer."""
    expected_output_len: int
    """Tokens to ask for."""
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDataset:
    """Prompts of tokens that follow each other in the vocabulary from a random start, behind a common prefix.

    Lengths are uniform within `(1 +- ratio) * length`. Tokens that the server adds count as part of the input.
    """

    input_len: int = 1024
    output_len: int = 128
    prefix_len: int = 0
    input_ratio: float = 0.0
    output_ratio: float = 0.0
    batch_size: int = 1
    """Prompts per request, for embeddings."""

    def sample(self, tokenizer: PromptTokenizer, count: int, seed: int) -> list[SampleRequest]:
        """
        Raises:
            BenchmarkError: the lengths leave no token for a prompt.
        """
        rng = np.random.default_rng(seed)
        own_len = max(0, self.input_len - tokenizer.num_special_tokens)
        low, high = _span(own_len, self.input_ratio)
        if self.prefix_len + low < 1:
            raise BenchmarkError(
                f"a prompt would have no token: --random-input-len {self.input_len} with "
                f"{tokenizer.num_special_tokens} special tokens; raise it or --random-prefix-len"
            )
        output_low, output_high = (max(1, bound) for bound in _span(self.output_len, self.output_ratio))
        input_lens = rng.integers(low, high + 1, size=count)
        output_lens = rng.integers(output_low, output_high + 1, size=count)
        starts = rng.integers(0, tokenizer.vocab_size, size=count)
        allowed = np.setdiff1d(np.arange(tokenizer.vocab_size), sorted(tokenizer.special_ids))
        exact = _ExactText(tokenizer, allowed, rng)
        prefix = exact.ids(allowed[rng.integers(0, len(allowed), size=self.prefix_len)].tolist())
        samples = []
        for index in range(count):
            inner = (int(starts[index]) + index + np.arange(int(input_lens[index]))) % len(allowed)
            prompt, ids = exact.text(prefix + allowed[inner].tolist())
            samples.append(SampleRequest(prompt, len(ids), int(output_lens[index])))
        return samples if self.batch_size == 1 else list(_batches(samples, self.batch_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRepetitionDataset:
    """Random prompts of which each prefix has several: what a prefix cache serves."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    is_shuffled: bool = True
    """Mix the prefixes, instead of sending the prompts of one after the other's."""

    def sample(self, tokenizer: PromptTokenizer, count: int, seed: int) -> list[SampleRequest]:
        """
        Raises:
            BenchmarkError: there are fewer prompts than prefixes.
        """
        per_prefix = count // self.num_prefixes
        if per_prefix == 0:
            raise BenchmarkError(
                f"--num-prompts {count} is less than --prefix-repetition-num-prefixes {self.num_prefixes}"
            )
        rng = np.random.default_rng(seed)
        allowed = np.setdiff1d(np.arange(tokenizer.vocab_size), sorted(tokenizer.special_ids))
        exact = _ExactText(tokenizer, allowed, rng)

        def ids_of(length: int) -> list[int]:
            return exact.ids(allowed[rng.integers(0, len(allowed), size=length)].tolist())

        samples = []
        for _ in range(self.num_prefixes):
            prefix = ids_of(self.prefix_len)
            for _ in range(per_prefix):
                ids = prefix + ids_of(self.suffix_len)
                samples.append(SampleRequest(tokenizer.decode(ids), len(ids), self.output_len))
        if self.is_shuffled:
            rng.shuffle(samples)
        return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGPTDataset:
    """First questions of a ShareGPT JSON file, and as many tokens as their answers have."""

    path: Path
    output_len: int | None = None
    """Instead of the answers' lengths."""
    is_shuffled: bool = True

    def sample(self, tokenizer: PromptTokenizer, count: int, seed: int) -> list[SampleRequest]:
        """
        Raises:
            BenchmarkError: the file cannot be read, or no conversation has a fitting length.
        """
        try:
            entries = msgspec.json.decode(_read(self.path), type=list[_Conversation])
        except msgspec.MsgspecError as error:
            raise BenchmarkError(
                f"{self.path} is not a ShareGPT file, a JSON list of objects with `conversations`: {error}"
            ) from None
        if self.is_shuffled:
            random.Random(seed).shuffle(entries)  # noqa: S311
        samples: list[SampleRequest] = []
        for entry in entries:
            if len(samples) == count:
                break
            if len(entry.conversations) < 2:
                continue
            question, answer = (turn.value for turn in entry.conversations[:2])
            prompt_len = len(tokenizer.encode(question)) + tokenizer.num_special_tokens
            output_len = self.output_len or len(tokenizer.encode(answer)) + tokenizer.num_special_tokens
            if _fits(prompt_len, output_len, is_answer=self.output_len is None):
                samples.append(SampleRequest(question, prompt_len, output_len))
        if not samples:
            raise BenchmarkError(
                f"{self.path} has no conversation of a question of {_MIN_TOKENS} to {_MAX_PROMPT_TOKENS} tokens "
                f"and an answer with which it has at most {_MAX_TOKENS}"
            )
        return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomDataset:
    """Prompts of a JSONL file: one object a line, with `prompt`, and `output_tokens` where no length is given."""

    path: Path
    output_len: int | None = 256
    """None: each line's `output_tokens`."""
    is_shuffled: bool = True
    uses_chat_template: bool = True
    """Render each prompt as a user's message with the model's template."""
    template_arguments: Mapping[str, Any] | None = None

    def sample(self, tokenizer: PromptTokenizer, count: int, seed: int) -> list[SampleRequest]:
        """
        Args:
            count: 0 or less takes all lines.

        Raises:
            BenchmarkError: the file cannot be read, has no prompts, or a line lacks something.
        """
        lines = list(self._lines())
        if not lines:
            raise BenchmarkError(f'{self.path} has no lines such as {{"prompt": "Hello!"}}')
        if self.is_shuffled:
            random.Random(seed).shuffle(lines)  # noqa: S311
        samples = []
        for number, line in lines[: count if count > 0 else None]:
            output_len = self.output_len or line.output_tokens
            if output_len is None or output_len < 1:
                raise BenchmarkError(
                    f"{self.path}, line {number}: needs an output_tokens of at least 1, or give --custom-output-len"
                )
            prompt = line.prompt
            if self.uses_chat_template:
                prompt = tokenizer.chat_prompt(prompt, self.template_arguments)
            samples.append(SampleRequest(prompt, len(tokenizer.encode(prompt)), output_len))
        return samples

    def _lines(self) -> Iterator[tuple[int, _CustomLine]]:
        for number, line in enumerate(_read(self.path).split(b"\n"), 1):
            if line.strip():
                try:
                    yield number, msgspec.json.decode(line, type=_CustomLine)
                except msgspec.MsgspecError as error:
                    raise BenchmarkError(f"{self.path}, line {number}: {error}") from None


Dataset = RandomDataset | PrefixRepetitionDataset | ShareGPTDataset | CustomDataset


def oversample(samples: Sequence[SampleRequest], count: int, seed: int) -> list[SampleRequest]:
    """Return `count` samples: those given, and random ones of them again where they are too few."""
    rng = random.Random(seed)  # noqa: S311
    return [*samples, *(rng.choice(samples) for _ in range(count - len(samples)))]


def with_ids(samples: Sequence[SampleRequest], prefix: str) -> list[SampleRequest]:
    """Return the samples with their places as request ids."""
    return [replace(sample, request_id=f"{prefix}{index}") for index, sample in enumerate(samples)]


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


class _CustomLine(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


class _ExactText:
    """Makes texts that a server tokenises to a wanted length: decoding and encoding may merge tokens or split them."""

    def __init__(self, tokenizer: PromptTokenizer, allowed: np.ndarray, rng: np.random.Generator) -> None:
        self._tokenizer = tokenizer
        self._allowed = allowed
        self._rng = rng

    def text(self, ids: list[int]) -> tuple[str, list[int]]:
        """Return a text and its tokens, as many as `ids` or, if no try met it, nearly as many."""
        target = len(ids)
        for left in reversed(range(_RETRIES)):
            prompt = self._tokenizer.decode(ids)
            ids = self._tokenizer.encode(prompt)
            if len(ids) == target or not left:
                break
            missing = target - len(ids)
            if missing > 0:
                ids = ids + self._allowed[self._rng.integers(0, len(self._allowed), size=missing)].tolist()
            else:
                ids = ids[:target]
        return prompt, ids

    def ids(self, ids: list[int]) -> list[int]:
        """Return as many tokens that stay the same when their text is tokenised."""
        return self.text(ids)[1] if ids else []


def _span(length: int, ratio: float) -> tuple[int, int]:
    return math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))


def _fits(prompt_len: int, output_len: int, *, is_answer: bool) -> bool:
    return (
        _MIN_TOKENS <= prompt_len <= _MAX_PROMPT_TOKENS
        and (output_len >= _MIN_TOKENS or not is_answer)
        and prompt_len + output_len <= _MAX_TOKENS
    )


def _batches(samples: list[SampleRequest], size: int) -> Iterator[SampleRequest]:
    for start in range(0, len(samples), size):
        batch = samples[start : start + size]
        texts = [sample.prompt for sample in batch if isinstance(sample.prompt, str)]
        yield SampleRequest(texts, sum(sample.prompt_len for sample in batch), 0)


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise BenchmarkError(f"{path} has {size} bytes; give a data set of at most {MAX_FILE_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise BenchmarkError(
            f"cannot read {path}: {error.strerror}; give the file by --dataset-path"
        ) from None


DatasetName = Literal["random", "prefix_repetition", "sharegpt", "custom"]
MAX_PROMPTS: Final = 10_000_000
Tokens = Annotated[int, Meta(ge=0, le=1 << 24)]
SomeTokens = Annotated[int, Meta(ge=1, le=1 << 24)]
Count = Annotated[int, Meta(ge=1, le=1 << 24)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
_IN_FILE: Final = ("sharegpt", "custom")


class DatasetArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which prompts a benchmark uses."""

    dataset_name: Annotated[
        DatasetName | None,
        Meta(
            description="prompts of random tokens, with repeated prefixes, of a ShareGPT JSON file, or of a JSONL file "
            "with prompt and perhaps output_tokens in each line"
        ),
        Flag(default="random"),
    ] = None
    dataset_path: Annotated[
        Text | None, Meta(description="file of sharegpt and custom"), Flag(metavar="FILE")
    ] = None
    num_prompts: Annotated[
        int,
        Meta(ge=0, le=MAX_PROMPTS, description="requests of the run; 0: every line of custom"),
    ] = 1000
    input_len: Annotated[
        SomeTokens | None, Meta(description="tokens of each random prompt, as --random-input-len")
    ] = None
    output_len: Annotated[
        SomeTokens | None, Meta(description="tokens to generate, instead of the data set's default")
    ] = None
    no_oversample: Annotated[
        bool, Meta(description="send fewer requests if a file has fewer prompts, instead of some again")
    ] = False
    disable_shuffle: Annotated[bool, Meta(description="keep the order of the file")] = False
    skip_chat_template: Annotated[
        bool, Meta(description="send custom prompts to a completions endpoint as they are")
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        Meta(description="variables of the chat template of custom prompts"),
        Flag(is_json=True),
    ] = None
    random_input_len: Annotated[Tokens, Meta(description="tokens of each prompt, prefix excluded")] = 1024
    random_output_len: Annotated[SomeTokens, Meta(description="tokens to generate")] = 128
    random_prefix_len: Annotated[Tokens, Meta(description="tokens that all prompts begin with")] = 0
    random_range_ratio: Annotated[
        Text,
        Meta(
            description="lengths are uniform within (1 +- RATIO) * length; a number below 1, or JSON with input and "
            "output"
        ),
    ] = "0.0"
    random_batch_size: Annotated[Count, Meta(description="prompts of each request for embeddings")] = 1
    prefix_repetition_prefix_len: Annotated[Tokens, Meta(description="tokens of each prefix")] = 256
    prefix_repetition_suffix_len: Annotated[SomeTokens, Meta(description="tokens behind the prefix")] = 256
    prefix_repetition_num_prefixes: Annotated[Count, Meta(description="number of prefixes")] = 10
    prefix_repetition_output_len: Annotated[SomeTokens, Meta(description="tokens to generate")] = 128
    sharegpt_output_len: Annotated[
        SomeTokens | None, Meta(description="tokens to generate, instead of the answers' lengths")
    ] = None
    custom_output_len: Annotated[
        int,
        Meta(ge=-1, le=1 << 24, description="tokens to generate; -1: each line's output_tokens"),
    ] = 256

    @property
    def name(self) -> DatasetName:
        return self.dataset_name or "random"

    @property
    def is_random(self) -> bool:
        """Whether answers to the prompts make no sense, so that they should not end by themselves."""
        return self.name in ("random", "prefix_repetition")

    def check(self) -> None:
        """Reject combinations that cannot work.

        Raises:
            BenchmarkError: with the remedy.
        """
        if self.name in _IN_FILE and self.dataset_path is None:
            raise BenchmarkError(f"--dataset-name {self.name} needs --dataset-path FILE")
        if self.name not in _IN_FILE and self.dataset_path is not None:
            raise BenchmarkError(
                f"--dataset-path is of no use to --dataset-name {self.name}; give --dataset-name sharegpt or custom"
            )
        if self.num_prompts == 0 and self.name != "custom":
            raise BenchmarkError(
                "--num-prompts 0 takes all lines of --dataset-name custom; give a number of prompts"
            )
        _ratios(self.random_range_ratio)

    def dataset(self, *, is_chat: bool = False) -> Dataset:
        """Return the data set that the flags describe.

        Args:
            is_chat: the prompts become messages, which the server puts into the chat template.
        """
        path = Path(self.dataset_path or "")
        if self.name == "prefix_repetition":
            return PrefixRepetitionDataset(
                prefix_len=self.prefix_repetition_prefix_len,
                suffix_len=self.prefix_repetition_suffix_len,
                num_prefixes=self.prefix_repetition_num_prefixes,
                output_len=self.output_len or self.prefix_repetition_output_len,
                is_shuffled=not self.disable_shuffle,
            )
        if self.name == "sharegpt":
            return ShareGPTDataset(
                path=path,
                output_len=self.output_len or self.sharegpt_output_len,
                is_shuffled=not self.disable_shuffle,
            )
        if self.name == "custom":
            return CustomDataset(
                path=path,
                output_len=self.output_len
                or (self.custom_output_len if self.custom_output_len > 0 else None),
                is_shuffled=not self.disable_shuffle,
                uses_chat_template=not (is_chat or self.skip_chat_template),
                template_arguments=self.chat_template_kwargs,
            )
        input_ratio, output_ratio = _ratios(self.random_range_ratio)
        return RandomDataset(
            input_len=self.random_input_len if self.input_len is None else self.input_len,
            output_len=self.output_len or self.random_output_len,
            prefix_len=self.random_prefix_len,
            input_ratio=input_ratio,
            output_ratio=output_ratio,
            batch_size=self.random_batch_size,
        )

    def samples(self, tokenizer: PromptTokenizer, seed: int, *, is_chat: bool = False) -> list[SampleRequest]:
        """Make the prompts.

        Args:
            seed: the same one makes the same prompts.
            is_chat: as in `dataset`.

        Raises:
            BenchmarkError: the file or the lengths cannot be used.
        """
        samples = self.dataset(is_chat=is_chat).sample(tokenizer, self.num_prompts, seed)
        if self.no_oversample or self.name not in _IN_FILE:
            return samples
        return oversample(samples, self.num_prompts, seed)


def _ratios(text: str) -> tuple[float, float]:
    """Parse --random-range-ratio to the ratios of input and output.

    Raises:
        BenchmarkError: it is neither a number nor JSON, or out of bounds.
    """
    try:
        value = json.loads(text)
        input_ratio, output_ratio = (
            (float(value["input"]), float(value["output"]))
            if isinstance(value, dict)
            else (float(value),) * 2
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BenchmarkError(
            f'--random-range-ratio {text[:64]!r} is neither a number nor {{"input": 0.3, "output": 0.5}}'
        ) from None
    if not (0.0 <= input_ratio < 1.0 and 0.0 <= output_ratio < 1.0):
        raise BenchmarkError(f"--random-range-ratio {text} must be at least 0 and below 1")
    return input_ratio, output_ratio
