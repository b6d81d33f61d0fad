"""Fingerprint of a model: equal where one replica may continue a stream that another one began.

A resumed stream depends on all that turns a request and the tokens so far into the next token and its text: weights,
architecture, dtype, tokenizer, chat template, default sampling parameters, logits processors. No torch.

Weights are sampled, not read: windows of `SAMPLE_BYTES`, evenly spread over every tensor. What that promises:

- a change of any run of `stride` bytes of a tensor is always seen (`sample_offsets`; a tensor that fits into its
  samples is read whole), and a finetune, which changes values all over the tensors it touches, practically always;
- one changed byte between two windows is not seen. Vocabulary that was added shows in shapes and tokenizer.

The digest names tensors, not files: a download, a snapshot of symlinks in the hub's cache and the same weights cut into
other shards agree. A digest that a source publishes (LFS, OCI) would see every byte, but a local copy has none to show.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from argosy_engine.errors import ConfigError
from argosy_engine.models.checkpoint import checkpoint_shards
from argosy_engine.models.headers import StoredTensor, read_header

SAMPLE_BYTES = 4096
"""A page: reading less costs a disk the same."""
MAX_SAMPLES = 4096
"""16 MiB in all, or one sample of each tensor where there are more tensors (70 MiB for 18,000 tensors of experts):
tenths of a second from a cold disk. The load that comes before has most of it in the page cache."""
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""Files beside the weights that decide about prompts, text and default parameters; hashed whole."""


def fingerprint(path: Path, settings: Sequence[str], *, has_weights: bool) -> str:
    """32 hexadecimal digits for the checkpoint in directory `path`.

    Args:
        settings: what else decides about tokens: architecture, dtype, flags.
        has_weights: False where weights are drawn at random; then their seed belongs to the settings.

    Raises:
        ConfigError: there is no checkpoint, or it is malformed.
    """
    digest = hashlib.sha256()
    for setting in settings:
        _add(digest, setting.encode())
    for name in COMPANIONS:
        file = path / name
        _add(digest, file.read_bytes() if file.is_file() else b"")
    if has_weights:
        _add(digest, weights_digest(path))
    return digest.hexdigest()[:32]


def weights_digest(path: Path, max_samples: int = MAX_SAMPLES) -> bytes:
    """SHA-256 over names, dtypes, shapes and samples of all tensors of the checkpoint in directory `path`.

    Raises:
        ConfigError: there is no checkpoint, or it is malformed.
    """
    shards = [(file, wanted, *read_header(file)) for file, wanted in checkpoint_shards(path).items()]
    num_tensors = sum(len(stored if wanted is None else wanted) for _, wanted, _, stored in shards)
    num_samples = max(max_samples // max(num_tensors, 1), 1)
    digests: dict[str, bytes] = {}
    for file, wanted, data_start, stored in shards:
        tensors = {name: tensor for name, tensor in stored.items() if wanted is None or name in wanted}
        try:
            digests |= _sample(file, data_start, tensors, num_samples)
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error}") from None
    whole = hashlib.sha256()
    for name, digest in sorted(digests.items()):
        _add(whole, name.encode())
        _add(whole, digest)
    return whole.digest()


def _sample(
    file: Path, data_start: int, tensors: Mapping[str, StoredTensor], num_samples: int
) -> dict[str, bytes]:
    """Digest of each tensor of one file."""
    places: dict[str, list[tuple[int, int]]] = {}
    for name, tensor in tensors.items():
        begin, end = (data_start + offset for offset in tensor.data_offsets)
        places[name] = [
            (begin + offset, min(SAMPLE_BYTES, end - begin - offset))
            for offset in sample_offsets(end - begin, num_samples)
        ]
    with file.open("rb") as handle:
        if hasattr(os, "posix_fadvise"):  # the kernel fetches them side by side
            for each in places.values():
                for offset, length in each:
                    os.posix_fadvise(handle.fileno(), offset, length, os.POSIX_FADV_WILLNEED)
        digests = {}
        for name, each in places.items():
            digest = hashlib.sha256(f"{tensors[name].dtype} {tensors[name].shape} ".encode())
            for offset, length in each:
                digest.update(os.pread(handle.fileno(), length, offset))
            digests[name] = digest.digest()
    return digests


def sample_offsets(size: int, num_samples: int) -> list[int]:
    """Where the samples of a tensor of `size` bytes begin: its first and its last bytes and evenly between; one behind
    another if that covers it; with a single sample its middle."""
    if size <= num_samples * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    last = size - SAMPLE_BYTES
    if num_samples == 1:
        return [last // 2]
    return [last * index // (num_samples - 1) for index in range(num_samples)]


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """With its length in front, so that no two sequences of parts read alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
