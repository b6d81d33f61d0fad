"""Selection: which files of a model are served, and so fetched.

Owns the names of files that an engine reads. Must not know how content arrives or where it is kept.
Invariants: weights are safetensors, or one GGUF file that a source names; formats that can carry code are never
selected; what is selected, an engine loads.

Reads config.json and the index of the weights, so that a model that cannot be served is refused before its weights are
fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final, TypeAlias

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.gguf_files import choose_gguf, gguf_remedy
from argosy_fetcher.source import RemoteFile, Snapshot, check_path
from argosy_fetcher.source_uri import gguf_of

MAX_SMALL_FILE_BYTES: Final = 16 << 20
"""Bound on files that are read into memory. The index of a model with 100,000 tensors has 10 MB."""
CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
TOKENIZER: Final = "tokenizer.json"
TEKKEN: Final = "tekken.json"
"""Mistral's own form of a tokenizer."""
MAX_TOKENIZER_BYTES: Final = 256 << 20
"""Far more than any tokenizer has."""
_TOKENIZERS: Final = re.compile(
    r"tokenizer\.json|tekken\.json|tokenizer\.model(\.v[0-9]{1,3}(m[0-9]{1,3})?)?|[A-Za-z0-9_.-]{1,64}\.tiktoken|tiktoken\.model"
)
"""Files that a tokenizer may be read from: Hugging Face's, Mistral's two, SentencePiece's and tiktoken's."""
COMPANIONS: Final = (
    "generation_config.json",
    "hf_quant_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
)
"""Files next to config.json that are fetched if they exist."""
_POOLING: Final = re.compile(r"[0-9]{1,2}_Pooling/config\.json")
"""File of sentence-transformers that says how a model pools; `modules.json` names its folder. No other file in a folder
is fetched."""
_OTHER_FORMATS: Final = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_NOT_THE_MODEL: Final = ("consolidated", "adapter_model")
"""Beginnings of the names of safetensors files that repeat the weights in another layout, or are not weights of the
model itself."""

ReadSmall: TypeAlias = Callable[[RemoteFile], bytes]
CheckConfig: TypeAlias = Callable[[dict[str, Any]], None]


def select(
    snapshot: Snapshot,
    read_small: ReadSmall,
    check_config: CheckConfig | None = None,
    *,
    has_weights: bool = True,
) -> tuple[RemoteFile, ...]:
    """Return the files to fetch, small ones first. Of a source that names a quantisation it is one GGUF file, which has
    config and tokenizer in it and may be in parts.

    Args:
        read_small: returns a file's content, of at most `MAX_SMALL_FILE_BYTES`.
        check_config: raises if a config.json is of a model that the caller does not serve.
        has_weights: False leaves the weights out, which need not be there.

    Raises:
        UnsupportedModel: files are missing, or the weights are in a format that is not served.
        FetchError, TransientError: from `read_small`.
    """
    files = {file.path: file for file in snapshot.files}
    if gguf := gguf_of(snapshot.source):
        return tuple(files[check_path(path)] for path in choose_gguf(snapshot.source, gguf, files))
    config = files.get(CONFIG)
    if config is None:
        raise UnsupportedModel(f"{snapshot.source} has no {CONFIG}{_config_remedy(snapshot.source, files)}")
    content = _json_object(snapshot.source, CONFIG, read_small(config))
    if check_config is not None:
        check_config(content)
    if not any(_TOKENIZERS.fullmatch(path) for path in files):
        raise UnsupportedModel(f"{snapshot.source} has no {TOKENIZER}; {tokenizer_remedy(files)}")
    companions = [files[name] for name in COMPANIONS if name in files]
    companions += [
        files[path] for path in sorted(files) if path not in COMPANIONS and _TOKENIZERS.fullmatch(path)
    ]
    companions += [files[path] for path in sorted(files) if _POOLING.fullmatch(path)]
    weights = _weights(snapshot.source, files, read_small) if has_weights else ()
    selected = (config, *companions, *weights)
    for file in selected:
        check_path(file.path)
    return selected


def tokenizer_remedy(names: Container[str]) -> str:
    """Return what to do about a model without a tokenizer that is read.

    Args:
        names: of the model's files.
    """
    if "vocab.json" in names or "vocab.txt" in names:
        what = "its vocabulary becomes one with transformers"
    else:
        what = "write one with transformers"
    return f"{what}: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)"


def is_pooling_folder(name: str) -> bool:
    """Whether a folder of this name may have a file that is served."""
    return _POOLING.fullmatch(f"{name}/{CONFIG}") is not None


