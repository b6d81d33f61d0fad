"""DatasetArgs: the flags that choose prompts, with vLLM's names, shared by `argosy bench serve` and `throughput`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from argosy_engine.benchmarks.benchmark_error import BenchmarkError
from argosy_engine.benchmarks.prompt_datasets import (
    CustomDataset,
    Dataset,
    PrefixRepetitionDataset,
    RandomDataset,
    SampleRequest,
    ShareGPTDataset,
    oversample,
)
from argosy_engine.benchmarks.prompt_tokenizer import PromptTokenizer
from argosy_protocol.program.flags import Flag

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
