"""Prompt data sets: random tokens, repeated prefixes, conversations of a ShareGPT file, prompts of a JSONL file.

Owns: reading and making prompts, by the rules of vllm.benchmarks.datasets. Must not know: where they are sent.
Invariant: a seed makes the same prompts again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from argosy_engine.benchmarks.benchmark_error import BenchmarkError
from argosy_engine.benchmarks.prompt_tokenizer import PromptTokenizer

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
