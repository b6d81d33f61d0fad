"""A real container registry for tests: go-containerregistry's, built from its Go module `oci_registry_server`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from go_programs import built_program, find_go
from oci_artifacts import digest_of

SOURCES = Path(__file__).parent / "oci_registry_server"


def built_registry(go: str) -> Path:
    """Return the server's binary, built at the first call on a machine.

    `python -m go_registry` does so before tests begin.
    """
    return built_program(go, SOURCES)


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
