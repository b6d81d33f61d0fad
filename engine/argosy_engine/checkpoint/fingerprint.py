"""Model fingerprint. Replicas with equal fingerprints may continue each other's streams.

It covers everything that turns a request and the tokens so far into the next token and its text: weights, architecture,
dtype, tokenizer, chat template, default sampling parameters, logits processors and the files that they are in, and the
flags and the plugin that say how output is parsed (`core.resolve_config`). This module does not import torch.

The weights are sampled rather than read in full: windows of `SAMPLE_BYTES` bytes, evenly spread over every tensor
(`sample_offsets`). What this detects:

- a changed byte inside a window, always, and so any changed run longer than the gap between two windows. A tensor no
  larger than its samples is read completely;
- a finetune, practically always, because it changes values throughout the tensors it touches;
- added vocabulary, because it changes tensor shapes and the tokenizer;
- a single changed byte between two windows, never.

The digest covers tensors rather than files, so a plain download, a snapshot of symlinks in the Hugging Face cache, and
the same weights split into other shards have the same fingerprint. A digest published with the checkpoint (LFS, OCI)
would cover every byte, but local copies carry none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from argosy_engine.checkpoint.shards import StoredShard, read_shards
from argosy_engine.errors import ConfigError

SAMPLE_BYTES = 4096
"""One page: reading less costs the disk as much."""
MAX_SAMPLES = 4096
"""16 MiB in total, or one sample per tensor if there are more tensors (70 MiB for 18,000 expert tensors). That takes
tenths of a second from a cold disk, and loading the model has usually put most of it into the page cache."""
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    "generation_config.json",
)
"""Files next to the weights that determine prompts, text and default parameters; hashed in full."""
OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
"""Files that determine what becomes of images, of models that see; hashed likewise."""


def fingerprint(path: Path, settings: Sequence[str], *, has_weights: bool) -> str:
    """Return the fingerprint of the checkpoint in directory `path`, 32 hexadecimal digits.

    Args:
        settings: everything else that affects the tokens: architecture, dtype, flags.
        has_weights: False if the weights are random; their seed must then be among the settings.

    Raises:
        ConfigError: there is no checkpoint, or it is malformed.
    """
    digest = hashlib.sha256()
    for setting in settings:
        _add(digest, setting.encode())
    for name in COMPANIONS:
        file = path / name
        _add(digest, file.read_bytes() if file.is_file() else b"")
    for file in (path / name for name in OF_IMAGES):
        if file.is_file():
            _add(digest, file.read_bytes())
    if has_weights:
        _add(digest, weights_digest(path))
    return digest.hexdigest()[:32]


def weights_digest(path: Path, max_samples: int = MAX_SAMPLES) -> bytes:
    """Return the SHA-256 of names, dtypes, shapes and samples of all tensors of the checkpoint in directory `path`.

    Raises:
        ConfigError: there is no checkpoint, or it is malformed.
    """
    shards = read_shards(path)
    num_samples = max(max_samples // max(sum(len(shard.tensors) for shard in shards), 1), 1)
    digests: dict[str, bytes] = {}
    for shard in shards:
        try:
            digests |= _sample(shard, num_samples)
        except OSError as error:
            raise ConfigError(f"cannot read {shard.file}: {error}") from None
    whole = hashlib.sha256()
    for name, digest in sorted(digests.items()):
        _add(whole, name.encode())
        _add(whole, digest)
    return whole.digest()


def _sample(shard: StoredShard, num_samples: int) -> dict[str, bytes]:
    """Return the digest of each tensor of one file."""
    places: dict[str, list[tuple[int, int]]] = {}
    for name, tensor in shard.tensors.items():
        begin, end = (shard.data_start + offset for offset in tensor.data_offsets)
        places[name] = [
            (begin + offset, min(SAMPLE_BYTES, end - begin - offset))
            for offset in sample_offsets(end - begin, num_samples)
        ]
    with shard.file.open("rb") as handle:
        if hasattr(os, "posix_fadvise"):  # lets the kernel read the windows in parallel
            for each in places.values():
                for offset, length in each:
                    os.posix_fadvise(handle.fileno(), offset, length, os.POSIX_FADV_WILLNEED)
        digests = {}
        for name, each in places.items():
            tensor = shard.tensors[name]
            digest = hashlib.sha256(f"{tensor.dtype} {tensor.shape} ".encode())
            for offset, length in each:
                digest.update(os.pread(handle.fileno(), length, offset))
            digests[name] = digest.digest()
    return digests


def sample_offsets(size: int, num_samples: int) -> list[int]:
    """Return the start offsets of the samples of a tensor of `size` bytes.

    The samples are evenly spaced from the tensor's first byte to its last. They are contiguous if together they cover
    the tensor, and a single sample is taken from the middle.
    """
    if size <= num_samples * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    last = size - SAMPLE_BYTES
    if num_samples == 1:
        return [last // 2]
    return [last * index // (num_samples - 1) for index in range(num_samples)]


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Add a part to the digest, prefixed with its length so that different sequences of parts never collide."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
