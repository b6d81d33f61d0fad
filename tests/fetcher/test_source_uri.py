"""Source URIs: what parses to what, what is refused, and that no message repeats a credential."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_fetcher.errors import InvalidSource
from argosy_fetcher.source_uri import REMOTE, SourceUri, from_argument, gguf_of, parse
from argosy_fetcher.sources.registry import SOURCES

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "scheme", "location", "revision"),
    [
        ("hf://Qwen/Qwen3-0.6B", "hf", "Qwen/Qwen3-0.6B", ""),
        ("hf://Qwen/Qwen3-0.6B@main", "hf", "Qwen/Qwen3-0.6B", "main"),
        ("hf://a/b@refs/pr/12", "hf", "a/b", "refs/pr/12"),
        ("hf://a/b@" + "0f" * 20, "hf", "a/b", "0f" * 20),
        ("s3://models/qwen/8b/", "s3", "models/qwen/8b", ""),
        ("s3://models", "s3", "models", ""),
        ("s3://models/a@b c", "s3", "models/a@b c", ""),
        ("gs://my_models/qwen", "gs", "my_models/qwen", ""),
        ("oci://registry.example.com/team/qwen", "oci", "registry.example.com/team/qwen", ""),
        ("oci://127.0.0.1:5000/qwen:v1.2", "oci", "127.0.0.1:5000/qwen", "v1.2"),
        ("oci://[::1]:5000/qwen", "oci", "[::1]:5000/qwen", ""),
        (f"oci://host/a/b-c@sha256:{DIGEST}", "oci", "host/a/b-c", f"sha256:{DIGEST}"),
        (f"oci://host/a:v1@sha256:{DIGEST}", "oci", "host/a", f"sha256:{DIGEST}"),
        ("https://Example.com/m/SHA256SUMS", "https", "example.com/m/SHA256SUMS", ""),
        ("http://127.0.0.1:8000/SHA256SUMS", "http", "127.0.0.1:8000/SHA256SUMS", ""),
        ("http://localhost/m/SHA256SUMS", "http", "localhost/m/SHA256SUMS", ""),
        ("http://[::1]:80/m/SHA256SUMS", "http", "[::1]:80/m/SHA256SUMS", ""),
        ("file:///models/qwen", "file", "/models/qwen", ""),
        ("pvc://claim/models/qwen", "pvc", "claim/models/qwen", ""),
        ("builtin://tiny", "builtin", "tiny", ""),
    ],
)
def test_a_source_is_scheme_location_and_revision(
    text: str, scheme: str, location: str, revision: str
) -> None:
    uri = parse(text)
    assert (uri.scheme, uri.location, uri.revision) == (scheme, location, revision)
    assert uri.is_remote == (scheme in REMOTE)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Qwen/Qwen3-0.6B", "must begin with one of hf://, s3://"),
        ("ftp://host/model", "must begin with one of hf://, s3://"),
        ("HF://a/b", "must begin with one of"),
        ("hf://gpt2", "must be hf://ORG/NAME .*: gpt2 is openai-community/gpt2"),
        ("hf://gpt2@main", "gpt2 is openai-community/gpt2"),
        ("hf://a/b/c", "must be hf://ORG/NAME"),
        ("hf://../b", "must be hf://ORG/NAME"),
        ("hf://a/.b", "must be hf://ORG/NAME"),
        ("hf://a/b@", "must be a branch, a tag or a commit"),
        ("hf://a/b@..", "must be a branch, a tag or a commit"),
        ("hf://a/b@refs/../x", "must be a branch, a tag or a commit"),
        ("hf://a/b@-x", "must be a branch, a tag or a commit"),
        ("hf://a/b@main:Q4_K_M", "must be a branch.*; a GGUF file of it is ORG/NAME:QUANT@REVISION"),
        ("hf://a/b:", "must be hf://ORG/NAME .*or hf://ORG/NAME:QUANT for a GGUF file"),
        ("hf://a/b:Q4/x", "must be hf://ORG/NAME"),
        ("hf://a/b:" + "q" * 97, "must be hf://ORG/NAME"),
        ("hf://a/b@x y", "must be a branch, a tag or a commit"),
        ("hf://a/b@" + "x" * 256, "must be a branch, a tag or a commit"),
        ("hf://a/b\n", "control characters"),
        ("s3://ab", "is no name of a bucket"),
        ("s3://Bucket/x", "is no name of a bucket"),
        ("s3:///x", "'' is no name of a bucket: give s3://BUCKET/PREFIX, where BUCKET is three or more"),
        ("s3://a..b/x", "is no name of a bucket"),
        ("s3://bucket/a/../b", "an empty or a dotted part"),
        ("gs://bucket/a//b", "an empty or a dotted part"),
        ("oci://qwen", "must be oci://HOST"),
        ("oci://host/Qwen", "must be oci://HOST"),
        ("oci://host/a//b", "must be oci://HOST"),
        ("oci://host/a@sha256:1234", "must be oci://HOST"),
        ("oci://host/" + "a" * 256, "must be oci://HOST"),
        ("https://", "has no host"),
        ("https://[::1/x", "malformed"),
        ("https://host:99999/x", "malformed"),
        ("https://host/x/SHA256SUMS#sha1=12", "without a query and a fragment"),
        ("https://host/x/SHA256SUMS?v=1", "without a query and a fragment"),
        (
            f"https://host/m.tar.gz#sha256={DIGEST}",
            "Archives are not read over https://: unpack .* SHA256SUMS",
        ),
        ("https://host/m/", "must be https://HOST/PATH/SHA256SUMS"),
        ("http://example.com/x", "loopback addresses only; use https://"),
        ("http://127.0.0.1.example.com/x", "loopback addresses only"),
        ("file://", "nothing follows"),
        ("builtin://", "nothing follows"),
        ("hf://a/" + "b" * 5000, "at most 4096 characters"),
    ],
)
def test_what_is_refused_and_why(text: str, reason: str) -> None:
    with pytest.raises(InvalidSource, match=reason):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@host/x",
        "https://host/x?token=hunter2#bad",
        "http://example.com/x?token=hunter2",
        "s3://AKIA:hunter2@bucket/x/../y",
        "gs://AKIA:hunter2@bucket/x",
        "oci://user:hunter2@host/x",
        "hf://hunter2@huggingface.co/a/b",
        "ftp://user:hunter2@host/x",
        "hf://a/b?token=hunter2",
    ],
)
def test_messages_repeat_no_credential(text: str) -> None:
    with pytest.raises(InvalidSource) as refusal:
        parse(text)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "hf://a/b",
        "hf://a/b@main",
        "hf://a/b:Q4_K_M",
        "hf://a/b:UD-Q4_K_XL@refs/pr/1",
        "s3://bucket/x",
        "oci://host:5000/a/b",
        "oci://host/a:v1",
        f"oci://host/a@sha256:{DIGEST}",
        "https://host/x/SHA256SUMS",
        "file:///x",
    ],
)
def test_text_of_a_source_parses_to_the_same_source(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


@given(st.sampled_from([f"{scheme}://" for scheme in REMOTE]), st.text(max_size=60))
def test_any_text_parses_or_is_refused(scheme: str, rest: str) -> None:
    try:
        uri = parse(scheme + rest)
    except InvalidSource:
        return
    assert str(uri).isprintable()
    assert ".." not in uri.location.split("/") or uri.scheme in ("https", "http")


def test_a_bare_name_is_the_hub_unless_a_directory_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_argument("Qwen/Qwen3-0.6B@main") == SourceUri("hf", "Qwen/Qwen3-0.6B", "main")
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert from_argument("Qwen/Qwen3-0.6B") == SourceUri("file", "Qwen/Qwen3-0.6B")
    assert from_argument("hf://Qwen/Qwen3-0.6B") == SourceUri("hf", "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    "text", ["/models/qwen", "./qwen", "~/qwen", "qwen", "a/b/c", "a/", "a\0b/c", "x" * 9000]
)
def test_other_bare_names_are_directories(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_argument(text) == SourceUri("file", text)


@pytest.mark.parametrize(
    ("text", "revision", "result"),
    [
        ("hf://a/b", "v1", "hf://a/b@v1"),
        ("hf://a/b@v1", "v1", "hf://a/b@v1"),
        ("hf://a/b@v1", "", "hf://a/b@v1"),
        ("oci://host/a", "v1", "oci://host/a:v1"),
        ("oci://host/a", f"sha256:{DIGEST}", f"oci://host/a@sha256:{DIGEST}"),
        ("s3://bucket/x", "", "s3://bucket/x"),
    ],
)
def test_a_revision_may_be_given_apart(text: str, revision: str, result: str) -> None:
    assert str(parse(text).at_revision(revision)) == result


@pytest.mark.parametrize(
    ("text", "revision", "reason"),
    [
        ("hf://a/b@v1", "v2", "names another revision"),
        ("hf://a/b", "../x", "must be a branch"),
        ("oci://host/a", "a/b", "must be a tag or sha256:DIGEST"),
        ("s3://bucket/x", "v1", "has no revisions"),
        ("file:///x", "v1", "has no revisions"),
    ],
)
def test_a_revision_that_cannot_be_is_refused(text: str, revision: str, reason: str) -> None:
    with pytest.raises(InvalidSource, match=reason):
        parse(text).at_revision(revision)


def test_every_remote_scheme_has_a_source() -> None:
    assert set(SOURCES) == set(REMOTE)


@pytest.mark.parametrize("revision", ["", "v1"])
def test_a_quantisation_is_part_of_the_name(revision: str) -> None:
    uri = parse("hf://a/b:q4_k_m" + (f"@{revision}" if revision else ""))
    assert (uri.location, uri.quantization, uri.revision) == ("a/b", "Q4_K_M", revision)
    assert uri.name == "hf://a/b:Q4_K_M"
    assert parse("hf://a/b:Q4_K_M").at_revision("v1").name == uri.name
    assert from_argument(str(uri).removeprefix("hf://")) == uri
    assert gguf_of(uri.name) == gguf_of(f"{uri.name}?endpoint=http://h:1/x") == "Q4_K_M"
    assert gguf_of("hf://a/b?endpoint=http://h:1") == gguf_of("oci://h:1/a:Q4_K_M") == ""
    file = parse("s3://bucket/a/b-Q4_K_M.gguf")
    assert file.is_gguf
    assert gguf_of(file.name) == gguf_of(f"{file.name}?endpoint=http://h:1/x") == "b-Q4_K_M.gguf"
    for other in ("s3://bucket/a.gguf/b", "gs://bucket", "https://h/a.gguf", "file:///a.gguf"):
        assert not gguf_of(other)
