"""Fetches the source distribution of vLLM whose tests the sample runs, from PyPI, and unpacks its tests.

    python conformance/vllm_sdist.py DIRECTORY

Prints the directory of the distribution, which is fetched once. The exit code is 75 if the index cannot be reached,
answers that it is busy or broken, or ends an answer early.
Must not know: which tests are run. Invariant: nothing is unpacked but an archive with the digest below.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
MAX_BYTES = 200 << 20
TIMEOUT_S = 60
UNREACHABLE = 75
"""EX_TEMPFAIL of sysexits.h."""
_SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"


def fetched(directory: Path, index: str, sha256: str = SHA256) -> Path:
    """Return the directory of the unpacked distribution; fetch it if it is not there.

    Args:
        index: URL of an index with PyPI's simple API in JSON (PEP 691).
        sha256: digest of the archive.

    Raises:
        OSError: the index cannot be reached, or not now.
        ValueError: it has no such archive.
    """
    target = directory / f"vllm-{VERSION}"
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        archive = Path(name) / "archive"
        _download(_url(index, sha256), archive, sha256)
        with tarfile.open(archive) as tar:
            tar.extractall(name, [member for member in tar if _is_needed(member)], filter="data")
        (Path(name) / target.name).rename(target)
    return target


def _url(index: str, sha256: str) -> str:
    request = urllib.request.Request(f"{index.rstrip('/')}/vllm/", headers={"Accept": _SIMPLE_JSON})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        files = json.load(answer)["files"]
    for file in files:
        if file["hashes"].get("sha256") == sha256:
            return str(urllib.parse.urljoin(f"{index.rstrip('/')}/vllm/", file["url"]))
    raise ValueError(f"{index} has no vllm-{VERSION}.tar.gz with the SHA-256 digest {sha256}")


def _download(url: str, path: Path, sha256: str) -> None:
    digest, size = hashlib.sha256(), 0
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, path.open("wb") as file:
        length = answer.headers["Content-Length"]
        while piece := answer.read(1 << 20):
            size += len(piece)
            if size > MAX_BYTES:
                raise ValueError(f"{url} has more than {MAX_BYTES} bytes")
            digest.update(piece)
            file.write(piece)
    if length is not None and size < int(length):  # pieces are read without an error
        raise ConnectionError(f"{url}: the connection ended after {size} of {length} bytes")
    if digest.hexdigest() != sha256:
        raise ValueError(f"{url} has the SHA-256 digest {digest.hexdigest()}, not {sha256}")


def _is_needed(member: tarfile.TarInfo) -> bool:
    top, _, path = member.name.partition("/")
    return top == f"vllm-{VERSION}" and (path == "pyproject.toml" or path.startswith("tests/"))


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: python conformance/vllm_sdist.py DIRECTORY")
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    try:
        print(fetched(Path(sys.argv[1]), index))
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError) and not (error.code == 429 or error.code >= 500):
            sys.exit(f"{error.url}: {error}")
        print(f"{index} cannot be reached ({error}): vLLM's tests are not run", file=sys.stderr)
        return UNREACHABLE
    except ValueError as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
