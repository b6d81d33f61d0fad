"""Config fetch: a model's directory without weights, for engines that make up their own.

Owns which files are read. Must not know what they are used for, or the store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from argosy_fetcher.disk import disk_errors
from argosy_fetcher.model_fetch import checked_snapshot
from argosy_fetcher.range_reader import read_whole
from argosy_fetcher.retry import Attempts, RetryPolicy, retrying
from argosy_fetcher.selection import MAX_SMALL_FILE_BYTES, MAX_TOKENIZER_BYTES, CheckConfig, select
from argosy_fetcher.snapshot import RemoteFile, Snapshot
from argosy_fetcher.sources.source import Source


def fetch_configs(
    source: Source,
    directory: Path,
    *,
    check_config: CheckConfig | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Snapshot | None:
    """Fill an empty directory with a model's config and tokenizer, and return what the source holds.

    Args:
        check_config: raises if a config.json is of a model that the caller does not serve.
        note: takes a line about something that takes time.

    Returns:
        None if the source holds an archive, whose files cannot be read apart.

    Raises:
        UnsupportedModel: the model is not served.
        FetchError, TransientError: from the source.
    """

    def attempts(what: str) -> Attempts:
        return Attempts(f"{source.name}: {what}", RetryPolicy(), note)

    snapshot = checked_snapshot(retrying(attempts("list of files"), source.snapshot), source.name)
    if any(file.packing != "none" for file in snapshot.files):
        return None
    contents: dict[str, bytes] = {}

    def read_small(file: RemoteFile) -> bytes:
        if file.path not in contents:
            contents[file.path] = read_whole(source, file, MAX_SMALL_FILE_BYTES, attempts(file.path))
        return contents[file.path]

    files = select(snapshot, read_small, check_config, has_weights=False)
    with disk_errors(source.name, directory):
        for file in files:
            (directory / file.path).parent.mkdir(exist_ok=True)
            content = contents.get(file.path)
            if content is None:
                content = read_whole(source, file, MAX_TOKENIZER_BYTES, attempts(file.path))
            (directory / file.path).write_bytes(content)
    return snapshot
