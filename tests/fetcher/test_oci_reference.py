"""References to registries: hosts, tags, digests, and who is asked without TLS."""

from __future__ import annotations

import pytest

from argosy_fetcher.errors import InvalidSource
from argosy_fetcher.source_uri import parse
from argosy_fetcher.sources.registry import PLAIN_HTTP_ENV, is_plain_http, parse_reference

HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "name", "selector", "requested"),
    [
        ("ghcr.io/org/model", "oci://ghcr.io/org/model", "latest", ""),
        ("ghcr.io/org/model:v1.2", "oci://ghcr.io/org/model", "v1.2", "v1.2"),
        ("GHCR.io/org/model:V1", "oci://ghcr.io/org/model", "V1", "V1"),
        (
            f"ghcr.io/org/model@sha256:{HEX}",
            "oci://ghcr.io/org/model",
            f"sha256:{HEX}",
            f"sha256-{HEX}",
        ),
        (f"ghcr.io/m:v1@sha256:{HEX}", "oci://ghcr.io/m", f"sha256:{HEX}", f"sha256-{HEX}"),
        (f"ghcr.io/m:sha256-{HEX}", "oci://ghcr.io/m", f"sha256:{HEX}", f"sha256-{HEX}"),
        ("localhost/m", "oci://localhost/m", "latest", ""),
        ("localhost:5000/a/b/c:x", "oci://localhost:5000/a/b/c", "x", "x"),
        ("registry:5000/m", "oci://registry:5000/m", "latest", ""),
        ("[::1]:5000/m:x", "oci://[::1]:5000/m", "x", "x"),
        ("docker.io/ai/qwen", "oci://docker.io/ai/qwen", "latest", ""),
        ("docker.io/qwen", "oci://docker.io/library/qwen", "latest", ""),
        ("index.docker.io/ai/qwen", "oci://docker.io/ai/qwen", "latest", ""),
        ("registry-1.docker.io/ai/qwen", "oci://docker.io/ai/qwen", "latest", ""),
    ],
)
def test_references(text: str, name: str, selector: str, requested: str) -> None:
    reference = parse_reference(parse(f"oci://{text}"))
    assert (reference.name, reference.selector, reference.requested_revision) == (name, selector, requested)


def test_docker_hub_answers_at_another_host_than_its_name() -> None:
    assert parse_reference(parse("oci://docker.io/ai/qwen")).api_host == "registry-1.docker.io"
    assert parse_reference(parse("oci://ghcr.io/ai/qwen")).api_host == "ghcr.io"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("ai/qwen", "oci://docker.io/ai/qwen"),
        ("ghcr.io:0/m", "HOST"),
        ("ghcr.io:65536/m", "HOST"),
    ],
)
def test_what_is_no_reference_names_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(InvalidSource, match=remedy):
        parse_reference(parse(f"oci://{text}"))


@pytest.mark.parametrize(
    ("host", "listed", "expected"),
    [
        ("localhost", "", True),
        ("localhost:5000", "", True),
        ("127.0.0.1:5000", "", True),
        ("127.8.9.1", "", True),
        ("[::1]:5000", "", True),
        ("127.0.0.1:443", "", False),
        ("ghcr.io", "", False),
        ("10.0.0.1:5000", "", False),
        ("127.0.0.1.evil.example", "", False),
        ("localhost.evil.example", "", False),
        ("registry:5000", "other:1, Registry:5000", True),
        ("registry:5000", "registry", False),
        ("registry", "registry:80", True),
        ("registry:80", "registry", True),
    ],
)
def test_only_loopback_and_listed_hosts_are_asked_without_tls(host: str, listed: str, expected: bool) -> None:
    assert is_plain_http(host, {PLAIN_HTTP_ENV: listed} if listed else {}) is expected
