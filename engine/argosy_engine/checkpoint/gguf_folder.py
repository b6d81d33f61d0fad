"""A folder in Hugging Face's layout for a GGUF file, made once and kept in $XDG_CACHE_HOME/argosy/gguf/KEY, with
weights widened to the engine's dtype. All that reads a model (loads, fingerprints, `argosy doctor`) reads the folder.

Owns the cache: KEY covers size, time, name and samples of the file or of its parts, the dtype, and the versions of what
converts. The conversion is a process of its own (`gguf_conversion`). Must not know torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from argosy_engine.checkpoint.fingerprint import SAMPLE_BYTES, sample_offsets
from argosy_engine.checkpoint.tokenizer_files import conversion, least_used, reason_of
from argosy_engine.errors import ConfigError, installation
from argosy_engine.native.private_folder import NoPrivateFolder, private_folder
from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.gguf_files import part_paths
from argosy_fetcher.progress import size_text

_CONVERSION = "argosy_engine.checkpoint.gguf_conversion"
_FORM = "2"
"""Changes when a conversion of the same file has another result."""
_KEPT = 4
"""Conversions that are kept; the ones that were not used for longest are removed."""
_NUM_SAMPLES = 1024
_TYPES = "gguf.json"
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SUFFIX = ".gguf"


def _ignore(text: str) -> None: ...


def gguf_file(source: str) -> Path | None:
    """Return the GGUF file that a model's name is, or None."""
    path = Path(source.removeprefix("file://")).expanduser()
    return path if path.suffix == SUFFIX and path.is_file() else None


class Cancelled(Exception):
    """Nobody waits for the conversion."""


def gguf_folder(
    file: Path,
    dtype: str,
    *,
    has_tokenizer: bool = True,
    note: Callable[[str], None] = _ignore,
    cancelled: threading.Event | None = None,
) -> Path:
    """Return the folder of a GGUF file, converted if it has not been before.

    Args:
        dtype: of the weights in the folder: float32, float16 or bfloat16.
        has_tokenizer: False if another tokenizer is used (`--tokenizer`).
        note: takes a line for each tenth of the conversion.
        cancelled: ends the conversion with `Cancelled`.

    Raises:
        ConfigError: the file is refused, a library is missing, or there is no room.
    """
    _check_libraries(file)
    try:
        cache = private_folder("gguf")
    except NoPrivateFolder as error:
        raise ConfigError(f"{file.name} cannot be converted: {error}") from None
    folder = cache / _key(file, dtype, has_tokenizer=has_tokenizer)
    with _locked(cache / f".{folder.name}.lock"):
        if folder.is_dir():
            os.utime(folder)
            return folder
        made = cache / f".converting-{folder.name}"
        shutil.rmtree(made, ignore_errors=True)  # what a start left that was killed: nobody else has the lock
        made.mkdir(mode=0o700)
        try:
            _convert(file, made, dtype, "all" if has_tokenizer else "no tokenizer", note, cancelled)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    _prune(cache, folder)
    return folder


def write_gguf_headers(file: Path, folder: Path, dtype: str, *, has_tokenizer: bool = True) -> None:
    """Write what `gguf_folder` has into an empty folder, except for the data of the weights, which is a hole; and what
    `stored_types` reads. Of the file, only the header and rope_freqs.weight are read.

    Args:
        has_tokenizer: as in `gguf_folder`.

    Raises:
        ConfigError: the file is refused, or a library is missing.
    """
    _check_libraries(file)
    _convert(file, folder, dtype, "headers" if has_tokenizer else "headers, no tokenizer", _ignore, None)


def stored_types(folder: Path) -> dict[str, int]:
    """Return the types of a GGUF file's weights with the bytes that each has in the file, from a folder of
    `write_gguf_headers`; empty if the folder is another."""
    try:
        return msgspec.json.decode((folder / _TYPES).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}


def _check_libraries(file: Path) -> None:
    missing = [name for name in ("gguf", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{file.name} is read with gguf and transformers, of which {' and '.join(missing)} is missing: "
            f"{installation('transformers')}"
        )


def _key(file: Path, dtype: str, *, has_tokenizer: bool) -> str:
    digest = hashlib.sha256()
    try:
        versions = [importlib.metadata.version(name) for name in ("gguf", "transformers")]
        for each in map(file.with_name, part_paths(file.name)):
            status = each.stat()
            parts = [_FORM, each.name, status.st_size, status.st_mtime_ns, dtype, has_tokenizer, *versions]
            digest.update("\0".join(map(str, parts)).encode())
            with each.open("rb") as data:
                for offset in sample_offsets(status.st_size, _NUM_SAMPLES):
                    digest.update(os.pread(data.fileno(), SAMPLE_BYTES, offset))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or file}: {error.strerror}") from None
    except UnsupportedModel as error:
        raise ConfigError(str(error)) from None
    return digest.hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(
    file: Path,
    folder: Path,
    dtype: str,
    what: str,
    note: Callable[[str], None],
    cancelled: threading.Event | None,
) -> None:
    """
    Raises:
        ConfigError: it cannot be converted.
    """
    call = conversion(_CONVERSION, str(file.absolute()), str(folder), _STORED[dtype], what)
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(**call, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            total = done = tenths = 0
            for line in process.stdout:
                if cancelled is not None and cancelled.is_set():
                    raise Cancelled
                kind, _, count = line.partition(" ")
                if kind == "of" and "headers" not in what:
                    total = int(count)
                    _check_room(file, folder, total)
                    note(f"{file.name} is widened to {dtype}, once: {size_text(total)} in {folder.parent}")
                elif kind == "done":
                    done += int(count)
                    if done * 10 // max(total, 1) > tenths:
                        tenths = done * 10 // total
                        note(f"widened {size_text(done)} of {size_text(total)}")
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        errors.seek(0)
        told = errors.read()[-8192:]
    if code:
        raise ConfigError(f"{file} cannot be served: {reason_of(told, code)}")


def _check_room(file: Path, folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(
            f"{file} takes {size_text(num_bytes)} once it is widened, and {folder.parent} has {size_text(free)} left; "
            "set XDG_CACHE_HOME to a folder with more room"
        )


def hold_folder(folder: Path) -> IO[str]:
    """Keep a folder from being removed until the returned file is closed."""
    lock = (folder.parent / f".{folder.name}.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _prune(cache: Path, own: Path) -> None:
    """Remove what was not used for longest, and is not held. Locks stay: somebody may wait for one."""
    for folder in least_used(cache, _KEPT):
        if folder == own:
            continue
        with (cache / f".{folder.name}.lock").open("w") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
