"""Tokenizer files: which file of a folder the tokenizer is read from, and a tokenizer.json of those that are another.

Owns the choice, its bounds and refusals, and the cache of what was converted. A conversion runs in a process of its own
(`tokenizer_conversion`), because it imports transformers or mistral-common; its result is kept in
$XDG_CACHE_HOME/argosy/tokenizers/KEY/tokenizer.json, of which KEY covers all that it was made of. Must not know torch:
`argosy doctor` and the command line use it.

    tokenizer.json                        read as it is
    tekken.json, tokenizer.model.vN       read by mistral-common; the tokenizer.json has no merges, and only decodes
    tiktoken.model, *.tiktoken            converted by transformers, if the pattern that splits texts is known
    tokenizer.model (SentencePiece)       converted by transformers

Invariant: what cannot be read as its authors do is refused; no code of a checkpoint runs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from argosy_engine.errors import ConfigError, installation
from argosy_engine.native.private_folder import NoPrivateFolder, private_folder
from argosy_fetcher.selection import MAX_TOKENIZER_BYTES, TEKKEN, TOKENIZER, tokenizer_remedy

TokenizerMode = Literal["auto", "hf", "mistral"]
Kind = Literal["tokenizers", "mistral", "sentencepiece", "tiktoken"]

_CONVERSION = "argosy_engine.checkpoint.tokenizer_conversion"
_CONVERSION_TIMEOUT_S = 600
_FORM = "1"
"""Changes when a conversion of the same files has another result."""
_KEPT = 64
"""Conversions that are kept; the ones that were not used for longest are removed."""
_MISTRAL_SENTENCEPIECE = re.compile(r"tokenizer\.model\.v(?P<version>\d{1,3})(?:m\d{1,3})?")
_COMPANIONS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that a conversion may depend on, besides the vocabulary."""
_PACKAGES: dict[Kind, tuple[tuple[str, ...], str]] = {
    "mistral": (("mistral_common",), "mistral"),
    "sentencepiece": (("transformers", "sentencepiece"), "transformers"),
    "tiktoken": (("transformers", "tiktoken"), "transformers"),
}
"""Modules that a kind needs, and the extra that has them."""
_LIBRARIES: dict[Kind, str] = {
    "tokenizers": "tokenizers",
    "mistral": "mistral-common",
    "sentencepiece": "transformers",
    "tiktoken": "transformers",
}


class TokenizerSource(NamedTuple):
    """The file that a tokenizer is read from."""

    kind: Kind
    file: Path

    def __str__(self) -> str:
        is_converted = self.kind in ("sentencepiece", "tiktoken")
        return f"{self.file.name}, {'converted' if is_converted else 'read'} by {_LIBRARIES[self.kind]}"


class PreparedTokenizer(NamedTuple):
    """A tokenizer that can be loaded."""

    folder: Path
    """Has the tokenizer.json."""
    mistral_file: Path | None = None
    """The file that mistral-common encodes with; the tokenizer.json then only decodes."""


def find_tokenizer(path: Path, mode: TokenizerMode = "auto") -> TokenizerSource:
    """Find what the tokenizer in directory `path` is read from, without reading it.

    Args:
        mode: `--tokenizer-mode`. auto takes tokenizer.json where it is, mistral never, hf no file of Mistral's.

    Raises:
        ConfigError: there is none, it is too large, or a library is missing that reads it.
    """
    if not path.is_dir():
        raise ConfigError(
            f"there is no directory {path} with a tokenizer; --tokenizer names one on this machine"
        )
    names = {each.name for each in path.iterdir()}
    source = tokenizer_source(path, names, mode)
    if source is None:
        raise ConfigError(f"{path} has no {_wanted(mode)}; {_remedy(names, mode)}")
    modules, extra = _PACKAGES.get(source.kind, ((), ""))
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{path} has no {TOKENIZER}, and its {source.file.name} is read with {_LIBRARIES[source.kind]}, of which "
            f"{' and '.join(missing)} is missing: {installation(extra)}"
        )
    size = source.file.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ConfigError(
            f"{source.file.name} has {size} bytes, more than {MAX_TOKENIZER_BYTES}; copy it again"
        )
    return source


def prepare_tokenizer(path: Path, mode: TokenizerMode = "auto") -> PreparedTokenizer:
    """Return a tokenizer that can be loaded, converted in a few seconds if its like has not been before.

    Raises:
        ConfigError: as `find_tokenizer`; it cannot be converted, or there is no private folder for the result.
    """
    source = find_tokenizer(path, mode)
    if source.kind == "tokenizers":
        return PreparedTokenizer(path)
    try:
        cache = private_folder("tokenizers")
    except NoPrivateFolder as error:
        raise ConfigError(f"{source.file.name} cannot be converted: {error}") from None
    folder = cache / _key(source)
    if (folder / TOKENIZER).is_file():
        os.utime(folder)
    else:
        _convert(source, cache, folder)
        _prune(cache)
    return PreparedTokenizer(folder, source.file if source.kind == "mistral" else None)


