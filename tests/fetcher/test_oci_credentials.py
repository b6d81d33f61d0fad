"""Credentials for registries: where they are found, which entry is taken, and what is never said."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from argosy_fetcher.errors import InvalidSource
from argosy_fetcher.sources.oci_http import CredentialLookup, find_credential
from argosy_fetcher.sources.registry import MAX_CREDENTIAL_BYTES, ImageReference

REFERENCE = ImageReference("registry.example", "team/models/qwen", "v1")


def login(username: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{username}:{password}".encode()).decode()}


def auths(**entries: Any) -> str:
    """An auth file with these entries."""
    return json.dumps({"auths": entries})


def find(values: Mapping[str, str], reference: ImageReference = REFERENCE) -> CredentialLookup:
    return find_credential(reference, values)


def pair(found: CredentialLookup) -> tuple[str, str]:
    assert found.credential is not None
    return found.credential.username, found.credential.password


def test_the_environment_comes_first(tmp_path: Path) -> None:
    values = {
        "OCI_REGISTRY": "registry.example",
        "OCI_USERNAME": "ada",
        "OCI_PASSWORD": "s3cret",
        "DOCKER_AUTH_CONFIG": auths(**{"registry.example": login("other", "x")}),
    }
    found = find(values)
    assert pair(found) == ("ada", "s3cret")
    assert found.credential
    assert found.credential.basic == "Basic " + base64.b64encode(b"ada:s3cret").decode()


@pytest.mark.parametrize("registry", ["Registry.Example", "https://registry.example/", "docker.io"])
def test_the_environment_is_for_one_registry(registry: str) -> None:
    values = {"OCI_REGISTRY": registry, "OCI_USERNAME": "ada", "OCI_PASSWORD": "s3cret"}
    assert (find(values).credential is None) == (registry == "docker.io")
    alias = ImageReference("docker.io", "team/qwen")
    assert (find(values, alias).credential is None) == (registry != "docker.io")


@pytest.mark.parametrize(
    ("given", "missing"), [("OCI_USERNAME", "OCI_PASSWORD"), ("OCI_PASSWORD", "OCI_USERNAME")]
)
def test_half_of_the_credentials_is_an_error(given: str, missing: str) -> None:
    with pytest.raises(InvalidSource, match=f"{missing} is not set") as caught:
        find({given: "s3cret"})
    assert "s3cret" not in str(caught.value)


def test_auth_files_are_found_in_their_order(tmp_path: Path) -> None:
    explicit, folder, home = tmp_path / "auth.json", tmp_path / "docker", tmp_path / "home"
    explicit.write_text(auths(**{"registry.example": login("explicit", "1")}))
    folder.mkdir()
    (folder / "config.json").write_text(auths(**{"registry.example": login("folder", "2")}))
    (home / ".docker").mkdir(parents=True)
    (home / ".docker" / "config.json").write_text(auths(**{"registry.example": login("home", "3")}))
    values = {
        "DOCKER_AUTH_CONFIG": auths(**{"registry.example": login("content", "0")}),
        "REGISTRY_AUTH_FILE": str(explicit),
        "DOCKER_CONFIG": str(folder),
        "HOME": str(home),
    }
    order = []
    for name in ("DOCKER_AUTH_CONFIG", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "HOME"):
        order.append(pair(find(values))[0])
        del values[name]
    assert order == ["content", "explicit", "folder", "home"]
    assert find(values).credential is None


def test_a_file_without_an_entry_leaves_it_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(auths(**{"registry.example": login("ada", "1")}))
    values = {
        "DOCKER_AUTH_CONFIG": auths(**{"other.example": login("x", "y")}),
        "DOCKER_CONFIG": str(tmp_path),
    }
    assert pair(find(values))[0] == "ada"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["registry.example"], 0),
        (["https://registry.example"], 0),
        (["https://registry.example/v1/"], 0),
        (["Registry.Example"], 0),
        (["registry.example", "registry.example/team"], 1),
        (["registry.example/team", "registry.example/team/models"], 1),
        (["registry.example/team/models/qwen", "registry.example"], 0),
        (["registry.example/te", "registry.example/team/models/qwen2"], None),
        (["registry.example:5000", "example", "evil-registry.example"], None),
    ],
)
def test_the_entry_that_names_most_of_the_path_is_taken(keys: list[str], expected: int | None) -> None:
    entries = {key: login(f"user-{position}", "x") for position, key in enumerate(keys)}
    found = find({"DOCKER_AUTH_CONFIG": auths(**entries)}).credential
    assert (found and found.username) == (None if expected is None else f"user-{expected}")


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io", "registry-1.docker.io"])
def test_docker_hub_is_one_host_with_several_names(key: str) -> None:
    reference = ImageReference("docker.io", "library/qwen")
    assert pair(find({"DOCKER_AUTH_CONFIG": auths(**{key: login("ada", "x")})}, reference)) == ("ada", "x")


def test_forms_of_entries() -> None:
    def found(entry: Mapping[str, Any] | None) -> CredentialLookup:
        return find({"DOCKER_AUTH_CONFIG": auths(**{"registry.example": entry})})

    assert pair(found({"username": "ada", "password": "x:y"})) == ("ada", "x:y")
    assert pair(found(login("ada", "x:y\0\0"))) == ("ada", "x:y")
    assert found({}).credential is None
    assert found(None).credential is None
    token = found({**login("00000000-0000", ""), "identitytoken": "t0ken"}).credential
    assert token
    assert (token.identity_token, token.basic) == ("t0ken", "")


@pytest.mark.parametrize(
    "config",
    [
        {"credHelpers": {"registry.example": "ecr-login"}},
        {"credsStore": "ecr-login", "auths": {"registry.example": {}}},
        {
            "credsStore": "other",
            "credHelpers": {"registry.example": "ecr-login"},
            "auths": {"registry.example": {}},
        },
    ],
)
def test_a_credential_helper_is_not_run_and_the_remedy_says_so(config: Mapping[str, Any]) -> None:
    found = find({"DOCKER_AUTH_CONFIG": json.dumps(config)})
    assert found.credential is None
    assert "'ecr-login'" in found.remedy
    assert "OCI_USERNAME and OCI_PASSWORD" in found.remedy


def test_a_store_of_other_hosts_is_not_mentioned() -> None:
    config = {"credsStore": "desktop", "auths": {"other.example": {}}}
    found = find({"DOCKER_AUTH_CONFIG": json.dumps(config)})
    assert found.credential is None
    assert "desktop" not in found.remedy
    assert "docker login registry.example" in found.remedy


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"s3cret",
        b'{"auths": "s3cret"}',
        b'{"auths": {"registry.example": {"auth": 17}}, "s3cret": 1}',
        b'{"auths": {"registry.example": {"auth": "s3cret!"}}}',
        b'{"auths": {"registry.example": {"auth": "//8="}}}',
        b'{"credsStore": "\xff s3cret"}',
        b'{"auths": {}, "x": ' + b"[" * 100_000,
        b" " * (MAX_CREDENTIAL_BYTES + 1),
    ],
    ids=lambda content: f"{len(content)}-bytes",
)
def test_a_malformed_auth_file_is_an_error_that_names_the_file_and_no_content(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "auth.json"
    path.write_bytes(content)
    with pytest.raises(InvalidSource, match=r"REGISTRY_AUTH_FILE .*auth\.json") as caught:
        find({"REGISTRY_AUTH_FILE": str(path)})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("content", [b"s3cret", b'{"auths": {"registry.example": {"auth": "s3cret!"}}}'])
def test_a_malformed_auth_file_that_nobody_named_does_not_matter(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ".docker" / "config.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert find({"HOME": str(tmp_path)}).credential is None
    assert f"{path}: " in caplog.text
    assert "it is not used" in caplog.text
    assert "s3cret" not in caplog.text
    with pytest.raises(InvalidSource):
        find({"DOCKER_CONFIG": str(path.parent)})


def test_a_named_auth_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidSource, match="No such file"):
        find({"REGISTRY_AUTH_FILE": str(tmp_path / "missing")})
    assert find({"HOME": str(tmp_path), "DOCKER_CONFIG": str(tmp_path)}).credential is None


def test_secrets_are_not_part_of_a_repr() -> None:
    entry = {**login("ada", "s3cret"), "identitytoken": "t0ken"}
    found = find({"DOCKER_AUTH_CONFIG": auths(**{"registry.example": entry})})
    assert found.credential is not None
    assert "s3cret" not in repr(found)
    assert "t0ken" not in repr(found)
