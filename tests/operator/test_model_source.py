"""Sources in manifests against the fetcher's parser: what a manifest may have, the fetcher understands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from argosy_fetcher.errors import InvalidSource
from argosy_fetcher.source_uri import LOCAL, REMOTE, parse
from argosy_resource.model import (
    FETCH_CREDENTIALS,
    FETCH_ENV,
    LOCAL_SCHEMES,
    REMOTE_SCHEMES,
    image_reference,
    is_remote,
)
from manifests_table import REFUSED_SOURCES, REMOTE_SOURCES


def test_schemes_are_the_fetchers_but_for_loopback() -> None:
    assert set(REMOTE_SCHEMES) == set(REMOTE) - {"http"}
    assert set(LOCAL_SCHEMES) == set(LOCAL)


def is_refused(source: str) -> bool:
    try:
        parse(source)
    except InvalidSource:
        return True
    return False


def test_the_fetcher_parses_what_a_manifest_may_have() -> None:
    refused = [source for source in REMOTE_SOURCES if is_refused(source) or not parse(source).is_remote]
    assert refused == []
    assert [source for source in REMOTE_SOURCES if not is_remote(source)] == []


def test_the_fetcher_refuses_what_a_manifest_must_not_have() -> None:
    assert [source for source in REFUSED_SOURCES if not is_refused(source)] == []


@pytest.mark.parametrize("source", ["pvc://models/a", "file:///models/a", "builtin://tiny"])
def test_local_sources_are_not_fetched(source: str) -> None:
    assert not is_remote(source)
    assert image_reference(source) is None


def test_every_credential_of_the_guide_is_refused_where_it_has_no_effect() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    table = re.findall(r"^\| `[a-z0-9]+://` \|.*$", guide.partition("## Credentials")[2], re.MULTILINE)
    named = set(re.findall(r"`([A-Z0-9]+_[A-Z0-9_]+)[`=]", "\n".join(table[:5])))
    settings = {"HF_HOME", "AWS_REGION", "OCI_REGISTRY", "ARGOSY_HTTPS_HOST"}  # of no use alone
    assert "HF_TOKEN" in named
    assert named - settings <= {*FETCH_CREDENTIALS, *FETCH_ENV}


def test_an_image_is_named_as_runtimes_do() -> None:
    assert image_reference("oci://registry.example:5000/a/b:v1") == "registry.example:5000/a/b:v1"