def is_served_name(name: str) -> bool:
    """Whether a file of this name, without its folder, may belong to what is served. For archives, whose index cannot
    be read before they are unpacked."""
    is_tokenizer = _TOKENIZERS.fullmatch(name) is not None
    return name in (CONFIG, INDEX, *COMPANIONS) or is_tokenizer or _is_weight(name)


def _weights(source: str, files: Mapping[str, RemoteFile], read_small: ReadSmall) -> Iterator[RemoteFile]:
    if (index := files.get(INDEX)) is not None:
        yield index
        for name in _shards(source, read_small(index)):
            if name not in files:
                raise UnsupportedModel(
                    f"{source} lacks {name}, which its {INDEX} names; the upload is incomplete: {_another(source)}"
                )
            yield files[name]
    elif SINGLE in files:
        yield files[SINGLE]
    else:
        raise UnsupportedModel(f"{source} has no {SINGLE}{_weights_remedy(source, files)}")


def _is_weight(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(_NOT_THE_MODEL)


def _shards(source: str, index: bytes) -> list[str]:
    """Return the names of the files that an index lists."""
    weight_map = _json_object(source, INDEX, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModel(f"{source}: {INDEX} has no weight_map; {_another(source)}")
    names = set()
    for name in weight_map.values():
        # A shard is a file next to its index; anything else could read outside the model's directory.
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise UnsupportedModel(
                f"{source}: {INDEX} names {str(name)[:200]!r}; shards are .safetensors files in its own folder"
            )
        names.add(check_path(name))
    return sorted(names)


def _json_object(source: str, name: str, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{source}: {name} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{source}: {name} is not a JSON object")
    return value


def _config_remedy(source: str, files: Mapping[str, RemoteFile]) -> str:
    folders = sorted(path.removesuffix(f"/{CONFIG}") for path in files if path.endswith(f"/{CONFIG}"))
    if folders:
        return f", but {', '.join(map(ascii, folders[:3]))} has: {_folder_remedy(source)}"
    if any(path.endswith(".gguf") for path in files):
        return _gguf_remedy(source, files)
    if "adapter_config.json" in files:
        return "; it is an adapter: serve the model that it adapts"
    return "; give a model in Hugging Face's layout"


def _folder_remedy(source: str) -> str:
    """Say how a folder of a source is served. Only those whose URIs have paths can name it."""
    scheme, _, location = source.partition("?")[0].partition("://")
    if scheme == "hf":
        return (
            f"download it (hf download {location} --include 'FOLDER/*' --local-dir DIRECTORY), and serve "
            "DIRECTORY/FOLDER"
        )
    if scheme in ("s3", "gs"):
        return f"add the folder to the source: {source.partition('?')[0]}/FOLDER"
    if scheme in ("https", "http"):
        return "put a SHA256SUMS into that folder (sha256sum * > SHA256SUMS), and give its URL"
    return "push that folder as the model"


def _weights_remedy(source: str, files: Mapping[str, RemoteFile]) -> str:
    shards = [path for path in files if "/" not in path and _is_weight(path)]
    if len(shards) == 1:
        return f", only {shards[0]!a}, which no {INDEX} names; rename it to {SINGLE} in a copy"
    if shards:
        return (
            f" and no {INDEX} that says which of its {len(shards)} safetensors files belong together; the upload is "
            f"incomplete: {_another(source)}"
        )
    suffixes = sorted({PurePosixPath(path).suffix for path in files} & set(_OTHER_FORMATS))
    if suffixes == [".gguf"]:
        return _gguf_remedy(source, files)
    if suffixes:
        another = "use a revision or a repository with safetensors, or " if source.startswith("hf://") else ""
        return (
            f" but {', '.join(suffixes)} files; only safetensors are served, because other formats can carry code or "
            f"are not in Hugging Face's layout: {another}convert it with transformers: save_pretrained(DIRECTORY)"
        )
    return f"; the upload is incomplete: {_another(source)}"


def _gguf_remedy(source: str, files: Mapping[str, RemoteFile]) -> str:
    if source.startswith("hf://") and (remedy := gguf_remedy(source.partition("?")[0], files)):
        return remedy
    if source.startswith(("s3://", "gs://")):
        name = next(path for path in sorted(files) if path.endswith(".gguf"))
        return f"; it has GGUF files: add the name of one to the source, such as {name[:200]!a}"
    return (
        "; GGUF files are fetched from hubs and buckets: serve one on this machine, or the repository that it was made "
        "from"
    )


def _another(source: str) -> str:
    """Say what to try instead. Only hubs and registries have revisions."""
    scheme = source.partition("://")[0]
    if scheme == "hf":
        return "use another revision"
    return "use another tag" if scheme == "oci" else "upload all of it again"
