"""A real container registry for tests: go-containerregistry's, built once from its Go module into a cache folder.

`oci_registry_server/go.mod` pins its version; `go get MODULE@VERSION && go mod tidy` there changes it. The folder of
the binary is named by a hash of the sources, so that a new version never meets an old binary.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from oci_artifacts import digest_of
from prepared_files import prepared_files

SOURCES = Path(__file__).parent / "oci_registry_server"
BUILD_TIMEOUT = 600.0
"""Download and compilation: seconds on a desktop, minutes on a loaded machine."""
_USUAL_GO = Path("/usr/local/go/bin/go")


def find_go() -> str | None:
    """Return the path of the go command; None if there is none."""
    return shutil.which("go") or (str(_USUAL_GO) if _USUAL_GO.exists() else None)


def built_registry(go: str) -> Path:
    """Return the server's binary, built at the first call on a machine.

    `python -m go_registry` does so before tests begin.
    """
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = prepared_files() / f"oci-registry-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    binary = folder / "oci_registry_server"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two test runs the second finds it built
        if not binary.exists():
            staging = folder / "staging"
            command = [go, "build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-o", str(staging), "."]
            done = subprocess.run(
                command,
                cwd=SOURCES,
                env={**os.environ, "CGO_ENABLED": "0"},
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT,
                check=False,
            )
            assert done.returncode == 0, f"{' '.join(command)} in {SOURCES}:\n{done.stderr[-4000:]}"
            staging.rename(binary)
    return binary


class GoRegistry:
    """A running registry, which tests push to over HTTP."""

    def __init__(self, host: str, port: int, login: tuple[str, str] | None) -> None:
        self.host = f"{host}:{port}"
        self._http = httpx.Client(base_url=f"http://{self.host}", auth=login, timeout=30.0)

    def add_blob(self, repository: str, content: bytes) -> None:
        started = self._http.post(f"/v2/{repository}/blobs/uploads/")
        location = httpx.URL(self._check(started, 202).headers["Location"])
        upload = location.copy_merge_params({"digest": digest_of(content)})
        self._check(self._http.put(upload, content=content), 201)

    def add_manifest(self, repository: str, reference: str, media_type: str, content: bytes) -> None:
        url = f"/v2/{repository}/manifests/{reference or digest_of(content)}"
        self._check(self._http.put(url, content=content, headers={"Content-Type": media_type}), 201)

    def close(self) -> None:
        self._http.close()

    @staticmethod
    def _check(response: httpx.Response, status: int) -> httpx.Response:
        assert response.status_code == status, (
            f"{response.request.url}: {response.status_code} {response.text}"
        )
        return response


@contextmanager
def running_go_registry(
    binary: Path, login: tuple[str, str] | None = None, host: str = "127.0.0.1"
) -> Iterator[GoRegistry]:
    """Run a registry until the block ends.

    Args:
        login: user name and password that it requires.
        host: address to listen on.
    """
    env = {"REGISTRY_HOST": host}
    if login is not None:
        env |= {"REGISTRY_USERNAME": login[0], "REGISTRY_PASSWORD": login[1]}
    with subprocess.Popen(
        [str(binary)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env}
    ) as process:
        try:
            assert process.stdout is not None
            registry = GoRegistry(host, int(process.stdout.readline()), login)
            try:
                yield registry
            finally:
                registry.close()
        finally:
            process.terminate()


if __name__ == "__main__":
    command = find_go()
    print("there is no Go: nothing is built" if command is None else built_registry(command))
