"""Endpoint, token, cache and offline mode of a hub, read from credentials."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from huggingface_hub import constants

from argosy_fetcher.errors import AccessDenied, InvalidSource
from argosy_fetcher.source_uri import SourceUri
from argosy_fetcher.sources.hub import MAX_TOKEN_BYTES, HubSource, endpoint, find_token, hub_cache, is_offline
from argosy_fetcher.sources.registry import hub_source_name, name_in_store

ELSEWHERE = {"HF_HOME": "/nonexistent"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("https://hub.example.org", "https://hub.example.org"),
        ("https://hub.example.org/", "https://hub.example.org"),
        (" http://127.0.0.1:8080 ", "http://127.0.0.1:8080"),
        (
            "https://mirror.example.org/api/huggingface/models/",
            "https://mirror.example.org/api/huggingface/models",
        ),
        ("", constants.ENDPOINT),
    ],
)
def test_endpoints_may_have_a_path(given: str, expected: str) -> None:
    assert str(endpoint({"HF_ENDPOINT": given})) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hub.example.org", "must be a URL such as"),
        ("ftp://hub.example.org", "must be a URL such as"),
        ("https://", "must be a URL such as"),
        ("https://[::1", "is not a URL"),
        ("https://user:hidden@hub.example.org", "the address of hub.example.org alone, without credentials"),
        ("https://hub.example.org/?token=hidden", "the address of hub.example.org alone"),
        ("https://hub.example.org/#hidden", "the address of hub.example.org alone"),
    ],
)
def test_malformed_endpoints_are_refused_without_showing_credentials(given: str, message: str) -> None:
    with pytest.raises(InvalidSource, match=message) as caught:
        endpoint({"HF_ENDPOINT": given})
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("", "hf://org/model"),
        ("https://huggingface.co/", "hf://org/model"),
        ("https://HUB.example.org/", "hf://org/model?endpoint=https://hub.example.org"),
        ("http://127.0.0.1:80/hub", "hf://org/model?endpoint=http://127.0.0.1:80/hub"),
    ],
)
def test_a_model_of_another_hub_has_another_name(given: str, name: str) -> None:
    assert hub_source_name("hf://org/model", {"HF_ENDPOINT": given}) == name
    with closing(HubSource(SourceUri("hf", "org/model"), {"HF_ENDPOINT": given})) as source:
        assert source.name == name
    assert name_in_store(SourceUri("hf", "org/model", "v1"), {"HF_ENDPOINT": given}) == (name, "v1")


def test_the_token_is_found_where_its_users_put_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_login\n")
    (tmp_path / "other").write_text("hf_other")
    home = {"HF_HOME": str(tmp_path)}
    assert find_token(home) == "hf_login"
    assert find_token({**home, "HF_TOKEN_PATH": str(tmp_path / "other")}) == "hf_other"
    assert find_token({**home, "HUGGING_FACE_HUB_TOKEN": "hf_old"}) == "hf_old"
    assert find_token({**home, "HUGGING_FACE_HUB_TOKEN": "hf_old", "HF_TOKEN": " hf_new\n"}) == "hf_new"
    assert find_token({**home, "HF_TOKEN": "  "}) == "hf_login"


def test_a_token_may_be_forbidden(tmp_path: Path) -> None:
    assert find_token({"HF_TOKEN": "hf_known", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}) is None


def test_without_a_token_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    assert find_token({"HF_HOME": str(tmp_path)}) is None
    assert find_token(ELSEWHERE) is None


@pytest.mark.parametrize(
    "token", ["hf_a b", "hf_a\nhf_b", "hf_\u00e9", "hf_\x00", "x" * (MAX_TOKEN_BYTES + 1)]
)
@pytest.mark.parametrize("is_file", [False, True])
def test_what_fits_in_no_header_is_refused_without_showing_it(
    tmp_path: Path, token: str, is_file: bool
) -> None:
    (tmp_path / "token").write_text(token)
    credentials = {"HF_HOME": str(tmp_path)} if is_file else {**ELSEWHERE, "HF_TOKEN": token}
    with pytest.raises(AccessDenied, match=r"is not a token") as caught:
        find_token(credentials)
    assert "hf_" not in str(caught.value).replace(str(tmp_path), "")


def test_a_token_s_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(AccessDenied, match="cannot be read"):
        find_token({"HF_HOME": str(tmp_path)})


def test_the_cache_is_where_hugging_face_has_it() -> None:
    assert hub_cache({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}) == Path("/a")
    assert hub_cache({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}) == Path("/b")
    assert hub_cache({"HF_HOME": "/c"}) == Path("/c/hub")
    assert hub_cache({}) == Path(constants.HF_HUB_CACHE)
    assert hub_cache({"HF_HOME": "~/c"}) == Path.home() / "c/hub"


@pytest.mark.parametrize(
    ("credentials", "expected"),
    [
        ({}, False),
        ({"HF_HUB_OFFLINE": "1"}, True),
        ({"HF_HUB_OFFLINE": "true"}, True),
        ({"HF_HUB_OFFLINE": "0"}, False),
        ({"ARGOSY_OFFLINE": "yes"}, True),
        ({"ARGOSY_OFFLINE": ""}, False),
    ],
)
def test_offline_mode_is_read_as_huggingface_hub_does(credentials: dict[str, str], expected: bool) -> None:
    assert is_offline(credentials) == expected
