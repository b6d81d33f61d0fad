"""A model's folder: resolves `builtin://tiny`, `file:///path` or a directory, and finds files that are missing or
damaged without reading the weights.

Must not know torch, which `argosy doctor` and the command line go without, nor how remote models are fetched
(`frontend.model_source`): core and workers read directories only. Whether the tensors fit config.json is checked by a
load (`weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from argosy_engine.checkpoint.gguf_folder import SUFFIX
from argosy_engine.checkpoint.shards import checkpoint_shards, read_header
from argosy_engine.checkpoint.tokenizer_files import TokenizerMode, prepare_tokenizer
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.model_config import may_not_read, permission_fault, read_json
from argosy_fetcher.errors import FetchError
from argosy_fetcher.progress import printable
from argosy_fetcher.selection import TOKENIZER
from argosy_fetcher.store import ModelHold, hold_model

_MAX_NAMED = 6
"""Files that an error message lists, and tensors of a file."""

_MAX_NAME = 128
"""Characters of a tensor's name that an error message shows."""

_PACKAGE = Path(__file__).resolve().parent.parent
_BUILTIN = {"tiny": "argosy-tiny"}


def resolve_model(source: str) -> Path:
    """Return the model's directory, which has a config.json.

    Raises:
        ConfigError: unknown scheme or built-in name, no directory, or one without a config.json.
    """
    scheme, separator, rest = source.partition("://")
    if separator and scheme == "builtin":
        return _resolve_builtin(rest)
    if separator and scheme != "file":
        raise ConfigError(
            f"model source {source!r} is not on this machine; give a directory, file:// or builtin://tiny"
        )
    path = Path(rest if separator else source).expanduser()
    try:
        has_config = (path / "config.json").is_file()
    except PermissionError:
        raise may_not_read(path, path / "config.json") from None
    if not has_config and (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"model {source!r}: {path} is an adapter{_base_of(path)}, and adapters are not served yet; merge it into "
            f"its base model (peft's merge_and_unload, then save_pretrained) and serve that, {OTHER_ENGINES}"
        )
    if not has_config:
        old_name = (
            "" if "/" in source else ", where old names have an organisation too: openai-community/gpt2"
        )
        what = "has no config.json" if path.is_dir() else "is no directory"
        if path.suffix == SUFFIX and path.is_file():
            raise ConfigError(
                f"model {source!r}: a GGUF file is served by `argosy serve {path}` only, by itself"
            )
        raise ConfigError(
            f"model {source!r}: {path} {what}; give a directory in Hugging Face's layout, "
            f"or hf://ORG/NAME for a repository of the hub{old_name}"
        )
    return path


def _base_of(adapter: Path) -> str:
    """What an adapter's config says it belongs to, for a message."""
    try:
        base = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    except ConfigError:
        return ""
    return f" of {base[:200]}" if isinstance(base, str) and base.isprintable() else ""


def _resolve_builtin(name: str) -> Path:
    folder = _BUILTIN.get(name)
    if folder is None:
        raise ConfigError(f"unknown built-in model {name!r}; there is: {', '.join(sorted(_BUILTIN))}")
    installed = _PACKAGE / "builtin" / folder
    checkout = _PACKAGE.parent.parent / "models" / folder
    for path in (installed, checkout):
        if (path / "config.json").is_file():
            return path
    raise ConfigError(f"built-in model {name!r} is missing from this installation")


def hold_stored_model(path: Path) -> ModelHold | None:
    """Keep a model of the fetcher's store from being removed while its engine runs. None if it is not of a store.

    Raises:
        ConfigError: it is being removed.
    """
    try:
        return hold_model(path)
    except FetchError as error:
        raise ConfigError(str(error)) from None


def check_folder(
    path: Path,
    *,
    has_tokenizer: bool = True,
    has_weights: bool = True,
    tokenizer: Path | None = None,
    tokenizer_mode: TokenizerMode = "auto",
) -> None:
    """Check that the files of the model in directory `path` are there and whole.

    Args:
        has_tokenizer: whether the tokenizer has to be there. One that is no tokenizer.json is converted, which takes
            seconds.
        tokenizer: its directory, if it is another (`--tokenizer`).
        has_weights: whether the weights have to be there.

    Raises:
        ConfigError: files are missing or damaged; the message names them.
    """
    faults = [
        *(_tokenizer_faults(tokenizer or path, tokenizer_mode) if has_tokenizer else ()),
        *(_weight_faults(path) if has_weights else ()),
    ]
    if faults:
        more = len(faults) - _MAX_NAMED
        text = "; ".join(faults[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise ConfigError(f"the model in {path} cannot be loaded: {text}")


def _tokenizer_faults(path: Path, mode: TokenizerMode) -> Iterator[str]:
    try:
        prepared = prepare_tokenizer(path, mode)
    except PermissionError:
        yield f"the tokenizer: {permission_fault(path)}"
        return
    except ConfigError as error:
        yield str(error).replace(f"{path} has", "it has")
        return
    file = prepared.folder / TOKENIZER
    try:
        msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
    except PermissionError:
        yield f"{TOKENIZER}: {permission_fault(path)}"
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        yield f"{TOKENIZER} is damaged ({error}); copy it again"


def _weight_faults(path: Path) -> Iterator[str]:
    try:
        shards = checkpoint_shards(path)
    except ConfigError as error:
        yield str(error).replace(f"{path} has", "it has")
        return
    for file, wanted in sorted(shards.items()):
        if fault := _file_fault(file, wanted or set()):
            yield fault


def _file_fault(file: Path, wanted: set[str]) -> str:
    """What is wrong with a file of weights; empty if nothing is.

    Args:
        wanted: the tensors that the index lists for it.
    """
    if not file.is_file():
        return f"{file.name} is missing; copy it again"
    try:
        file.open("rb").close()
    except PermissionError:
        return f"{file.name}: {permission_fault(file.parent)}"
    try:
        start, tensors = read_header(file)
    except ConfigError as error:
        return f"{file.name} is cut off or damaged, copy it again ({str(error).replace(f'{file}: ', '')})"
    size, whole = (
        file.stat().st_size,
        start + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0),
    )
    if size != whole:
        return f"{file.name} has {size} bytes instead of {whole}; copy it again"
    if missing := sorted(wanted - tensors.keys()):
        more = len(missing) - _MAX_NAMED
        names = ", ".join(printable(name[:_MAX_NAME]) for name in missing[:_MAX_NAMED])
        names += f" and {more} more" if more > 0 else ""
        return f"{file.name} lacks tensors that the index lists ({names}); copy it and the index again"
    return ""
