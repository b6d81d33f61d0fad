"""Range reader: reads ranges of a source's files exactly, across cuts.

Owns what a range is made of: the bytes asked for, in order, no more and no less. Must not know disks or threads. A
response that trickles counts as cut, and what it brought does not count as progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from argosy_fetcher.digests import matches
from argosy_fetcher.errors import HashMismatch, TransientError, UnsupportedModel
from argosy_fetcher.minimum_rate import MinimumRate
from argosy_fetcher.retry import Attempts
from argosy_fetcher.snapshot import RemoteFile
from argosy_fetcher.sources.source import Chunk, Source


def read_range(
    source: Source, file: RemoteFile, start: int, stop: int, attempts: Attempts
) -> Iterator[memoryview]:
    """Yield the bytes [start, stop) of a file, and continue after cuts from what has arrived.

    Raises:
        FetchError: from the source.
        TransientError: there was no progress for too long.
        Cancelled: `attempts` was cancelled.
    """
    position = start
    while position < stop:
        failure = TransientError("the connection ended early")
        try:
            rate = MinimumRate(attempts.clock)
            for view in _chunks(source.read(file, position, stop), stop - position):
                attempts.check_cancelled()
                position += view.nbytes
                if rate.add(view.nbytes):
                    attempts.progressed()
                yield view
                rate.resume()
        except TransientError as error:
            failure = error
        except (ConnectionError, TimeoutError) as error:
            failure = TransientError(str(error) or type(error).__name__)
        if position < stop:
            attempts.failed(failure)


def _chunks(chunks: Iterator[Chunk], expected_bytes: int) -> Iterator[memoryview]:
    """Yield a source's chunks without empty ones and without what exceeds the expected bytes, then close the source's
    iterator. It is run to its end, after which a connection can be used again."""
    try:
        for chunk in chunks:
            if not expected_bytes:
                return
            view = memoryview(chunk).cast("B")[:expected_bytes]
            if view.nbytes:
                expected_bytes -= view.nbytes
                yield view
    finally:
        if close := getattr(chunks, "close", None):
            with suppress(TransientError):
                close()


def read_whole(source: Source, file: RemoteFile, max_bytes: int, attempts: Attempts) -> bytes:
    """Return a small file's content, checked against its digest.

    Raises:
        UnsupportedModel: it is larger than `max_bytes`.
        HashMismatch: the content was wrong twice.
        FetchError, TransientError: as `read_range`.
    """
    if file.size > max_bytes:
        raise UnsupportedModel(
            f"{source.name}: {file.path} has {file.size} bytes; more than {max_bytes} are not read"
        )
    for _ in range(2):
        data = b"".join(bytes(view) for view in read_range(source, file, 0, file.size, attempts))
        if matches(data, file.digest):
            return data
    raise HashMismatch(mismatch_message(source.name, file))


def mismatch_message(model: str, file: RemoteFile) -> str:
    assert file.digest is not None
    return (
        f"{model}: the content of {file.path} does not have the {file.digest.algorithm} that the source announces "
        f"({file.digest.hex}), twice in a row; a proxy or a mirror may serve damaged content: fetch from another one"
    )