def tokenizer_source(path: Path, names: set[str], mode: TokenizerMode) -> TokenizerSource | None:
    """Return what the tokenizer in directory `path`, of files of these names, is read from; None if it has none."""
    if mode != "mistral" and TOKENIZER in names:
        return TokenizerSource("tokenizers", path / TOKENIZER)
    if mode != "hf":
        if TEKKEN in names:
            return TokenizerSource("mistral", path / TEKKEN)
        versions = {
            int(found["version"]): name for name in names if (found := _MISTRAL_SENTENCEPIECE.fullmatch(name))
        }
        if versions:
            return TokenizerSource("mistral", path / versions[max(versions)])
    if mode == "mistral":
        return None
    ranks = sorted(name for name in names if name == "tiktoken.model" or name.endswith(".tiktoken"))
    if len(ranks) == 1:
        return TokenizerSource("tiktoken", path / ranks[0])
    if "tokenizer.model" in names:
        return TokenizerSource("sentencepiece", path / "tokenizer.model")
    return None


def _wanted(mode: TokenizerMode) -> str:
    if mode == "mistral":
        return f"{TEKKEN} or tokenizer.model.vN, which --tokenizer-mode mistral reads"
    return TOKENIZER


def _remedy(names: set[str], mode: TokenizerMode) -> str:
    if mode == "hf" and TEKKEN in names:
        return f"its {TEKKEN} is read with --tokenizer-mode mistral, or without the flag"
    if mode == "mistral" and TOKENIZER in names:
        return f"leave the flag out, and its {TOKENIZER} is read"
    if mode == "mistral":
        return (
            f"copy its {TEKKEN} from where the model is published, or leave the flag out and give a folder that has a "
            f"{TOKENIZER} with --tokenizer PATH"
        )
    return f"{tokenizer_remedy(names)}, or give a folder that has one with --tokenizer PATH"


def _key(source: TokenizerSource) -> str:
    parts = [_FORM.encode(), source.kind.encode(), source.file.name.encode()]
    parts += [importlib.metadata.version(name).encode() for name in ("tokenizers", _LIBRARIES[source.kind])]
    files = (
        source.file,
        *(source.file.with_name(name) for name in _COMPANIONS if source.kind != "mistral"),
    )
    digest = hashlib.sha256()
    try:
        parts += [file.read_bytes() if file.is_file() else b"" for file in files]
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer in {source.file.parent}: {error.strerror}") from None
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


def _convert(source: TokenizerSource, cache: Path, folder: Path) -> None:
    """
    Raises:
        ConfigError: it cannot be converted.
    """
    made = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    try:
        arguments = source.kind, str(source.file), str(made / TOKENIZER)
        try:
            done = subprocess.run(
                **conversion(_CONVERSION, *arguments), capture_output=True, timeout=_CONVERSION_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise _refused(source, f"it takes more than {_CONVERSION_TIMEOUT_S} s") from None
        if done.returncode or not (made / TOKENIZER).is_file():
            raise _refused(source, reason_of(done.stderr, done.returncode))
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not (folder / TOKENIZER).is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _refused(source: TokenizerSource, reason: str) -> ConfigError:
    return ConfigError(
        f"{source.file} cannot be read by {_LIBRARIES[source.kind]}: {reason}; give a folder with this model's "
        f"{TOKENIZER} with --tokenizer PATH"
    )


def _prune(cache: Path) -> None:
    for folder in least_used(cache, _KEPT):
        shutil.rmtree(folder, ignore_errors=True)


def conversion(module: str, *arguments: str) -> dict[str, Any]:
    """Return the arguments with which `subprocess` runs a module that converts a file by transformers."""
    return {
        "args": [sys.executable, "-P", "-m", module, *arguments],
        "stdin": subprocess.DEVNULL,
        "env": os.environ
        | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"},
    }


def reason_of(errors: bytes, code: int) -> str:
    """Return why a conversion has failed.

    Args:
        errors: what it wrote to standard error.
        code: its exit code.
    """
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:1000] if lines else f"exit code {code}"


def least_used(cache: Path, num_kept: int) -> list[Path]:
    """Return the folders of a cache but those that were used last, by their times of change."""
    folders = [each for each in cache.iterdir() if not each.name.startswith(".")]
    folders.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    return folders[num_kept:]
